"""Recompute one FP8 GEMM and compare: casts and the repeated kernel bit for bit, a tile on the CPU within a tolerance.

* **Casts.** The scale and the codes of a block depend only on that block (and on the amax of the tensor, for per-tensor
  scales). So the whole operand is cast again by the reference, in bands of :data:`BAND` values to save memory.
* **Repeated kernel.** The same kernel runs on the same operands. This detects random errors of the device. If two
  further runs differ from each other, the kernel is not deterministic, and the comparison is ignored.
* **Tile on the CPU.** The reference computes a random tile of :data:`TILE` x :data:`TILE` values from the codes. This
  detects systematic errors of the device. With sums of k products, and |a| x |b| the product of magnitudes::

      |found - wanted| <= share * (|a| x |b|) + eps(dtype) * |wanted|
      share = k 2^-23                   fp32 sums (CPU), at most 2^-7
      share = 2^-7 max(1, k / 4096)     tensor cores with 14-bit sums of 32 terms, each truncated by 2^-14

NaN equals NaN: overflow is not a fault of the device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.kernels import get
from octavo.fp8.kernels.layout import CONTRACTED, as_bytes, ceil_div
from octavo.fp8.observe.recorder import Result

BAND = 1 << 22  # values that are recast at a time
TILE = 128
OPERANDS = {"fwd": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
RESULTS = {"fwd": "y", "dgrad": "dx", "wgrad": "dw"}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The first difference in ``what``: the value ``at`` (row, column), of which ``bits`` differ, or None if results
    may be rounded differently. ``count`` of ``of`` values differ. Codes and scales are given in hexadecimal; ``by``:
    what recomputed the value."""

    what: str
    at: tuple[int, ...]
    found: str
    wanted: str
    bits: int | None
    count: int
    of: int
    by: str

    def __str__(self) -> str:
        bits = "" if self.bits is None else f", {self.bits} bit{'s' * (self.bits != 1)} apart"
        others = "" if self.count == 1 else f"; {self.count} of {self.of} differ"
        return f"{self.what} is {self.found} at {list(self.at)} and {self.wanted} {self.by}{bits}{others}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "at": list(self.at)}


@dataclass
class ComparisonCounts:
    """Numbers of compared products, ``codes`` of operands and ``values`` of products. ``unsteady``: products of kernels
    that are not deterministic."""

    products: int = 0
    codes: int = 0
    values: int = 0
    unsteady: int = 0


def compare(result: Result, draw: random.Random, done: ComparisonCounts) -> Difference | None:
    """Return the first difference in a GEMM, checking operands first, or None. Updates the counts in ``done``."""
    done.products += 1
    names = OPERANDS[result.gemm]
    for name, x, q in ((names[0], result.a, result.a_q), (names[1], result.b, result.b_q)):
        if x is None:
            continue
        done.codes += q.data.numel()
        if (difference := compare_cast(name, x, q, noted=result.noted and name != "w")) is not None:
            return difference
    done.values += result.out.numel()
    return _compare_repeated(result, done) or _compare_tile(result, draw)


# --- casts ------------------------------------------------------------------------------------------------------------


def compare_cast(name: str, x: Tensor, q: Quantized, noted: bool = False) -> Difference | None:
    """Return the first difference between q and the reference cast of x [rows, columns], or None. ``noted``: the scale
    is given, and only the codes are compared."""
    by, spec = "by the reference's cast", q.spec
    whole, scale = spec.block == (-1, -1) or noted, q.scale
    amax = cast.amax(x) if whole else None
    if amax is not None and not noted:
        scale = cast.scale_from_amax(amax, spec).view(1, 1)
    for rows, cols in _bands(x, spec):
        part = x[rows, cols]
        if amax is None:
            recast = cast.quantize(part, spec)
        else:
            recast = cast.quantize_with_scale(part, scale, spec, amax)
        grid = _block_range(rows, spec.block[0]), _block_range(cols, spec.block[1])
        for what, actual, wanted, first in (
            ("scale", q.scale[grid], recast.scale, (grid[0].start, grid[1].start)),
            ("code", q.data[rows, cols], recast.data, (rows.start, cols.start)),
        ):
            if (difference := first_difference(f"a {what} of {name}", actual, wanted, by, first)) is not None:
                return difference
    return None


def _bands(x: Tensor, spec: CastSpec) -> Iterator[tuple[slice, slice]]:
    """Yield bands of whole blocks that cover x, of about `BAND` values: rows, or columns if blocks span all rows."""
    rows, cols = x.shape
    down = spec.block[0] != -1 or spec.block[1] == -1
    size, other, block = (rows, cols, spec.block[0]) if down else (cols, rows, spec.block[1])
    block = max(block, 1)
    step = max(BAND // max(other, 1) // block, 1) * block
    for start in range(0, size, step):
        band = slice(start, min(start + step, size))
        yield (band, slice(0, cols)) if down else (slice(0, rows), band)


def _block_range(span: slice, block: int) -> slice:
    return slice(0, 1) if block == -1 else slice(span.start // block, ceil_div(span.stop, block))


# --- products ---------------------------------------------------------------------------------------------------------


def _compare_repeated(result: Result, done: ComparisonCounts) -> Difference | None:
    """Compare the product with a repeated run of the kernel; None if equal, or if the kernel is not deterministic."""
    again = result.again()
    difference = first_difference(
        f"a value of {RESULTS[result.gemm]}", result.out, again, f"by {result.backend} once more"
    )
    if difference is None:
        return None
    if first_difference("", again, result.again(), "") is None:
        return difference
    done.unsteady += 1
    return None


def _compare_tile(result: Result, draw: random.Random) -> Difference | None:
    """Compare a random tile of the product with the reference on the CPU."""
    a_dim, b_dim = CONTRACTED[result.gemm]
    k, on_cpu = result.a_q.data.shape[a_dim], result.out.device.type == "cpu"
    rows, a = _read_lines(result.a_q, 1 - a_dim, draw)
    cols, b = _read_lines(result.b_q, 1 - b_dim, draw)
    wanted, most = _multiply(result.gemm, a, b), _multiply(result.gemm, _magnitudes(a), _magnitudes(b))
    if result.bias is not None:
        bias = result.bias[cols].cpu().float()
        wanted, most = wanted + bias, most + bias.abs()
    share = min(2.0**-7, k * 2.0**-23) if on_cpu else 2.0**-7 * max(1.0, k / 4096)
    allowed = share * most + torch.finfo(result.out.dtype).eps * wanted.abs()
    values = result.out[rows, cols].cpu().float()
    # The difference of equal infinities is NaN, also if only the dtype of the result overflows.
    close = (values - wanted).abs() <= allowed
    close |= (values == wanted.to(result.out.dtype).float()) | (values.isnan() & wanted.isnan())
    if bool(close.all()):
        return None
    at = _first_index(~close)
    return Difference(
        f"a value of {RESULTS[result.gemm]}", (rows.start + at[0], cols.start + at[1]), f"{float(values[at]):.9g}",
        f"{float(wanted[at]):.9g}", None, int((~close).sum()), close.numel(),
        f"by the reference on the CPU, where rounding explains {float(allowed[at]):.3g}",
    )  # fmt: skip


def _read_lines(q: Quantized, free: int, draw: random.Random) -> tuple[slice, Quantized]:
    """Copy random rows (or columns) of an operand to host memory, as whole blocks along the contraction."""
    size, block = q.data.shape[free], max(q.spec.block[free], 1)
    side = ceil_div(TILE, block) * block
    start = draw.randrange(ceil_div(size, side)) * side
    span = slice(start, min(start + side, size))
    data, scale = (
        t.narrow(free, part.start, part.stop - part.start).cpu().contiguous()
        for t, part in ((q.data, span), (q.scale, _block_range(span, q.spec.block[free])))
    )
    return span, Quantized(data, scale, q.spec)


def _multiply(gemm: str, a: Quantized, b: Quantized) -> Tensor:
    return getattr(get("reference"), f"gemm_{gemm}")(a, b, torch.float32)


def _magnitudes(q: Quantized) -> Quantized:
    return q._replace(data=(as_bytes(q.data) & 0x7F).view(q.data.dtype))


# --- bits -------------------------------------------------------------------------------------------------------------


def first_difference(
    what: str, actual: Tensor, wanted: Tensor, by: str, first: tuple[int, int] = (0, 0)
) -> Difference | None:
    """Return the first difference in the bits of two tensors [rows, columns] of one dtype, or None; NaNs are equal.
    ``first``: offset of these tensors in ``what``."""
    a, b = _as_bits(actual), _as_bits(wanted)
    differs = a != b
    if not bool(differs.any()):
        return None
    plain = actual.element_size() > 1
    if plain:
        differs &= ~(actual.isnan() & wanted.isnan())
        if not bool(differs.any()):
            return None
    at = _first_index(differs)
    actual_bits, wanted_bits = int(a[at]), int(b[at])
    mask = (1 << (8 * actual.element_size())) - 1
    words = (
        (f"{float(actual[at]):.9g}", f"{float(wanted[at]):.9g}")
        if plain
        else (f"0x{actual_bits:02x}", f"0x{wanted_bits:02x}")
    )
    where, bits = (first[0] + at[0], first[1] + at[1]), ((actual_bits ^ wanted_bits) & mask).bit_count()
    return Difference(what, where, *words, bits, int(differs.sum()), differs.numel(), by)


def _as_bits(x: Tensor) -> Tensor:
    return x.view(_BITS[x.element_size()])


def _first_index(differs: Tensor) -> tuple[int, int]:
    at = int(differs.flatten().int().argmax())
    return at // differs.shape[1], at % differs.shape[1]
