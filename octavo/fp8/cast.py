"""Quantize and dequantize: the executable specification of every FP8 cast in Octavo.

``value ~ code * scale``, with one scale for each block of the tensor. Per block, with FMAX the format's largest value::

    amax  = max |x|                                    over the block's real elements, in fp32
    scale = amax / FMAX                                scale="fp32"
    scale = smallest power of two s, amax <= FMAX * s  scale="pow2" and "e8m0" (the same s, stored as one byte)
    code  = round_to_nearest_even(clamp(x / scale, -FMAX, FMAX))

A block with a NaN or an infinity becomes NaN altogether: a bad value is never turned into 448. A block whose amax is
below 2^-100 takes the scale 1. There is no other floor, epsilon or reciprocal; that is what keeps gradients of
1e-7 alive. A sign survives, also of a zero and of a value that underflows.

The tensor is seen as [product of leading dimensions, last]. A block (r, c) is r rows by c columns of it; -1 means the
whole dimension, as one block even where the dimension is empty. A ragged last block takes its own elements only.

On the CPU the reference does real training, so the layout of the blocks is worked out once per shape, nothing is padded
that is not ragged, and the rules for bad and for tiny blocks run only where one look at the amax grid finds such a block.
On other devices that look would be a synchronisation; there the rules always run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.fp8.formats import E8M0, FORMATS, NAN_CODE, Format, decode, decode_e8m0

__all__ = [
    "CastError",
    "CastSpec",
    "Quantized",
    "amax",
    "dequantize",
    "quantize",
    "quantize_with_scale",
    "scale_from_amax",
]

SCALES = ("fp32", "pow2", "e8m0")
_INF_BITS = 0x7F800000  # the fp32 pattern of infinity; every NaN lies above it
_NAN_BITS = 0x7FC00000
_ONE_BITS = 0x3F800000
_FLOOR_BITS = 0x0D800000  # 2^-100
_MANTISSA = 0x7FFFFF


class CastError(ValueError):
    """A cast that cannot be described or cannot be done; the message says why and what to do instead."""


@dataclass(frozen=True)
class CastSpec:
    """How one tensor becomes FP8.

    Args:
        format: ``"e4m3"`` or ``"e5m2"``.
        block: (rows, columns) that share one scale, of the tensor as stored; -1 is the whole dimension.
        scale: ``"fp32"`` (amax / FMAX), ``"pow2"`` (the power of two that just fits) or ``"e8m0"`` (the same, one byte).

    Raises:
        CastError: for anything else.
    """

    format: str = "e4m3"
    block: tuple[int, int] = (1, 128)
    scale: str = "pow2"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise CastError(f"CastSpec: format={self.format!r} is not an FP8 format; use one of {', '.join(FORMATS)}.")
        if self.scale not in SCALES:
            raise CastError(f"CastSpec: scale={self.scale!r} is not a kind of scale; use one of {', '.join(SCALES)}.")
        block = self.block
        if not (isinstance(block, tuple) and len(block) == 2 and all(type(n) is int for n in block)):
            raise CastError(f"CastSpec: block={block!r} must be a tuple of two integers (rows, columns), as in (1, 128).")
        if any(n < 1 and n != -1 for n in block):
            raise CastError(f"CastSpec: block={block!r} has a side below 1; use a positive size, or -1 for the whole side.")

    @property
    def fmt(self) -> Format:
        """The facts of ``format``."""
        return FORMATS[self.format]

    def __str__(self) -> str:
        named = {(-1, -1): "tensor", (1, -1): "row", (-1, 1): "column"}
        block = named.get(self.block) or "x".join("all" if n == -1 else str(n) for n in self.block)
        return f"{self.format} {block} {self.scale}"


class Quantized(NamedTuple):
    """FP8 codes with their scales: ``value ~ data * scale``.

    ``data`` has the shape of the tensor it came from and is contiguous; ``scale`` is the dequant multiplier, always,
    [row blocks, column blocks], fp32 or ``float8_e8m0fnu``.
    """

    data: Tensor
    scale: Tensor
    spec: CastSpec


class _Layout(NamedTuple):
    """How a [rows, cols] matrix splits into blocks: the view in which each block is a run of ``dims``."""

    grid: tuple[int, int]
    pad: tuple[int, int, int, int] | None  # as torch.nn.functional.pad wants it; None: nothing is ragged
    padded: tuple[int, int]
    view: tuple[int, ...]
    scale_view: tuple[int, ...]
    dims: tuple[int, ...]
    repeats: tuple[int, int]  # (rows, columns) of one block


@lru_cache(maxsize=4096)
def _layout(rows: int, cols: int, block: tuple[int, int]) -> _Layout:
    r, c = (max(size, 1) if n == -1 else n for n, size in zip(block, (rows, cols), strict=True))
    m, k = (1 if n == -1 else -(-size // b) for n, size, b in zip(block, (rows, cols), (r, c), strict=True))
    empty = rows == 0 or cols == 0
    pad = (0, k * c - cols, 0, m * r - rows) if not empty and (m * r != rows or k * c != cols) else None
    padded = (rows, cols) if pad is None else (m * r, k * c)
    # Fewer dimensions are cheaper to reduce and to broadcast, so each common shape of block has a view of its own.
    if m == 1 and k == 1:
        return _Layout((m, k), pad, padded, padded, (1, 1), (0, 1), (r, c))
    if r == 1:
        return _Layout((m, k), pad, padded, (m, k, c), (m, k, 1), (2,), (r, c))
    if c == 1:
        return _Layout((m, k), pad, padded, (m, r, k), (m, 1, k), (1,), (r, c))
    return _Layout((m, k), pad, padded, (m, r, k, c), (m, 1, k, 1), (1, 3), (r, c))


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """x as a contiguous fp32 matrix [product of leading dimensions, last], off the graph, with its two sizes."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CastError(
            f"Cannot quantize a tensor of {x.dtype}: FP8 casts start from float32, bfloat16 or float16. "
            "Convert it first, for instance with x.float()."
        )
    if x.dim() == 0:
        raise CastError("Cannot quantize a tensor without dimensions: blocks need at least one; use x.reshape(1).")
    x = x.detach()
    cols = x.shape[-1]
    rows = x.numel() // cols if cols else x.shape[:-1].numel()
    if x.dim() != 2:
        x = x.reshape(rows, cols)
    return x.contiguous().float(), rows, cols


def _scales(bits: Tensor, spec: CastSpec) -> tuple[Tensor, Tensor | None]:
    """Scales for a grid of amax bit patterns (int32), fp32, and the mask of bad blocks (None: there are none)."""
    if bits.device.type == "cpu":
        low, high = (int(b) for b in torch.aminmax(bits)) if bits.numel() else (_ONE_BITS, _ONE_BITS)
        some_tiny, some_bad = low < _FLOOR_BITS, high >= _INF_BITS
    else:
        some_tiny = some_bad = True
    if spec.scale == "fp32":
        amax_ = bits.view(torch.float32)
        # A tensor divisor: by a Python number, CUDA would multiply by a rounded reciprocal.
        scale = (amax_ / torch.full_like(amax_, spec.fmt.max)).view(torch.int32)
    else:
        # amax = m * 2^e. Adding 0x1FFFFF carries into the exponent exactly when m > 1.75; dropping the mantissa leaves
        # the power of two. Subtracting p from the exponent field divides by 2^p, where FMAX = 1.75 * 2^p.
        scale = (bits + (0x1FFFFF - (spec.fmt.max_exponent << 23))) & ~_MANTISSA
    bad = None
    if some_tiny:
        scale = scale.masked_fill(bits < _FLOOR_BITS, _ONE_BITS)
    if some_bad:
        bad = bits >= _INF_BITS
        scale = scale.masked_fill(bad, _NAN_BITS)
    return scale.view(torch.float32), bad


def _encode(view: Tensor, scale: Tensor, bad: Tensor | None, spec: CastSpec, clamp: bool) -> Tensor:
    """Codes of a blocked view under broadcastable fp32 scales; blocks in ``bad`` become NaN."""
    if spec.scale == "fp32":
        scaled = view / scale
    else:
        scaled = view * scale.reciprocal()  # exact: the reciprocal of a power of two is one
    if clamp:
        scaled = scaled.clamp_(-spec.fmt.max, spec.fmt.max)
    data = scaled.to(spec.fmt.dtype)
    if bad is not None:
        data.view(torch.uint8).masked_fill_(bad, NAN_CODE)
    return data


def _finish(data: Tensor, scale: Tensor, lay: _Layout, shape: torch.Size, size: tuple[int, int], spec: CastSpec) -> Quantized:
    data = data.view(lay.padded)
    if lay.pad is not None:
        data = data.view(torch.uint8)[: size[0], : size[1]].contiguous().view(spec.fmt.dtype)
    scale = scale.reshape(lay.grid)
    if spec.scale == "e8m0":
        scale = (scale.view(torch.int32) >> 23).to(torch.uint8).view(E8M0)
    return Quantized(data.view(shape), scale, spec)


def quantize(x: Tensor, spec: CastSpec) -> Quantized:
    """Cast ``x`` to FP8 with scales taken from its own blocks.

    Args:
        x: fp32, bf16 or fp16, at least one dimension, any strides; not part of the autograd graph afterwards.
        spec: the format, the block and the kind of scale.

    Returns:
        Codes in the shape of x, scales [row blocks, column blocks].

    Raises:
        CastError: for another dtype, or a tensor without dimensions.
    """
    x_MK, rows, cols = _rows(x)
    lay = _layout(rows, cols, spec.block)
    if not x_MK.numel():
        return _finish(x_MK.to(spec.fmt.dtype), x_MK.new_ones(lay.grid), lay, x.shape, (rows, cols), spec)
    if lay.pad is not None:
        x_MK = torch.nn.functional.pad(x_MK, lay.pad)  # zeros never raise an amax
    view = x_MK.view(lay.view)
    # As integers: comparing bit patterns orders magnitudes, and NaN and infinity win every maximum.
    bits = view.abs().view(torch.int32).amax(lay.dims, keepdim=True)
    scale, bad = _scales(bits, spec)
    # No clamp is needed: amax <= FMAX * scale for powers of two, and amax / (amax / FMAX) exceeds FMAX by an ulp of fp32 at
    # most, which rounds back to FMAX.
    return _finish(_encode(view, scale, bad, spec, clamp=False), scale, lay, x.shape, (rows, cols), spec)


def quantize_with_scale(x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None) -> Quantized:
    """Cast ``x`` with scales given from outside (delayed scaling): values beyond FMAX * scale saturate.

    A NaN or an infinity in a block of x still makes that whole block NaN, scale included.

    Args:
        x: as for :func:`quantize`.
        scale: dequant multipliers, fp32, positive: one element, or [row blocks, column blocks].
        spec: the cast; for ``pow2`` and ``e8m0`` the given scales must be powers of two.
        amax: the amax grid of x where the caller knows it already (for one block: ``amax(x)``); saves a pass.

    Raises:
        CastError: for a wrong dtype of x, or a scale or amax that does not fit the grid of blocks.
    """
    x_MK, rows, cols = _rows(x)
    lay = _layout(rows, cols, spec.block)
    for name, given in (("scale", scale), ("amax", amax)):
        if given is None or given.numel() == 1 or tuple(given.shape) == lay.grid:
            continue
        raise CastError(
            f"quantize_with_scale: {name} has shape {tuple(given.shape)}, but a tensor of {rows} x {cols} under {spec} has "
            f"a grid of {lay.grid[0]} x {lay.grid[1]} blocks; give one {name} per block, or a single one."
        )
    scale = scale.detach().to(device=x.device, dtype=torch.float32).expand(lay.grid) if scale.dim() else (
        scale.detach().to(device=x.device, dtype=torch.float32).reshape(1, 1).expand(lay.grid)
    )
    if not x_MK.numel():
        return _finish(x_MK.to(spec.fmt.dtype), scale.contiguous(), lay, x.shape, (rows, cols), spec)
    if lay.pad is not None:
        x_MK = torch.nn.functional.pad(x_MK, lay.pad)
    view = x_MK.view(lay.view)
    if amax is None:
        bits = view.abs().view(torch.int32).amax(lay.dims, keepdim=True)
    else:
        bits = amax.detach().to(torch.float32).abs().view(torch.int32).expand(lay.grid).reshape(lay.scale_view)
    bad = bits >= _INF_BITS
    scale = scale.reshape(lay.scale_view)
    if x.device.type == "cpu" and not bool(bad.any()):
        return _finish(_encode(view, scale, None, spec, clamp=True), scale, lay, x.shape, (rows, cols), spec)
    scale = scale.masked_fill(bad, float("nan"))
    return _finish(_encode(view, scale, bad, spec, clamp=True), scale, lay, x.shape, (rows, cols), spec)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """fp32(code) * scale, rounded once to ``dtype``, in the shape of ``q.data`` (contiguous)."""
    values = decode(q.data)
    rows, cols = (values.numel() // values.shape[-1] if values.shape[-1] else 0), values.shape[-1]
    if values.numel():
        lay = _layout(rows, cols, q.spec.block)
        scale = scale_fp32(q)
        if tuple(scale.shape) != lay.grid:
            raise CastError(
                f"dequantize: {rows} x {cols} codes under {q.spec} need scales of shape {lay.grid}, found "
                f"{tuple(scale.shape)}; data, scale and spec must come from the same cast."
            )
        if lay.pad is None:
            values.view(lay.view).mul_(scale.view(lay.scale_view))
        else:
            values.view(rows, cols).mul_(_spread(scale, lay, rows, cols))
    return values if dtype is torch.float32 else values.to(dtype)


def _spread(scale: Tensor, lay: _Layout, rows: int, cols: int) -> Tensor:
    """One scale an element, for grids that end in ragged blocks."""
    if lay.repeats[0] > 1:
        scale = scale.repeat_interleave(lay.repeats[0], 0)[:rows]
    if lay.repeats[1] > 1:
        scale = scale.repeat_interleave(lay.repeats[1], 1)[:, :cols]
    return scale


def scale_fp32(q: Quantized) -> Tensor:
    """The scales of q in fp32, whatever they are stored in."""
    return decode_e8m0(q.scale) if q.scale.dtype is E8M0 else q.scale


def amax(x: Tensor) -> Tensor:
    """max |x| over the whole tensor, fp32, no dimensions, on x's device; NaN or inf where x holds one; 0 if x is empty."""
    x = x.detach()
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.abs().amax().float()


def scale_from_amax(amax: Tensor, spec: CastSpec) -> Tensor:
    """The scale that :func:`quantize` gives a block with this amax (fp32, same shape): for delayed scaling.

    NaN where amax is NaN or infinite, 1 where it is below 2^-100.
    """
    return _scales(amax.detach().float().abs().view(torch.int32), spec)[0]
