"""The error of FP8 values compared with their originals: SQNR, underflow, saturation, cosine, calc_diff.

SQNR is blind to underflow (a value that vanishes was small), so both are always shown. All sums are float64, all
results are Python floats; each call waits for the device. ``approx`` is a tensor, or the :class:`Quantized` itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastError, Quantized, dequantize, layout, scale_fp32
from octavo.fp8.arithmetic.formats import decode

SOUND_DIFF = 0.02
"""calc_diff to high precision below which y, dx and dw of a layer are sound: E4M3 leaves about 1e-3, E5M2 gradients
about 5e-3; a wrong scale or layout leaves 1."""


class OperandMetrics(NamedTuple):
    """What :func:`sqnr`, :func:`underflow` and :func:`saturation` say of an operand, and how many codes are NaN."""

    sqnr: float
    underflow: float
    saturation: float
    nan_codes: int


def _block_sums(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Sums over the blocks of a float64 matrix, one value a block."""
    x = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    lay = layout(x.shape[0], x.shape[1], block)
    sums = [part.sum(p.dims).flatten() for p, (part,) in zip(lay.parts, lay.split(x), strict=True)]
    return torch.cat(sums)


def sqnr(x: Tensor, approx: Tensor | Quantized, block: tuple[int, int] | None = None) -> float:
    """Signal to quantization noise in dB: the mean over blocks of 10 log10(|x|^2 / |x - approx|^2).

    The mean of dB is the geometric mean of ratios, so that a block of small values counts as much as one of large.
    Blocks left out of the mean: those that are all zero (no signal), those that are exact (their ratio is infinite) and
    those with a NaN or an infinity (counted elsewhere). If no block is left: inf if some block was exact or zero,
    else NaN.

    Args:
        x: the high-precision tensor.
        approx: its approximation, same shape.
        block: (rows, columns), -1 for the whole side; default: the blocks of the cast, or the whole tensor.
    """
    if isinstance(approx, Quantized):
        block = block or approx.spec.block
        approx = dequantize(approx)
    _same_shape("sqnr", x, approx)
    if not x.numel():
        return math.inf
    signal = x.detach().double()
    power = _block_sums(signal.square(), block or (-1, -1))
    noise = _block_sums((signal - approx.detach().double()).square(), block or (-1, -1))
    return _mean_decibels(power, noise)


def _mean_decibels(power: Tensor, noise: Tensor) -> float:
    """The mean that :func:`sqnr` describes, from each block's sums of squares."""
    finite = power.isfinite() & noise.isfinite()
    counted = finite & (power > 0) & (noise > 0)
    if not bool(counted.any()):
        return math.inf if bool(finite.any()) else math.nan
    return float((10 * torch.log10(power[counted] / noise[counted])).mean())


def underflow(x: Tensor, approx: Tensor | Quantized) -> float:
    """Share of the non-zero elements of x that became zero, 0 to 1; 0 if x has no non-zero element."""
    values = decode(approx.data) if isinstance(approx, Quantized) else approx
    _same_shape("underflow", x, values)
    alive = x.detach() != 0
    count = int(alive.sum())
    return int((alive & (values == 0)).sum()) / count if count else 0.0


def saturation(x: Tensor, q: Quantized) -> float:
    """Share of the elements of x that the clamp changed, 0 to 1.

    An element counts if |x / scale| is more than half a step above FMAX: nearer values would round to FMAX without a
    clamp as well (under fp32 scales a block's own amax can land there). Zero for scales taken from the same tensor;
    delayed scaling is what saturates. Bad blocks (NaN scale) do not count.
    """
    _same_shape("saturation", x, q.data)
    if not x.numel():
        return 0.0
    limit = torch.ones_like(q.data, dtype=torch.float32)
    limit = dequantize(Quantized(limit.to(q.spec.fmt.dtype), scale_fp32(q), q.spec)).double() * _edge(q)
    return int((x.detach().double().abs() > limit).sum()) / x.numel()


def _edge(q: Quantized) -> float:
    """Half a step above FMAX."""
    fmt = q.spec.fmt
    return fmt.max + 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)


def operand_metrics(x: Tensor, q: Quantized) -> OperandMetrics:
    """All figures of an operand x and its codes: the very numbers of the three functions, the codes decoded once."""
    _same_shape("figures", x, q.data)
    if not x.numel():
        return OperandMetrics(math.inf, 0.0, 0.0, 0)
    rows, cols = x.shape[:-1].numel(), x.shape[-1]
    x = x.detach().reshape(rows, cols).contiguous()
    lay, scale = layout(rows, cols, q.spec.block), scale_fp32(q).contiguous()
    values = decode(q.data).view(rows, cols)
    # A sum is NaN where an element is, and one reduction tells that there is none.
    nan_codes = int(values.isnan().sum()) if bool(values.sum().isnan()) else 0
    alive = int(torch.count_nonzero(x))
    if nan_codes:
        lost = int(((values == 0) & (x != 0)).sum())
    else:  # then the code of a zero is a zero
        lost = alive - int(torch.count_nonzero(values))
    for codes, factor in lay.split(values, grid=scale):
        codes.mul_(factor)
    signal = x.double()
    squares = signal * signal
    power = _block_sums(squares, q.spec.block)
    squares.copy_(values).sub_(signal)
    noise = _block_sums(squares.mul_(squares), q.spec.block)
    # Saturation is rare, and shows in the largest magnitude of each block: only then is it counted.
    saturated = 0.0
    for p, (blocks, factor) in zip(lay.parts, lay.split(x, grid=scale), strict=True):
        largest = torch.maximum(blocks.amax(p.dims, keepdim=True), -blocks.amin(p.dims, keepdim=True))
        if bool((largest.double() > factor.double() * _edge(q)).any()):
            saturated = saturation(x, Quantized(q.data.reshape(rows, cols), q.scale, q.spec))
            break
    return OperandMetrics(_mean_decibels(power, noise), lost / alive if alive else 0.0, saturated, nan_codes)


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of the angle between two tensors taken as vectors; 1 if both are zero, 0 if one is."""
    _same_shape("cosine", a, b)
    a, b = (t.detach().to(torch.float64, copy=True).flatten() for t in (a, b))  # copies of our own to write into
    norm_a, norm_b = float(a.norm()), float(b.norm())
    if norm_a == 0 or norm_b == 0:
        return 1.0 if norm_a == norm_b else 0.0
    return float(a.div_(norm_a) @ b.div_(norm_b))


def calc_diff(a: Tensor, b: Tensor) -> float:
    """1 - 2 <a, b> / (|a|^2 + |b|^2): 0 for equal tensors, about half the squared relative error for near ones.

    Source: DeepGEMM's test measure. Two zero tensors (also two empty ones) give 0.
    """
    _same_shape("calc_diff", a, b)
    a, b = a.detach().double().flatten(), b.detach().double().flatten()
    total = float(a @ a + b @ b)
    if total == 0:
        return 0.0
    # |a - b|^2 / (|a|^2 + |b|^2) is the same number without the cancellation of 1 - (nearly 1).
    return float((a - b).square().sum()) / total


def _same_shape(name: str, a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise CastError(f"{name} compares tensors of one shape, found {tuple(a.shape)} and {tuple(b.shape)}.")
