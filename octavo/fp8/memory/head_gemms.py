"""The three GEMMs of a language model head, in blocks of the vocabulary: in high precision or in FP8.

With h [m, H], a block's rows of the weight w [width, H] and the gradient of its logits dx [m, width]::

    product     x = h @ w.T (+ bias)        gradients   dh += dx @ w,   dw = dx.T @ h

In FP8 each block runs the GEMMs of a linear layer (:mod:`octavo.fp8.dense.gemms`), which are cast, cached and reported
under the name of the head. Codes of w are cast once per step and block, codes of h once per forward for both
contractions, and dx in the backward, from the compute dtype. Only codes of h are saved, one byte per value and
contraction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.base import accelerator
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.dense import gemms
from octavo.fp8.dense.gemms import DENSE_OPS, LayerGemms
from octavo.fp8.dense.inputs import Input, QuantizedPair, cast_matrix
from octavo.fp8.observe import recorder
from octavo.fp8.observe.recorder import LayerRecord
from octavo.fp8.weights.cache import WeightSlice

_BLOCK = 128  # the side of the widest blocks of scales


class HeadCall(NamedTuple):
    """Arguments of a forward besides its tensors: ``width`` is the number of weight rows per block, ``low`` the compute
    dtype, ``site`` the FP8 site or None for high precision, ``grad`` whether gradients are enabled."""

    width: int
    low: torch.dtype
    site: LayerGemms | None
    grad: bool


class Head(Protocol):
    """A head in its forward. ``tensors`` are saved, and ``restore(weight, tensors)`` restores the head in backward."""

    @property
    def tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def restore(self) -> Restore: ...

    @property
    def classes(self) -> int:
        """Size of the vocabulary V."""

    def product(self, block: slice, bias: Tensor | None) -> Tensor:
        """Return the logits [m, width] of a block in the compute dtype."""

    def gradients(self, dx: Tensor, block: slice, dh: Tensor | None, dw: Tensor | None) -> None:
        """Add to ``dh`` [m, H] and write ``dw`` [width, H], from dx of the block."""


Restore = Callable[[Any, Sequence[Tensor]], Head]  # (weight or None, saved tensors) -> head


class HighPrecisionHead:
    """GEMMs of a head in high precision, with h [m, H] in the compute dtype."""

    def __init__(self, h: Tensor, weight: Tensor) -> None:
        self.h, self.weight, self.tensors = h, weight, (h,)
        self.classes = weight.shape[0]

    @property
    def restore(self) -> Restore:
        return lambda weight, tensors: HighPrecisionHead(tensors[0], weight)

    def product(self, block: slice, bias: Tensor | None) -> Tensor:
        low = self.h.dtype
        return gemms.high_linear(self.h, self.weight[block].to(low), None if bias is None else bias.to(low))

    def gradients(self, dx: Tensor, block: slice, dh: Tensor | None, dw: Tensor | None) -> None:
        if dh is not None:
            dh += _matmul_wide(dx, self.weight[block].to(self.h.dtype))
        if dw is not None:
            _matmul_into(dw, dx.t(), self.h)


class LogitsHead:
    """Existing logits x [m, V] instead of GEMMs."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.tensors, self.classes = x, (x,), x.shape[1]

    @property
    def restore(self) -> Restore:
        return lambda weight, tensors: LogitsHead(tensors[0])

    def product(self, block: slice, bias: Tensor | None) -> Tensor:
        return self.x[:, block].to(accumulation_dtype(self.x.dtype), copy=True, memory_format=torch.contiguous_format)

    def gradients(self, dx: Tensor, block: slice, dh: Tensor | None, dw: Tensor | None) -> None:
        if dh is not None:
            dh[:, block] = dx


class Fp8Head:
    """GEMMs of a head in FP8, by the recipe of a site; each block is reported and cached like a layer.

    ``codes`` of h are (for fwd, for wgrad). h itself is kept if a GEMM stays in high precision or for metrics.
    """

    def __init__(
        self, weight: Tensor, call: HeadCall, h: Tensor | None, codes: QuantizedPair, seen: list[LayerRecord]
    ) -> None:
        assert call.site is not None
        self.weight, self.call, self.site, self.h, self.codes, self.seen = weight, call, call.site, h, codes, seen
        self.input = None if h is None else Input(h, None, call.low)
        self.classes = weight.shape[0]
        self.is_backward = False  # whether this is the backward, which recomputes logits

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of h that the backward needs."""
        keeps_h = None in self.site.x or any(s.keeps_x for s in self.seen)
        codes = [t for q in self.codes if q is not None for t in (q.data, q.scale)]
        return (*codes, self.h) if keeps_h and self.h is not None else tuple(codes)

    @property
    def restore(self) -> Restore:
        return partial(_restore_head, self.call, [None if q is None else q.spec for q in self.codes], self.seen)

    def product(self, block: slice, bias: Tensor | None) -> Tensor:
        seen = (
            recorder.begin(self.site.name, False, False, True)
            if self.is_backward
            else self.seen[self._block_index(block)]
        )
        part = WeightSlice(rows=(block.start, block.stop))
        low = self.call.low
        return gemms.fwd(self.site, DENSE_OPS, self.input, self.codes[0], self.weight, part, bias, low, seen)[0]

    def gradients(self, dx: Tensor, block: slice, dh: Tensor | None, dw: Tensor | None) -> None:
        site, seen, low = self.site, self.seen[self._block_index(block)], self.call.low
        dx = dx.to(low)  # as a linear layer's dy
        row, col = cast_matrix(dx, site.dy.row if dh is not None else None, site.dy.col if dw is not None else None)
        if dh is not None:
            part = WeightSlice(rows=(block.start, block.stop))
            dh += gemms.dgrad(site, DENSE_OPS, dx, row, self.weight, part, None, dh.dtype, seen)
        if dw is not None:
            x = self.h if self.codes[1] is None else self.codes[1]
            assert x is not None
            dw.copy_(gemms.wgrad(site, DENSE_OPS, dx, col, x, self.h, dw.dtype, seen))

    def _block_index(self, block: slice) -> int:
        return block.start // self.call.width


def _restore_head(
    call: HeadCall, specs: Sequence[CastSpec | None], seen: list[LayerRecord], weight: Tensor, tensors: Sequence[Tensor]
) -> Fp8Head:
    """Restore a head in its backward from the saved tensors."""
    left = list(tensors)
    row, col = (None if spec is None else Quantized(left.pop(0), left.pop(0), spec) for spec in specs)
    head = Fp8Head(weight, call, left.pop() if left else None, (row, col), seen)
    head.is_backward = True
    return head


def begin_head(h: Tensor, weight: Tensor | None, call: HeadCall, needs_grad: Sequence[bool]) -> Head:
    """Begin a forward with h [m, H] in the compute dtype, or with logits h [m, V] if there is no weight."""
    site = call.site
    if weight is None:
        return LogitsHead(h)
    if site is None:
        return HighPrecisionHead(h, weight)
    needs_h, needs_w = (call.grad and needs for needs in needs_grad[:2])
    blocks = len(range(0, weight.shape[0], call.width))
    seen = [recorder.begin(site.name, needs_h, needs_w, call.grad) for _ in range(blocks)]
    return Fp8Head(weight, call, h, cast_matrix(h, site.x.row, site.x.col if needs_w else None), seen)


def fp8_block_width(site: LayerGemms, width: int, size: int, exactly: bool = False) -> int:
    """Return the number of weight rows per block: 128 times a power of two, and never more than in an earlier forward,
    so that codes are cached with one partition and cast once per step. ``exactly``: use ``width`` unchanged."""
    blocks = max(1, width // _BLOCK)
    if not exactly:
        width = min(
            _BLOCK * 2 ** (blocks.bit_length() - 1), _BLOCK * -(-size // _BLOCK), site.codes.block or size + _BLOCK
        )
    if site.codes.block != width:
        site.codes.drop()
        site.codes.block = width
    return width


def accumulation_dtype(low: torch.dtype) -> torch.dtype:
    return torch.float64 if low == torch.float64 else torch.float32


def _matmul_wide(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, accumulated in fp32 (float64 for float64)."""
    wide = accumulation_dtype(b.dtype)
    if a.dtype != wide and accelerator.supports_fp32_product(a.device):
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def _matmul_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute out = a @ b, rounded once to the dtype of out."""
    if out.dtype == b.dtype:
        gemms.high_mm(a.to(b.dtype), b, out)
    else:
        out.copy_(_matmul_wide(a, b))
