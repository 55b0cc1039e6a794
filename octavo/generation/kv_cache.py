"""The key-value cache: pages of a fixed number of tokens, allocated by number, shared by reference.

    codes    [layers, 2 * heads, pages * page, dim]   keys, then values: the compute dtype, or E4M3 with kv="fp8"
    scales   [layers, 2 * heads, pages * page]        fp32, only with kv="fp8": amax / 448 of a token's head

A sequence is a list of page numbers: the full pages of its prompt, which all samples of the prompt share, and its own
run of pages, as long as the longest completion needs. The runs of all slots come first, one after the other; the pages
after them are for prompts. Each sample starts its run with a copy of the prompt's last page if that is partial, because
it writes its next token there. So no sequence is ever evicted for lack of pages, and on a CPU the tokens of all
sequences are read as one block.

On a GPU kernels cast and write the pages and read them in place. Elsewhere torch gathers them first: one large copy
reads memory twice as fast as many small products.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.fp8 import kernels
from octavo.fp8.arithmetic import CastSpec, quantize
from octavo.models import CacheShape

KINDS = ("bf16", "fp8")
PAGE = 8
"""Tokens of a page. On average half a page of what a sequence reads in each step is past its end."""

_HUGE = 1 << 21
_TOKEN_AND_HEAD = CastSpec("e4m3", block=(1, -1), scale="fp32")


def count_pages(tokens: int, page: int) -> int:
    """Return the number of pages for this number of tokens."""
    return -(-tokens // page)


def count_run_pages(new: int, page: int = PAGE) -> int:
    """Return the pages of a sequence's run: for the partial page of the prompt (at most page - 1 tokens) and `new`
    tokens, the last of which is not stored because no later token attends to it."""
    return count_pages(page - 1 + new - 1, page)


def pages_needed(prompt: int, new: int, page: int = PAGE) -> int:
    """Return the pages that one sample needs: pages for its prompt, and a run for `new` tokens."""
    return count_pages(prompt, page) + count_run_pages(new, page)


class Pool:
    """The free pages with numbers from `first`."""

    def __init__(self, first: int, pages: int) -> None:
        self._free = list(range(pages - 1, first - 1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` free pages. The caller checks that there are enough."""
        assert count <= self.free, (count, self.free)
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)


def _zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros. On a CPU they are in huge pages if the system has them, because a step touches thousands of
    scattered rows and would miss the TLB for each."""
    count = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or count < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # an operating system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(size)


class Cache:
    """Keys and values of all layers in pages. `kernels` read and write them on this device; None if torch does."""

    def __init__(
        self, shape: CacheShape, pages: int, page: int, kind: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pages, self.page, self.dtype = pages, page, dtype
        size = (shape.layers, 2 * shape.heads, pages * page, shape.dim)
        # Zeros, because values past a sequence's end are multiplied by a probability of zero, and NaN * 0 is NaN.
        self.codes = _zeros(size, torch.float8_e4m3fn if kind == "fp8" else dtype, device)
        self.scales = torch.zeros(size[:-1], device=device) if kind == "fp8" else None
        self._heads = torch.arange(size[1], device=device)[:, None]
        self.kernels = None if kernels.why_not_paged(device) else kernels.paged_kernels()

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def places(self, where: Tensor) -> Tensor:
        """Return the rows of a layer, [2 * heads * T], for the keys and values of T tokens at `where` [T], which is
        page number times page size plus offset. For kernels, `where` itself is returned."""
        if self.kernels is not None:
            return where
        return (self._heads * (self.pages * self.page) + where).view(-1)

    def tables(self, pages: Tensor) -> Tensor:
        """Return the same for whole pages: page numbers [B, n] -> [2 * heads, B, n]."""
        return self._heads[..., None] * self.pages + pages

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys and values [T, heads, dim] to `places`."""
        if self.kernels is not None:
            self.kernels.write(k, v, places, self.codes[layer], self._scales_of(layer), self.dtype)
            return
        x = torch.cat([k.to(self.dtype), v.to(self.dtype)], dim=1).transpose(0, 1).reshape(-1, k.shape[-1])
        if self.scales is None:
            self.codes[layer].view(-1, x.shape[-1]).index_copy_(0, places, x)
            return
        q = quantize(x, _TOKEN_AND_HEAD)
        codes = self.codes[layer].view(torch.uint8).view(-1, x.shape[-1])  # index_copy_ has no FP8
        codes.index_copy_(0, places, q.data.view(torch.uint8))
        self.scales[layer].view(-1).index_copy_(0, places, q.scale.view(-1))

    def attend(self, layer: int, q: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
        """Compute attention of one query [R, H, dim] for each of R sequences over its `lengths` [R] tokens, in the
        pages of `table` int32 [R, n]. Needs kernels."""
        assert self.kernels is not None
        q = q.to(self.dtype)
        return self.kernels.attend(q, self.codes[layer], self._scales_of(layer), table, lengths, scale, self.page)

    def _scales_of(self, layer: int) -> Tensor | None:
        return None if self.scales is None else self.scales[layer]

    def read(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values fp32 [heads, B, n * page, dim] of the pages in `tables`."""
        if self.scales is None:
            x = self._gather(self.codes[layer], tables).float()
        else:
            codes = self._gather(self.codes[layer].view(torch.uint8), tables).view(self.codes.dtype)
            x = codes.float().mul_(self._gather(self.scales[layer], tables)[..., None])
        k, v = x.chunk(2)
        return k, v

    def read_runs(self, layer: int, count: int, pages: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [heads, count, end - begin, dim] of the tokens from `begin` to `end` in each of the
        first `count` runs of `pages` pages."""

        def part(x: Tensor) -> Tensor:
            run = pages * self.page
            return x[:, : count * run].view(len(x), count, run, *x.shape[2:])[:, :, begin:end]

        x = part(self.codes[layer]).float().contiguous()
        if self.scales is not None:
            x.mul_(part(self.scales[layer])[..., None])
        k, v = x.chunk(2)
        return k, v

    def _gather(self, x: Tensor, tables: Tensor) -> Tensor:
        """x [2 * heads, pages * page, ...] -> [2 * heads, B, n * page, ...]."""
        rows = F.embedding(tables, x.view(len(x) * self.pages, -1))  # the fastest gather of rows on a CPU
        return rows.view(*tables.shape[:2], tables.shape[2] * self.page, *x.shape[2:])

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy whole pages."""
        read, written = (torch.from_numpy(x).to(self.codes.device) for x in (source, target))
        tensors = (self.codes,) if self.scales is None else (self.codes.view(torch.uint8), self.scales)
        for x in tensors:
            paged = x.view(*x.shape[:2], self.pages, -1)
            paged.index_copy_(2, written, paged.index_select(2, read))
