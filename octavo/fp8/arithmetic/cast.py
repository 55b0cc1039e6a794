"""Quantize and dequantize: the executable specification of every FP8 cast in Octavo.

``value ~ code * scale``, with one scale per block of the tensor. Let FMAX be the largest value of the format. Then, for
each block::

    amax  = max |x|                                    over the block's real elements, in fp32
    scale = amax / FMAX                                scale="fp32"
    scale = smallest power of two s, amax <= FMAX * s  scale="pow2" and "e8m0" (the same s, stored as one byte)
    code  = round_to_nearest_even(clamp(x / scale, -FMAX, FMAX))

If a block has a NaN or an infinity, all of its codes become NaN: a bad value never becomes 448. A block whose amax is
below 2^-100 gets the scale 1. There is no other floor, epsilon or reciprocal, so that gradients of 1e-7 survive. Signs
are kept, even for zeros and for values that underflow.

The tensor is viewed as a matrix [product of leading dimensions, last]. A block (r, c) has r rows and c columns of it;
-1 means the whole dimension, which is one block even if it is empty. A ragged last block has fewer elements.

Training on the CPU runs on this implementation. Therefore the layout of the blocks is computed once per shape, nothing
is padded (ragged edges are separate parts), and the rules for bad and tiny blocks run only if a check of the amax grid
finds such a block. On other devices this check would synchronize, and the rules always run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.fp8.arithmetic.errors import Fp8Error
from octavo.fp8.arithmetic.formats import E8M0, FORMATS, NAN_CODE, Format, decode, decode_e8m0

SCALES = ("fp32", "pow2", "e8m0")
_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INF_BITS = 0x7F800000  # the fp32 pattern of infinity; every NaN is above it
_NAN_BITS = 0x7FC00000
_ONE_BITS = 0x3F800000
_FLOOR_BITS = 0x0D800000  # 2^-100
_MANTISSA = 0x7FFFFF
_BLOCK_NAMES = {(-1, -1): "tensor", (1, -1): "row", (-1, 1): "column"}
_BLOCKS_BY_NAME = {name: block for block, name in _BLOCK_NAMES.items()}
# Nine digits are enough for any tensor; int() of a long number in a damaged file would take seconds.
_TEXT = re.compile(r"(\w+) (?:([a-z]+)|([0-9]{1,9}|all)x([0-9]{1,9}|all)) (\w+)", re.ASCII)


class CastError(Fp8Error, ValueError):
    """An invalid or unsupported cast. The message has the reason and the fix."""


@dataclass(frozen=True)
class CastSpec:
    """The cast of a tensor to FP8.

    Args:
        format: ``"e4m3"`` or ``"e5m2"``.
        block: (rows, columns) that share one scale, of the tensor as stored; -1 is the whole dimension.
        scale: ``"fp32"`` (amax / FMAX), ``"pow2"`` (the smallest sufficient power of two) or ``"e8m0"`` (the same,
            stored in one byte).

    Raises CastError for other values.
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
            raise CastError(f"CastSpec: block={block!r} must be a tuple of two integers, as in (1, 128).")
        if any(n < 1 and n != -1 for n in block):
            raise CastError(f"CastSpec: block={block!r} has a side below 1; only -1 means the whole side.")

    @cached_property
    def fmt(self) -> Format:
        """The :class:`Format` that ``format`` names."""
        return FORMATS[self.format]

    def __str__(self) -> str:
        block = _BLOCK_NAMES.get(self.block) or "x".join("all" if n == -1 else str(n) for n in self.block)
        return f"{self.format} {block} {self.scale}"

    @classmethod
    def parse(cls, text: str) -> CastSpec:
        """Return the cast from its ``str``, such as "e4m3 1x128 pow2" or "e5m2 tensor fp32". Raises CastError."""
        parts = _TEXT.fullmatch(text)
        if parts is None or (parts[2] is not None and parts[2] not in _BLOCKS_BY_NAME):
            raise CastError(
                f"{text!r} is not a cast; use FORMAT BLOCK SCALE, as in 'e4m3 1x128 pow2', where BLOCK is "
                f"{', '.join(_BLOCKS_BY_NAME)} or ROWSxCOLUMNS (all: the whole side)."
            )
        format, name, rows, cols, scale = parts.groups()
        block = _BLOCKS_BY_NAME[name] if name else (_parse_side(rows), _parse_side(cols))
        return cls(format, block, scale)


def _parse_side(text: str) -> int:
    return -1 if text == "all" else int(text)


class Quantized(NamedTuple):
    """FP8 codes with their scales: ``value ~ data * scale``.

    ``data`` has the shape of the original tensor and is contiguous; ``scale`` is the dequantization multiplier, [row
    blocks, column blocks], fp32 or ``float8_e8m0fnu``.
    """

    data: Tensor
    scale: Tensor
    spec: CastSpec


class Part(NamedTuple):
    """A rectangle of the matrix whose blocks have the same size. The dimensions ``dims`` of ``view`` form a block."""

    rows: slice
    cols: slice
    grid_rows: slice
    grid_cols: slice
    view: tuple[int, ...]
    scale_view: tuple[int, ...]
    dims: tuple[int, ...]


class Layout(NamedTuple):
    """The blocks of a [rows, cols] matrix, in one part, or in two to four parts if the last blocks are ragged."""

    grid: tuple[int, int]
    parts: tuple[Part, ...]  # none if the matrix is empty

    def split(self, *matrices: Tensor, grid: Tensor | None = None) -> list[list[Tensor]]:
        """Return for each part its views of [rows, cols] matrices, followed by its view of a [row blocks, column
        blocks] grid."""
        split, is_single = [], len(self.parts) == 1
        for part in self.parts:
            views = []
            for matrix in matrices:
                views.append((matrix if is_single else matrix[part.rows, part.cols]).view(part.view))
            if grid is not None:
                views.append((grid if is_single else grid[part.grid_rows, part.grid_cols]).view(part.scale_view))
            split.append(views)
        return split


def _spans(size: int, block: int) -> tuple[int, list[tuple[slice, slice, int, int]]]:
    """Return the number of blocks along a side, and spans of whole and ragged blocks: (elements, blocks, number of
    blocks, block size)."""
    if block == -1 or block >= size > 0:
        return 1, [(slice(0, size), slice(0, 1), 1, size)]
    full, rest = divmod(size, block)
    spans = [(slice(0, full * block), slice(0, full), full, block)] if full else []
    if rest:
        spans.append((slice(full * block, size), slice(full, full + 1), 1, rest))
    return full + bool(rest), spans


def _part_view(m: int, r: int, k: int, c: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return view, scale view and block dimensions for m x k blocks of r x c, with as few dimensions as possible, which
    is faster."""
    if m == 1 and k == 1:
        return (r, c), (1, 1), (0, 1)
    if k == 1 and r == 1:
        return (m, c), (m, 1), (1,)
    if m == 1 and c == 1:
        return (r, k), (1, k), (0,)
    if r == 1:
        return (m, k, c), (m, k, 1), (2,)
    if c == 1:
        return (m, r, k), (m, 1, k), (1,)
    return (m, r, k, c), (m, 1, k, 1), (1, 3)


@lru_cache(maxsize=4096)
def layout(rows: int, cols: int, block: tuple[int, int]) -> Layout:
    """Return the blocks of a [rows, cols] matrix. Cached by shape."""
    grid_rows, row_spans = _spans(rows, block[0])
    grid_cols, col_spans = _spans(cols, block[1])
    if not rows or not cols:
        return Layout((grid_rows, grid_cols), ())
    parts = [Part(rs, cs, gr, gc, *_part_view(m, r, k, c)) for rs, gr, m, r in row_spans for cs, gc, k, c in col_spans]
    return Layout((grid_rows, grid_cols), tuple(parts))


def check_castable(x: Tensor) -> None:
    """Raise CastError if x has an unsupported dtype or no dimensions."""
    if x.dtype not in _INPUT_DTYPES:
        raise CastError(
            f"Cannot quantize a tensor of {x.dtype}: FP8 casts start from float32, bfloat16 or float16. "
            "Convert it first, for instance with x.float()."
        )
    if x.dim() == 0:
        raise CastError("Cannot quantize a tensor without dimensions: a block needs at least one; use x.reshape(1).")


def as_matrix(x: Tensor) -> Tensor:
    """Return x as a matrix [product of leading dimensions, last], detached; a view if its strides allow. Raises
    CastError like :func:`check_castable`."""
    if x.dtype not in _INPUT_DTYPES or x.dim() == 0:
        check_castable(x)  # raises the error
    x = x.detach()
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _can_read_values(tensor: Tensor) -> bool:
    """True if Python can read the values without synchronization; a fake tensor has no values."""
    return tensor.device.type == "cpu" and not hasattr(tensor, "fake_mode")


def _scales(bits: Tensor, spec: CastSpec) -> tuple[Tensor, Tensor | None]:
    """Return fp32 scales for a grid of amax bit patterns (int32), and the mask of bad blocks or None if there are
    none."""
    if _can_read_values(bits):
        low, high = torch.aminmax(bits) if bits.numel() else (_ONE_BITS, _ONE_BITS)
        some_tiny, some_bad = bool(low < _FLOOR_BITS), bool(high >= _INF_BITS)
    else:
        some_tiny = some_bad = True
    if spec.scale == "fp32":
        amax_ = bits.view(torch.float32)
        # The divisor is a tensor: for a Python number, CUDA would multiply by a rounded reciprocal.
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


def _amax_bits(magnitude: Tensor, lay: Layout) -> Tensor:
    """Return the grid of amax bit patterns, int32. Patterns are ordered like magnitudes; infinity and NaN are the
    largest."""
    bits = magnitude.view(torch.int32)
    if len(lay.parts) == 1:
        return bits.view(lay.parts[0].view).amax(lay.parts[0].dims).view(lay.grid)
    grid = bits.new_empty(lay.grid)
    for part, (blocks, cells) in zip(lay.parts, lay.split(bits, grid=grid), strict=True):
        torch.amax(blocks, part.dims, keepdim=True, out=cells)
    return grid


def _encode(
    x_MK: Tensor, scale: Tensor, bad: Tensor | None, lay: Layout, spec: CastSpec, buffer: Tensor, clamp: bool
) -> Tensor:
    """Return codes [rows, cols] for a grid of fp32 scales; blocks in ``bad`` become NaN. Overwrites ``buffer``, fp32
    [rows, cols]."""
    if spec.scale == "fp32":
        for x, out, s in lay.split(x_MK, buffer, grid=scale):
            torch.div(x, s, out=out)
    else:
        inverse = scale.reciprocal()  # exact: the reciprocal of a power of two is a power of two
        for x, out, s in lay.split(x_MK, buffer, grid=inverse):
            torch.mul(x, s, out=out)
    if clamp:
        buffer.clamp_(-spec.fmt.max, spec.fmt.max)
    data = buffer.to(spec.fmt.dtype)
    if bad is not None:
        for codes, mask in lay.split(data.view(torch.uint8), grid=bad):
            codes.masked_fill_(mask, NAN_CODE)
    return data


def _e8m0(scale: Tensor) -> Tensor:
    """Convert fp32 powers of two to E8M0, the byte of their exponents."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8).view(E8M0)


def _make_quantized(data: Tensor, scale: Tensor, shape: torch.Size, spec: CastSpec) -> Quantized:
    return Quantized(data.view(shape), _e8m0(scale) if spec.scale == "e8m0" else scale, spec)


def _quantize_fake(x: Tensor, spec: CastSpec) -> Quantized:
    """Return the result of :func:`quantize` for a fake tensor, which has no values. This takes two operations instead
    of twenty, because casts dominate a forward of fake tensors."""
    check_castable(x)
    data = x.detach().new_empty(x.shape, dtype=spec.fmt.dtype)
    grid = layout(x.shape[:-1].numel(), x.shape[-1], spec.block).grid
    return Quantized(data, data.new_empty(grid, dtype=E8M0 if spec.scale == "e8m0" else torch.float32), spec)


def quantize(x: Tensor, spec: CastSpec) -> Quantized:
    """Cast ``x`` to FP8 with scales computed from its blocks.

    Args:
        x: fp32, bf16 or fp16, at least one dimension, any strides; the result is not part of the autograd graph.
        spec: the format, the block and the kind of scale.

    Returns:
        Codes in the shape of x, scales [row blocks, column blocks].

    Raises CastError for other dtypes, and for tensors without dimensions.
    """
    if hasattr(x, "fake_mode"):
        return _quantize_fake(x, spec)
    return _quantize(as_matrix(x).contiguous().float(), x.shape, spec)


def _quantize(x_MK: Tensor, shape: torch.Size, spec: CastSpec) -> Quantized:
    """Cast a contiguous fp32 matrix, and return codes in ``shape``."""
    lay = layout(x_MK.shape[0], x_MK.shape[1], spec.block)
    if not lay.parts:
        return _make_quantized(x_MK.to(spec.fmt.dtype), x_MK.new_ones(lay.grid), shape, spec)
    buffer = x_MK.abs()
    scale, bad = _scales(_amax_bits(buffer, lay), spec)
    # No clamp is needed: amax <= FMAX * scale for powers of two, and amax / (amax / FMAX) exceeds FMAX by at most an
    # fp32 ulp, which rounds back to FMAX.
    data = _encode(x_MK, scale, bad, lay, spec, buffer, clamp=False).view(shape)
    return Quantized(data, _e8m0(scale) if spec.scale == "e8m0" else scale, spec)


def quantize_both(x: Tensor, row: CastSpec, col: CastSpec) -> tuple[Quantized, Quantized]:
    """Cast x under two specs; the result is the same object twice if they are equal. Raises CastError like
    :func:`quantize`."""
    if hasattr(x, "fake_mode"):
        first = _quantize_fake(x, row)
        return first, first if col == row else _quantize_fake(x, col)
    x_MK = as_matrix(x).contiguous().float()
    first = _quantize(x_MK, x.shape, row)
    return first, first if col == row else _quantize(x_MK, x.shape, col)


def quantize_with_scale(x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None) -> Quantized:
    """Cast ``x`` with the given scales (delayed scaling). Values beyond FMAX * scale saturate.

    A NaN or an infinity in a block of x makes the whole block NaN, including its scale.

    Args:
        x: as for :func:`quantize`.
        scale: dequantization multipliers, positive: one element, or [row blocks, column blocks].
        spec: the cast; for ``pow2`` and ``e8m0`` the given scales must be powers of two.
        amax: the amax of each block of x, if known (``amax(x)`` for a block that is the whole tensor); saves a pass.

    Raises CastError for unsupported dtypes of x, and for a scale or amax that does not match the grid of blocks.
    """
    x_MK = as_matrix(x).contiguous().float()
    lay = layout(x_MK.shape[0], x_MK.shape[1], spec.block)
    scale = expand_to_grid("scale", scale, x_MK, lay, spec)
    if not lay.parts:
        return _make_quantized(x_MK.to(spec.fmt.dtype), scale, x.shape, spec)
    if amax is None:
        buffer = x_MK.abs()
        bits = _amax_bits(buffer, lay)
    else:
        buffer = torch.empty_like(x_MK)
        bits = expand_to_grid("amax", amax, x_MK, lay, spec).abs().view(torch.int32)
    bad = bits >= _INF_BITS
    if _can_read_values(bad) and not bool(bad.any()):
        return _make_quantized(_encode(x_MK, scale, None, lay, spec, buffer, clamp=True), scale, x.shape, spec)
    scale = scale.masked_fill(bad, float("nan"))
    return _make_quantized(_encode(x_MK, scale, bad, lay, spec, buffer, clamp=True), scale, x.shape, spec)


def expand_to_grid(name: str, values: Tensor, x_MK: Tensor, lay: Layout, spec: CastSpec) -> Tensor:
    """Return fp32 values [row blocks, column blocks], contiguous, from such a grid or from a single element. Raises
    CastError for other shapes."""
    values = values.detach().to(device=x_MK.device, dtype=torch.float32)
    if values.numel() == 1:
        return values.reshape(1, 1).expand(lay.grid).contiguous()
    if tuple(values.shape) == lay.grid:
        return values.contiguous()
    raise CastError(
        f"quantize_with_scale: {name} has shape {tuple(values.shape)}, but a matrix of {tuple(x_MK.shape)} under "
        f"{spec} has {lay.grid[0]} x {lay.grid[1]} blocks; give one {name} per block, or a single one."
    )


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return fp32(code) * scale, rounded once to ``dtype``, contiguous, in the shape of ``q.data``. Raises CastError if
    the scales do not match the codes and the spec."""
    if hasattr(q.data, "fake_mode"):
        check_scales(q)
        return q.data.new_empty(q.data.shape, dtype=dtype)
    values = decode(q.data)
    matrix = values if values.dim() == 2 else values.view(values.shape[:-1].numel(), values.shape[-1])
    lay = layout(matrix.shape[0], matrix.shape[1], q.spec.block)
    if q.scale.shape != lay.grid:
        check_scales(q)  # raises the error
    scale = q.scale if q.scale.dtype is torch.float32 else scale_fp32(q)
    for blocks, factor in lay.split(matrix, grid=scale.contiguous()):
        blocks.mul_(factor)
    return values if dtype is torch.float32 else values.to(dtype)


def check_scales(q: Quantized) -> Layout:
    """Return the layout of the blocks of q. Raises CastError unless q has one scale per block."""
    rows, cols = q.data.shape[:-1].numel(), q.data.shape[-1]
    lay = layout(rows, cols, q.spec.block)
    if tuple(q.scale.shape) != lay.grid:
        raise CastError(
            f"dequantize: {(rows, cols)} codes under {q.spec} need scales of shape {lay.grid}, found "
            f"{tuple(q.scale.shape)}; data, scale and spec must come from the same cast."
        )
    return lay


def scale_fp32(q: Quantized) -> Tensor:
    """Return the scales of q in fp32."""
    return decode_e8m0(q.scale) if q.scale.dtype is E8M0 else q.scale


def amax(x: Tensor) -> Tensor:
    """Return max |x| over the whole tensor, 0-d fp32 on its device; NaN or inf if x contains one, 0 if x is empty."""
    x = x.detach()
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.abs().amax().float()


def scale_from_amax(amax: Tensor, spec: CastSpec) -> Tensor:
    """Return the scale that :func:`quantize` computes for a block with this amax (fp32, same shape), for delayed
    scaling.

    It is NaN if amax is NaN or infinite, and 1 if amax is below 2^-100.
    """
    return _scales(amax.detach().float().abs().view(torch.int32), spec)[0]
