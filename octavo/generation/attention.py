"""What the decoder's layers call in place of their attention: keep the new keys and values, attend.

Whole prompts attend to themselves; a batch of them stands in one row of tokens. In a decode step each sequence has one
new token. A prompt is read once for all its samples, whose queries stand behind each other there; to what followed it
each sequence attends alone. The softmax is over both, in fp32. On a GPU a kernel looks at
all pages of a sequence where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.fp8.invariance import batch_invariant_attention
from octavo.generation.kv_cache import Cache


@dataclass(frozen=True)
class Prefill:
    """Attention of prompts that stand behind each other. `where`: the places of their tokens (`Cache.places`)."""

    cache: Cache
    where: Tensor
    lengths: Sequence[int]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.cache.write(layer, self.where, k, v)
        count, longest = len(self.lengths), max(self.lengths)
        if self._padded is not None:
            q, k, v = (x.index_select(0, self._padded[0]) for x in (q, k, v))
        q, k, v = (x.reshape(count, longest, *x.shape[1:]).transpose(1, 2).to(self.cache.dtype) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        out = out.transpose(1, 2).flatten(0, 1)
        return out if self._padded is None else out.index_select(0, self._padded[1])

    @cached_property
    def _padded(self) -> tuple[Tensor, Tensor] | None:
        """Which tokens stand in rows of one length, padded behind with any, and where the tokens stand there; None
        where they are of one length. No query that counts sees the padding."""
        lengths = np.array(self.lengths)
        if (lengths == lengths.max()).all():
            return None
        inside = np.arange(lengths.max()) < lengths[:, None]
        tokens = np.where(inside, np.cumsum(inside).reshape(inside.shape) - 1, 0).reshape(-1)
        device = self.where.device
        return torch.from_numpy(tokens).to(device), torch.from_numpy(np.flatnonzero(inside)).to(device)


@dataclass(frozen=True)
class Shared:
    """The prompts of B sequences: G of them, each with at most M of the sequences.

    `tables`: of their pages, filled up with any (`Cache.tables` of [G, n]) · `longest`: tokens of the longest ·
    `bias` [B, 1, longest]: 0 for the tokens of a sequence's prompt, -inf behind · `members` [G * M]: which sequences,
    filled up with any · `place` [B]: where in `members` each stands
    """

    tables: Tensor
    longest: int
    bias: Tensor
    members: Tensor
    place: Tensor

    def spread(self, x: Tensor) -> Tensor:
        """[heads, G, M * R, ...] of x [heads, B, R, ...]."""
        return x.index_select(1, self.members).view(len(x), self.tables.shape[1], -1, x.shape[-1])

    def gather(self, x: Tensor, rows: int) -> Tensor:
        """[heads, B, R, ...] of x [heads, G, M * R, ...], with R = `rows`."""
        return x.view(len(x), len(self.members), rows, x.shape[-1]).index_select(1, self.place)


@dataclass(frozen=True)
class Decode:
    """Attention of one new token of each of B sequences, which are those of the first B runs.

    `where`: its place (`Cache.places`) · `run`: pages of a run · `first`, `last`: the tokens of runs among which are
    all that follow a prompt · `bias` [B, 1, last - first]: 0 for a sequence's own, -inf for others · `shared`: prompts
    """

    cache: Cache
    where: Tensor
    run: int
    first: int
    last: int
    bias: Tensor
    shared: Shared

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.cache.write(layer, self.where, k, v)
        count, heads, dim = q.shape
        held, shared = k.shape[1], self.shared
        # the queries of a key's head stand together: [heads of keys, B, queries of each, dim]
        q = q.to(self.cache.dtype).float().mul(scale).view(count, held, -1, dim).transpose(0, 1).contiguous()
        keys, values = self.cache.read_runs(layer, count, self.run, self.first, self.last)
        scores = q @ keys.transpose(2, 3) + self.bias
        common_keys, common_values = (x[:, :, : shared.longest] for x in self.cache.read(layer, shared.tables))
        common = shared.gather(shared.spread(q) @ common_keys.transpose(2, 3), q.shape[2]) + shared.bias
        both = torch.cat([common, scores], dim=-1).softmax(-1)
        first, second = both.split([common.shape[-1], scores.shape[-1]], dim=-1)
        out = second @ values + shared.gather(shared.spread(first) @ common_values, q.shape[2])
        return out.transpose(0, 1).reshape(count, heads, dim).to(self.cache.dtype)


@dataclass(frozen=True)
class PagedDecode:
    """The same by kernels that read pages where they lie, for R rows of which some may be nobody's.

    `where` [R]: the new token's place, -1 of nobody's · `table` int32 [R, n]: all pages of each sequence, in order,
    filled up with any · `lengths` [R]: tokens that it sees, the new one included; 0 of nobody's
    """

    cache: Cache
    where: Tensor
    table: Tensor
    lengths: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.cache.write(layer, self.where, k, v)
        return self.cache.attend(layer, q, self.table, self.lengths, scale)


@dataclass(frozen=True)
class InvariantDecode:
    """The same by the attention whose result depends on the sequence alone: its keys in one order, none shared.

    `tables`: of all pages of each sequence · `positions` [B, 1]: of its new token
    """

    cache: Cache
    where: Tensor
    tables: Tensor
    positions: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.cache.write(layer, self.where, k, v)
        keys, values = (x.transpose(0, 1) for x in self.cache.read(layer, self.tables))
        q = q.to(self.cache.dtype)[:, :, None]
        return batch_invariant_attention(q, keys, values, scale=scale, positions=self.positions)[:, :, 0]
