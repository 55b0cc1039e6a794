"""The key-value cache: pages of a fixed number of tokens, handed out by number, shared by reference.

    codes    [pages * page, heads, dim]  of each layer, for keys and for values
    scales   [pages * page, heads]       fp32, with kv="fp8" alone: one for each token and head, amax / 448

A sequence is a list of page numbers. The samples of a prompt share its pages; the last one, where it is not full, is
copied for each sample but the last to start, since every sample writes its next token there. A sequence is only started
when all pages that it may come to need are free, so that none is ever thrown out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.fp8.arithmetic import CastSpec, quantize
from octavo.generation.errors import GenerationError
from octavo.models import CacheShape

KINDS = ("bf16", "fp8")
_TOKEN_AND_HEAD = CastSpec("e4m3", block=(1, -1), scale="fp32")


def pages_of(tokens: int, page: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page)


class Pool:
    """Which pages are free, and how many sequences hold each of the others."""

    def __init__(self, pages: int) -> None:
        self.holders = np.zeros(pages, dtype=np.int64)
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many free pages, held once; there must be as many."""
        assert count <= self.free, (count, self.free)
        taken = [self._free.pop() for _ in range(count)]
        self.holders[taken] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages once more."""
        self.holders[list(pages)] += 1

    def give(self, pages: Sequence[int]) -> None:
        """Hold pages once less; those that nobody holds are free."""
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                self._free.append(page)


class Cache:
    """Keys and values of all layers in pages, as the compute dtype or as FP8 codes with scales."""

    def __init__(
        self, shape: CacheShape, pages: int, page: int, kind: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        if kind not in KINDS:
            raise GenerationError(f"kv is {kind!r}; it must be {' or '.join(KINDS)}.")
        self.shape, self.pages, self.page, self.kind, self.dtype = shape, pages, page, kind, dtype
        stored = torch.float8_e4m3fn if kind == "fp8" else dtype
        size = (shape.layers, 2, pages * page, shape.heads, shape.dim)
        self.codes = torch.zeros(size, dtype=stored, device=device)  # zeros: what is masked must be numbers
        self.scales = torch.ones(size[:-1], device=device) if kind == "fp8" else None

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def write(self, layer: int, where: Tensor, k: Tensor, v: Tensor) -> None:
        """Keep keys and values [T, heads, dim] of T tokens at `where` [T] (page number times page, plus offset)."""
        for codes, x in zip(self.codes[layer], (k, v), strict=True):
            if self.scales is None:
                codes.index_copy_(0, where, x.to(self.dtype))
        if self.scales is not None:
            for codes, scales, x in zip(self.codes[layer], self.scales[layer], (k, v), strict=True):
                q = quantize(x.reshape(-1, x.shape[-1]).to(self.dtype), _TOKEN_AND_HEAD)
                codes.view(torch.uint8).index_copy_(0, where, q.data.view(torch.uint8).view(x.shape))
                scales.index_copy_(0, where, q.scale.view(x.shape[:-1]))

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, n * page, heads, dim] of the pages in `table` [B, n], in the compute dtype."""
        k, v = (self._gather(codes, table) for codes in self.codes[layer])
        if self.scales is not None:
            ks, vs = (self._gather(scales, table) for scales in self.scales[layer])
            k, v = ((x.float() * s[..., None]).to(self.dtype) for x, s in ((k, ks), (v, vs)))
        return k, v

    def _gather(self, x: Tensor, table: Tensor) -> Tensor:
        rest = x.shape[1:]
        if x.dtype == torch.float8_e4m3fn:  # torch gathers bytes, not FP8
            return self._gather(x.view(torch.uint8), table).view(x.dtype)
        whole = F.embedding(table, x.view(self.pages, -1))  # the quickest gather of rows that torch has on a CPU
        return whole.view(len(table), table.shape[1] * self.page, *rest)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages."""
        there, here = (torch.tensor(x, dtype=torch.int64, device=self.codes.device) for x in (source, target))
        for x in (self.codes.view(torch.uint8), self.scales):
            if x is not None:
                paged = x.view(*x.shape[:2], self.pages, -1)
                paged.index_copy_(2, here, paged.index_select(2, there))
