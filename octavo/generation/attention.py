"""What the decoder's layers call in place of their attention: keep the new keys and values, attend.

Whole prompts attend to themselves; a batch of them stands in one row of tokens. In a decode step each sequence has one
new token. Pages that the samples of a prompt share are read once for all of them, whose queries stand behind each
other there; to its own pages each sequence attends alone. The softmax is over both, in fp32. On a GPU a kernel looks at
all pages of a sequence where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo import fp8
from octavo.generation.pages import Cache


@dataclass(frozen=True)
class Prefill:
    """Attention of prompts that stand behind each other. `where`: the places of their tokens (`Cache.places`)."""

    cache: Cache
    where: Tensor
    lengths: Sequence[int]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.cache.write(layer, self.where, k, v)
        count, longest = len(self.lengths), max(self.lengths)
        inside = None
        if min(self.lengths) < longest:  # rows of one length, padded behind: no query that counts sees the padding
            held = torch.tensor(self.lengths, device=q.device)[:, None]
            place = torch.arange(longest, device=q.device)[None]
            inside = place < held
            index = (place + (held.cumsum(0) - held)) * inside
            q, k, v = (x[index.view(-1)] for x in (q, k, v))
        q, k, v = (x.reshape(count, longest, *x.shape[1:]).transpose(1, 2).to(self.cache.dtype) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        out = out.transpose(1, 2)
        return out.flatten(0, 1) if inside is None else out[inside]


@dataclass(frozen=True)
class Shared:
    """Pages that several sequences hold: G groups of at most M of the B sequences, all pages of a group full.

    `tables`: of their pages, filled up with any (`Cache.tables` of [G, n]) · `bias` [G, 1, n * page]: 0 for the group's
    tokens, -inf behind · `members` [G * M]: which sequences, filled up with any · `place` [B]: where in `members` each
    stands
    """

    tables: Tensor
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
    """Attention of one new token of each of B sequences.

    `where`: its place (`Cache.places`) · `tables`: of the pages that the sequence does not share, in order, filled up
    with any (`Cache.tables` of [B, n]) · `bias` [B, 1, n * page]: 0 for its tokens, -inf behind · `shared`: what it
    shares, if anything
    """

    cache: Cache
    where: Tensor
    tables: Tensor
    bias: Tensor
    shared: Shared | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.cache.write(layer, self.where, k, v)
        count, heads, dim = q.shape
        held = k.shape[1]
        # the queries of a key's head stand together: [heads of keys, B, queries of each, dim]
        q = q.to(self.cache.dtype).float().mul(scale).view(count, held, -1, dim).transpose(0, 1).contiguous()
        keys, values = self.cache.read(layer, self.tables)
        scores = q @ keys.transpose(2, 3) + self.bias
        if (shared := self.shared) is None:
            out = scores.softmax(-1) @ values
        else:
            common_keys, common_values = self.cache.read(layer, shared.tables)
            common = shared.spread(q) @ common_keys.transpose(2, 3) + shared.bias
            both = torch.cat([shared.gather(common, q.shape[2]), scores], dim=-1).softmax(-1)
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
        return fp8.invariant_attention(q, keys, values, scale=scale, positions=self.positions)[:, :, 0]
