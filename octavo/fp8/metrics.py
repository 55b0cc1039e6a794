"""The error of FP8 values compared with their originals: SQNR, underflow, saturation, cosine, calc_diff.

SQNR does not show underflow (values that become zero were small), so reports contain both. Sums are in float64,
results are Python floats, and each call synchronizes with the device. ``approx`` is a tensor or a :class:`Quantized`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastError, Quantized, dequantize, layout, scale_fp32
from octavo.fp8.arithmetic.formats import decode

SOUND_DIFF = 0.02
"""Largest acceptable calc_diff between y, dx and dw of an FP8 layer and high precision. E4M3 gives about 1e-3, E5M2
gradients about 5e-3; a wrong scale or layout gives about 1."""


class OperandMetrics(NamedTuple):
    """Results of :func:`sqnr`, :func:`underflow` and :func:`saturation` for one operand, and its number of NaN
    codes."""

    sqnr: float
    underflow: float
    saturation: float
    nan_codes: int


def _block_sums(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Sum a float64 matrix over each block; one value per block."""
    x = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    lay = layout(x.shape[0], x.shape[1], block)
    sums = [part.sum(p.dims).flatten() for p, (part,) in zip(lay.parts, lay.split(x), strict=True)]
    return torch.cat(sums)


def sqnr(x: Tensor, approx: Tensor | Quantized, block: tuple[int, int] | None = None) -> float:
    """Signal to quantization noise in dB: the mean over blocks of 10 log10(|x|^2 / |x - approx|^2).

    The mean in dB is the geometric mean of the ratios, so blocks of small and of large values have equal weight.
    Excluded blocks: all zero (no signal), exact (infinite ratio), and blocks with NaN or infinity (``nan_codes`` counts
    those). If no block remains: inf if any block was exact or zero, else NaN.

    Args:
        x: the high-precision tensor.
        approx: its approximation, same shape.
        block: (rows, columns), where -1 spans the dimension. Default: the blocks of the cast, or the whole tensor.
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
    """Compute the mean of :func:`sqnr` from the sums of squares of each block."""
    finite = power.isfinite() & noise.isfinite()
    counted = finite & (power > 0) & (noise > 0)
    if not bool(counted.any()):
        return math.inf if bool(finite.any()) else math.nan
    return float((10 * torch.log10(power[counted] / noise[counted])).mean())


def underflow(x: Tensor, approx: Tensor | Quantized) -> float:
    """Return the share of non-zero elements of x that became zero, from 0 to 1; 0 if x is all zero."""
    values = decode(approx.data) if isinstance(approx, Quantized) else approx
    _same_shape("underflow", x, values)
    nonzero = x.detach() != 0
    count = int(nonzero.sum())
    return int((nonzero & (values == 0)).sum()) / count if count else 0.0


def saturation(x: Tensor, q: Quantized) -> float:
    """Return the share of elements of x that were clamped, from 0 to 1.

    An element counts if |x / scale| exceeds FMAX by more than half a step: closer values round to FMAX without a clamp
    (with fp32 scales the amax of a block can be there). The result is 0 if scales come from the same tensor; only
    delayed scaling saturates. Blocks with a NaN scale do not count.
    """
    _same_shape("saturation", x, q.data)
    if not x.numel():
        return 0.0
    limit = torch.ones_like(q.data, dtype=torch.float32)
    limit = dequantize(Quantized(limit.to(q.spec.fmt.dtype), scale_fp32(q), q.spec)).double() * _clamp_threshold(q)
    return int((x.detach().double().abs() > limit).sum()) / x.numel()


def _clamp_threshold(q: Quantized) -> float:
    """Return FMAX plus half a step."""
    fmt = q.spec.fmt
    return fmt.max + 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)


def operand_metrics(x: Tensor, q: Quantized) -> OperandMetrics:
    """Compute all metrics of an operand x and its codes; equal to the three functions, but decodes the codes once."""
    _same_shape("operand_metrics", x, q.data)
    if not x.numel():
        return OperandMetrics(math.inf, 0.0, 0.0, 0)
    rows, cols = x.shape[:-1].numel(), x.shape[-1]
    x = x.detach().reshape(rows, cols).contiguous()
    lay, scale = layout(rows, cols, q.spec.block), scale_fp32(q).contiguous()
    values = decode(q.data).view(rows, cols)
    # The sum is NaN if any element is, so a single reduction shows that there are none.
    nan_codes = int(values.isnan().sum()) if bool(values.sum().isnan()) else 0
    nonzero = int(torch.count_nonzero(x))
    if nan_codes:
        lost = int(((values == 0) & (x != 0)).sum())
    else:  # without NaN codes, a zero always has the code zero
        lost = nonzero - int(torch.count_nonzero(values))
    for codes, factor in lay.split(values, grid=scale):
        codes.mul_(factor)
    signal = x.double()
    squares = signal * signal
    power = _block_sums(squares, q.spec.block)
    squares.copy_(values).sub_(signal)
    noise = _block_sums(squares.mul_(squares), q.spec.block)
    # Saturation is rare. It is counted only if the largest magnitude of a block exceeds the threshold.
    saturated = 0.0
    for p, (blocks, factor) in zip(lay.parts, lay.split(x, grid=scale), strict=True):
        largest = torch.maximum(blocks.amax(p.dims, keepdim=True), -blocks.amin(p.dims, keepdim=True))
        if bool((largest.double() > factor.double() * _clamp_threshold(q)).any()):
            saturated = saturation(x, Quantized(q.data.reshape(rows, cols), q.scale, q.spec))
            break
    return OperandMetrics(_mean_decibels(power, noise), lost / nonzero if nonzero else 0.0, saturated, nan_codes)


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine similarity of two flattened tensors; 1 if both are zero, 0 if only one is."""
    _same_shape("cosine", a, b)
    a, b = (t.detach().to(torch.float64, copy=True).flatten() for t in (a, b))  # copies that are modified below
    norm_a, norm_b = float(a.norm()), float(b.norm())
    if norm_a == 0 or norm_b == 0:
        return 1.0 if norm_a == norm_b else 0.0
    return float(a.div_(norm_a) @ b.div_(norm_b))


def calc_diff(a: Tensor, b: Tensor) -> float:
    """Return 1 - 2 <a, b> / (|a|^2 + |b|^2): 0 if equal, about half the squared relative error if close.

    Source: DeepGEMM's tests. Two zero tensors, or two empty ones, give 0.
    """
    _same_shape("calc_diff", a, b)
    a, b = a.detach().double().flatten(), b.detach().double().flatten()
    total = float(a @ a + b @ b)
    if total == 0:
        return 0.0
    # |a - b|^2 / (|a|^2 + |b|^2) is the same value without cancellation.
    return float((a - b).square().sum()) / total


def _same_shape(name: str, a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise CastError(f"{name} needs tensors of equal shape, got {tuple(a.shape)} and {tuple(b.shape)}.")
