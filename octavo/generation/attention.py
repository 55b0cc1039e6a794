"""Attention over the paged cache, which replaces the attention of the decoder layers.

New keys and values are written to the cache first. In prefill, prompts are concatenated in one row of tokens and each
attends to itself. In a decode step each sequence has one new token. The keys of a prompt are read once for all its
samples, whose queries are stacked; each sequence then attends to its own completion. One softmax in fp32 covers both.
On a GPU a kernel reads the pages in place.
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
    """Attention of concatenated prompts. `where`: the cache rows of their tokens (`Cache.places`)."""

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
        """Return (token of each cell of a [count, longest] grid, cell of each token), or None if all prompts have one
        length.

        Padding comes last and repeats token 0; the causal mask hides it from all tokens."""
        lengths = np.array(self.lengths)
        if (lengths == lengths.max()).all():
            return None
        inside = np.arange(lengths.max()) < lengths[:, None]
        tokens = np.where(inside, np.cumsum(inside).reshape(inside.shape) - 1, 0).reshape(-1)
        device = self.where.device
        return torch.from_numpy(tokens).to(device), torch.from_numpy(np.flatnonzero(inside)).to(device)


@dataclass(frozen=True)
class Shared:
    """The G prompts of B sequences, each shared by at most M sequences.

    tables   pages of the prompts, padded with arbitrary ones (`Cache.tables` of [G, n])
    longest  number of tokens of the longest prompt
    bias     [B, 1, longest]: 0 for the tokens of a sequence's prompt, -inf after its end
    members  [G * M]: the sequences of each prompt, padded with arbitrary ones
    place    [B]: index of each sequence in `members`
    """

    tables: Tensor
    longest: int
    bias: Tensor
    members: Tensor
    place: Tensor

    def spread(self, x: Tensor) -> Tensor:
        """Copy the rows of sequences to their prompts: x [heads, B, R, ...] -> [heads, G, M * R, ...]."""
        return x.index_select(1, self.members).view(len(x), self.tables.shape[1], -1, x.shape[-1])

    def gather(self, x: Tensor, rows: int) -> Tensor:
        """Copy back to sequences, with R = `rows`: x [heads, G, M * R, ...] -> [heads, B, R, ...]."""
        return x.view(len(x), len(self.members), rows, x.shape[-1]).index_select(1, self.place)


@dataclass(frozen=True)
class Decode:
    """Attention of one new token in each of B sequences, which occupy the first B runs of pages.

    where        cache row of each new token (`Cache.places`)
    run          pages per run
    first, last  range of a run's tokens that contains the completions of all sequences
    bias         [B, 1, last - first]: 0 for a sequence's tokens, -inf for others
    shared       the prompts
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
        key_heads, shared = k.shape[1], self.shared
        # Grouped by key head, so that one GEMM covers its query heads: [key heads, B, queries, dim].
        q = q.to(self.cache.dtype).float().mul(scale).view(count, key_heads, -1, dim).transpose(0, 1).contiguous()
        keys, values = self.cache.read_runs(layer, count, self.run, self.first, self.last)
        scores = q @ keys.transpose(2, 3) + self.bias
        common_keys, common_values = (x[:, :, : shared.longest] for x in self.cache.read(layer, shared.tables))
        common = shared.gather(shared.spread(q) @ common_keys.transpose(2, 3), q.shape[2]) + shared.bias
        weights = torch.cat([common, scores], dim=-1).softmax(-1)
        prompt_weights, own_weights = weights.split([common.shape[-1], scores.shape[-1]], dim=-1)
        out = own_weights @ values + shared.gather(shared.spread(prompt_weights) @ common_values, q.shape[2])
        return out.transpose(0, 1).reshape(count, heads, dim).to(self.cache.dtype)


@dataclass(frozen=True)
class PagedDecode:
    """Decode attention by kernels that read pages in place, for R rows, some of which may be empty.

    where    [R]: cache row of the new token; -1 in empty rows
    table    int32 [R, n]: all pages of each sequence in order, padded with arbitrary ones
    lengths  [R]: number of tokens that the new one attends to, including itself; 0 in empty rows
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
    """Decode attention by batch-invariant kernels: each sequence reads its own keys in a fixed order.

    `tables`: all pages of each sequence · `positions` [B, 1]: position of its new token
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
