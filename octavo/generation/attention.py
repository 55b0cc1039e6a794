"""What the decoder's layers call in place of their attention: keep the new keys and values, attend.

Whole prompts attend to themselves; a batch of them stands in one row of tokens. In a decode step each sequence has one
new token, which attends to the sequence's pages. Heads that share a key are then queries of that key, so that nothing
is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.generation.pages import Cache


class Attention(Protocol):
    """One forward's attention: `models.Attend`."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, /) -> Tensor: ...


@dataclass(frozen=True)
class Prefill:
    """Attention of prompts that stand behind each other. `where` [T]: the place of each token in the cache."""

    cache: Cache
    where: Tensor
    lengths: Sequence[int]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, /) -> Tensor:
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
class Decode:
    """Attention of one new token of each of B sequences. `where` [B]: its place in the cache · `table` [B, n]: the
    sequence's pages, in order, filled up with any · `bias` [B, 1, 1, n * page]: 0 for its tokens, -inf behind."""

    cache: Cache
    where: Tensor
    table: Tensor
    bias: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, /) -> Tensor:
        self.cache.write(layer, self.where, k, v)
        held_k, held_v = (x.transpose(1, 2) for x in self.cache.read(layer, self.table))
        count, heads, dim = q.shape
        q = q.to(self.cache.dtype).reshape(count, held_k.shape[1], -1, dim)
        out = F.scaled_dot_product_attention(q, held_k, held_v, attn_mask=self.bias, scale=scale)
        return out.reshape(count, heads, dim)
