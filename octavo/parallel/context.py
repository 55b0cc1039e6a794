"""Context parallelism: the tokens of a packed row are split over several ranks, which attend to all of them.

P = U x C ranks share a row of T tokens; rank p = c * U + u has the p-th slice of T/P tokens. Everything except
attention works on single tokens. A layer's attention, with H query heads and H_k key-value heads::

    exchange    U ranks (Ulysses):  [H, T/P]  -> [H/U, T/C]     q, k and v in one all-to-all
    gather      C ranks:            k, v [H_k/U, T/C] -> [H_k/U, T]
    attend      queries of T/C tokens over the keys from the start of their first sample on
    exchange    back:               [H/U, T/C] -> [H, T/P]

Backward reverses the exchanges, sums the gradients of gathered keys and values over the C ranks in fp32, and rounds
them once. With U = P every sum has the same order as in one process. If U does not divide the number of key-value
heads, they are repeated before the exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.fp8.dense import WIRE_FORMAT_KEY, WireFormat
from octavo.parallel.errors import WorldError
from octavo.parallel.world import COLLECTIVE_SHARE, World

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
Group = dist.ProcessGroup | None

# torch 2.13 renamed both collectives and warns about the old names.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Context:
    """The ranks that share rows with this one.

    size     P
    rank     of this process among them
    ulysses  U
    group    all P ranks
    heads    the U ranks that exchange heads; None for one rank
    keys     the C ranks that gather keys and values; None for one rank
    """

    size: int
    rank: int
    ulysses: int
    group: Group = None
    heads: Group = None
    keys: Group = None

    def local_slice(self, length: int) -> slice:
        """Return this rank's slice of a row of `length` tokens. Raises WorldError unless P divides `length`."""
        if length % self.size:
            raise WorldError(
                f"a row of {length} tokens cannot be split over {self.size} ranks: its length must be a multiple of "
                f"{self.size}. data.packing pads packs; give octavo.data.collate_pack the number of ranks"
            )
        tokens = length // self.size
        return slice(self.rank * tokens, (self.rank + 1) * tokens)

    def query_range(self, length: int) -> tuple[int, int]:
        """Return [first, last) of the tokens whose queries this rank has between the two exchanges."""
        tokens = length // self.size * self.ulysses
        number = self.rank // self.ulysses
        return number * tokens, (number + 1) * tokens

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionFn, layer: object = None) -> Tensor:
        """Compute attention of this rank's tokens over the row: q [1, H, T/P, D], k and v [1, H_k, T/P, D] -> [1, T/P,
        H, D].

        ``attention`` maps q [1, H/U, T/C, D] and k, v [1, H_k/U, T, D] to [1, T/C, H/U, D]. If ``layer`` has a coding
        (:mod:`octavo.parallel.wire`), the second exchange sends that output as FP8 codes.
        """
        if self.heads is not None:
            q, k, v = self._to_heads(q, k, v)
        if self.keys is not None:
            k, v = self._gather_keys(k, v)
        out = attention(q, k, v)
        return out if self.heads is None else self._to_tokens(out, getattr(layer, "__dict__", {}).get(WIRE_FORMAT_KEY))

    def exchange_rows(self, rows: Tensor, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        """Send rows to the ranks of the context, `sent[p]` of them to rank p, in order; return the received rows,
        `got[p]` from rank p. Differentiable. Collective call."""
        received: Tensor = _Exchange.apply(rows, self.group, list(sent), list(got), None)
        return received

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks of the context, as a new tensor without a gradient. Collective call."""
        result = tensor.detach().clone()
        dist.all_reduce(result, group=self.group)
        return result

    def _to_heads(self, *qkv: Tensor) -> list[Tensor]:
        """Return each [1, H, T/P, D] -> [1, H/U, T/C, D]."""
        ranks = self.ulysses
        repeated = [_repeat_heads(x, math.lcm(x.shape[1], ranks)) for x in qkv]
        sizes = [(x.shape[1] // ranks, x.shape[3]) for x in repeated]
        sent = torch.cat([_split_by_rank(x, ranks) for x in repeated], -1)
        got: Tensor = _Exchange.apply(sent.flatten(0, 1), self.heads, None, None, None)
        parts = got.split([heads * dim for heads, dim in sizes], -1)
        return [part.unflatten(-1, size).transpose(0, 1)[None] for part, size in zip(parts, sizes, strict=True)]

    def _to_tokens(self, out: Tensor, coding: WireFormat | None) -> Tensor:
        """[1, T/C, H/U, D] -> [1, T/P, H, D]."""
        _, tokens, heads, dim = out.shape
        got: Tensor = _Exchange.apply(out.reshape(tokens, heads * dim), self.heads, None, None, coding)
        local = got.view(self.ulysses, tokens // self.ulysses, heads, dim).transpose(0, 1)
        return local.reshape(1, tokens // self.ulysses, self.ulysses * heads, dim)

    def _gather_keys(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return each [1, H_k/U, T/C, D] -> [1, H_k/U, T, D]."""
        sizes = [(x.shape[1], x.shape[3]) for x in (k, v)]
        got: Tensor = _Gather.apply(torch.cat([x[0].transpose(0, 1).flatten(1) for x in (k, v)], -1), self.keys)
        parts = got.split([heads * dim for heads, dim in sizes], -1)
        return [part.unflatten(-1, size).transpose(0, 1)[None] for part, size in zip(parts, sizes, strict=True)]


def make_context(world: World, ulysses: int | str, heads: int) -> Context | None:
    """Create the context of this rank for a model with ``heads`` query heads; return None if ranks share no rows.

    ``ulysses`` is the value of `parallel.ulysses`. Collective call: all ranks create their groups. Raises WorldError
    if ``ulysses`` does not divide the heads.
    """
    size = world.layout.context
    if size == 1:
        return None
    u = ulysses_size(size, ulysses, heads)
    first, rank = world.rank - world.context_rank, world.context_rank
    wait = timedelta(seconds=COLLECTIVE_SHARE * world.timeout)

    def group(ranks: range) -> Group:
        # Only members create a group: with thousands of ranks, creating every group on every rank takes minutes.
        return dist.new_group(list(ranks), timeout=wait, use_local_synchronization=True) if len(ranks) > 1 else None

    all_ranks = group(range(first, first + size))
    begin = first + rank // u * u
    by_heads = all_ranks if u == size else group(range(begin, begin + u))
    by_keys = all_ranks if u == 1 else group(range(first + rank % u, first + size, u))
    return Context(size, rank, u, all_ranks, by_heads if u > 1 else None, by_keys if u < size else None)


def ulysses_size(size: int, ulysses: int | str, heads: int) -> int:
    """Return U: the number in ``ulysses``, or for "auto" the largest common divisor of context size and query heads.

    Raises WorldError for a number that does not divide both.
    """
    if ulysses == "auto":
        return max(n for n in range(1, size + 1) if size % n == 0 and heads % n == 0)
    ranks = int(ulysses)
    if size % ranks or heads % ranks:
        divided = f"the {size} ranks of a context" if size % ranks else f"the model's {heads} query heads"
        raise WorldError(
            f"parallel.ulysses is {ranks}, which does not divide {divided}. Use a divisor of both, or auto "
            f"({ulysses_size(size, 'auto', heads)} here)"
        )
    return ranks


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[1, H, t, D] -> [1, heads, t, D]: each head repeated heads / H times."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _split_by_rank(x: Tensor, ranks: int) -> Tensor:
    """[1, H, t, D] -> [ranks, t, H / ranks * D]."""
    _, heads, tokens, dim = x.shape
    return x.reshape(ranks, heads // ranks, tokens, dim).transpose(1, 2).reshape(ranks, tokens, -1)


class _Exchange(torch.autograd.Function):
    """All-to-all along dimension 0; `sent` and `got` are the numbers of rows to and from each rank, None for equal
    parts. With a ``coding``, values are sent as FP8 codes; gradients are always sent in their own dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, sent: list[int] | None, got: list[int] | None, coding: WireFormat | None
    ) -> Tensor:
        ctx.splits = group, sent, got
        if coding is None:
            return _all_to_all(x, group, sent, got)
        return coding.unpack(_all_to_all(coding.pack(x), group, sent, got), x.shape[1], x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, sent, got = ctx.splits
        return _all_to_all(grad, group, got, sent), None, None, None, None


class _Gather(torch.autograd.Function):
    """[n, ...] of each rank -> [ranks * n, ...]; gradients are summed over ranks in fp32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        out = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
        _all_gather(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # One rounding after the sum, as in one process, which adds up the contributions of all queries.
        wide = grad.to(torch.float64 if grad.dtype == torch.float64 else torch.float32).contiguous()
        out = wide.new_empty((wide.shape[0] // dist.get_world_size(ctx.group), *wide.shape[1:]))
        _reduce_scatter(out, wide, group=ctx.group)
        return out.to(grad.dtype), None


def _all_to_all(x: Tensor, group: Group, sent: list[int] | None, got: list[int] | None) -> Tensor:
    out = x.new_empty((x.shape[0] if got is None else sum(got), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), got, sent, group=group)
    return out
