"""The key-value cache: pages of a fixed number of tokens, handed out by number, shared by reference.

    codes    [layers, 2 * heads, pages * page, dim]   keys, then values: the compute dtype, or E4M3 with kv="fp8"
    scales   [layers, 2 * heads, pages * page]        fp32, with kv="fp8" alone: amax / 448 of a token's head

A sequence is a list of page numbers: the full pages of its prompt, which all samples of that prompt hold together, and
a run of pages of its own, as long as the longest completion. Runs lie behind each other from the first page on, one for
each slot; the pages behind them are prompts'. Where a prompt's last page is not full, each sample begins its run with a
copy of it, since it writes its next token there. So no sequence is ever thrown out for want of pages, and on a CPU the
tokens of all sequences are read as one block.

On a GPU kernels write the pages, with their casts, and look at them where they lie; elsewhere torch does, and copies
them first: what is copied in one sweep is read from memory twice as fast as by many small products.
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
"""Tokens of a page: of what a sequence reads in each step half a page is behind its end."""

_HUGE = 1 << 21
_TOKEN_AND_HEAD = CastSpec("e4m3", block=(1, -1), scale="fp32")


def pages_of(tokens: int, page: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page)


def run_of(new: int, page: int = PAGE) -> int:
    """Pages of a sequence's own run: what a prompt has beyond full pages, a page less a token at most, and `new`
    tokens, the last of which is not looked back at."""
    return pages_of(page - 1 + new - 1, page)


def pages_needed(prompt: int, new: int, page: int = PAGE) -> int:
    """Pages without which no sample of a prompt of so many tokens can have `new` ones: its prompt's, and its run."""
    return pages_of(prompt, page) + run_of(new, page)


class Pool:
    """The pages from `first` on that are free."""

    def __init__(self, first: int, pages: int) -> None:
        self._free = list(range(pages - 1, first - 1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many free pages; there must be as many."""
        assert count <= self.free, (count, self.free)
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)


def _zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU in the system's huge pages, where it has them: a step touches rows in thousands of places, and
    the processor would look up as many addresses."""
    count = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or count < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(size)


class Cache:
    """Keys and values of all layers in pages. `kernels`: what reads and writes them on this device; None: torch."""

    def __init__(
        self, shape: CacheShape, pages: int, page: int, kind: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pages, self.page, self.dtype = pages, page, dtype
        size = (shape.layers, 2 * shape.heads, pages * page, shape.dim)
        # zeros, since what lies behind a sequence is multiplied by a probability of zero
        self.codes = _zeros(size, torch.float8_e4m3fn if kind == "fp8" else dtype, device)
        self.scales = torch.zeros(size[:-1], device=device) if kind == "fp8" else None
        self._heads = torch.arange(size[1], device=device)[:, None]
        self.kernels = None if kernels.why_not_paged(device) else kernels.paged()

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def places(self, where: Tensor) -> Tensor:
        """Rows of a layer for the keys and values of T tokens: [2 * heads * T], of page number times page plus offset
        `where` [T]. Kernels take the latter."""
        if self.kernels is not None:
            return where
        return (self._heads * (self.pages * self.page) + where).view(-1)

    def tables(self, pages: Tensor) -> Tensor:
        """The same of whole pages: [2 * heads, B, n] of page numbers [B, n]."""
        return self._heads[..., None] * self.pages + pages

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Keep keys and values [T, heads, dim] at `places`."""
        if self.kernels is not None:
            self.kernels.write(k, v, places, self.codes[layer], self._scales_of(layer), self.dtype)
            return
        x = torch.cat([k.to(self.dtype), v.to(self.dtype)], dim=1).transpose(0, 1).reshape(-1, k.shape[-1])
        if self.scales is None:
            self.codes[layer].view(-1, x.shape[-1]).index_copy_(0, places, x)
            return
        q = quantize(x, _TOKEN_AND_HEAD)
        codes = self.codes[layer].view(torch.uint8).view(-1, x.shape[-1])  # torch copies bytes, not FP8
        codes.index_copy_(0, places, q.data.view(torch.uint8))
        self.scales[layer].view(-1).index_copy_(0, places, q.scale.view(-1))

    def attend(self, layer: int, q: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
        """One query [R, H, dim] of each of R sequences over its `lengths` [R] tokens, in the pages of `table` int32
        [R, n]: by the kernels alone."""
        assert self.kernels is not None
        q = q.to(self.dtype)
        return self.kernels.attend(q, self.codes[layer], self._scales_of(layer), table, lengths, scale, self.page)

    def _scales_of(self, layer: int) -> Tensor | None:
        return None if self.scales is None else self.scales[layer]

    def read(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values fp32 [heads, B, n * page, dim] of the pages in `tables`."""
        if self.scales is None:
            x = self._gather(self.codes[layer], tables).float()
        else:
            codes = self._gather(self.codes[layer].view(torch.uint8), tables).view(self.codes.dtype)
            x = codes.float().mul_(self._gather(self.scales[layer], tables)[..., None])
        k, v = x.chunk(2)
        return k, v

    def read_runs(self, layer: int, count: int, pages: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The same [heads, count, end - begin, dim] of the first `count` runs of `pages` pages: their tokens from
        `begin` to `end`."""

        def part(x: Tensor) -> Tensor:
            run = pages * self.page
            return x[:, : count * run].view(len(x), count, run, *x.shape[2:])[:, :, begin:end]

        x = part(self.codes[layer]).float().contiguous()
        if self.scales is not None:
            x.mul_(part(self.scales[layer])[..., None])
        k, v = x.chunk(2)
        return k, v

    def _gather(self, x: Tensor, tables: Tensor) -> Tensor:
        """[2 * heads, B, n * page, ...] of x [2 * heads, pages * page, ...]."""
        rows = F.embedding(tables, x.view(len(x) * self.pages, -1))  # the quickest gather of rows on a CPU
        return rows.view(*tables.shape[:2], tables.shape[2] * self.page, *x.shape[2:])

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy whole pages."""
        there, here = (torch.from_numpy(x).to(self.codes.device) for x in (source, target))
        kept = (self.codes,) if self.scales is None else (self.codes.view(torch.uint8), self.scales)
        for x in kept:
            paged = x.view(*x.shape[:2], self.pages, -1)
            paged.index_copy_(2, here, paged.index_select(2, there))
