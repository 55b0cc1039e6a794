"""One FP8 GEMM computed again: its casts by the reference, bit for bit; its product bit for bit by the kernel that made
it, and within what rounding may do by the reference in host memory.

* **Casts.** The scale and the codes of a block depend only on that block (with one scale for the whole tensor, on its
  amax besides), so an operand is cast again in bands of :data:`BAND` values: all of it, and never a second copy.
* **Product, the same.** The same kernel on the same operands. It proves a device that errs now and then. A kernel that
  gives other bits when it runs twice more proves nothing: then only the next comparison counts.
* **Product, another.** :data:`TILE` x :data:`TILE` of its values, drawn at random, from the codes, by the reference on
  the CPU. It proves a device that errs always alike. With k products added up and |a| x |b| the product of magnitudes::

      |found - wanted| <= share * (|a| x |b|) + eps(dtype) * |wanted|
      share = k 2^-23                   fp32 sums (CPU), 2^-7 at most
      share = 2^-7 max(1, k / 4096)     tensor cores whose sums have 14 bits: 32 terms at a time, each cut by 2^-14

A NaN equals a NaN: an overflow is no fault of the device.
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

BAND = 1 << 22  # values that are cast again at a time
TILE = 128
OPERANDS = {"fwd": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
RESULTS = {"fwd": "y", "dgrad": "dx", "wgrad": "dw"}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """Where a computation gave something else: of ``what`` the value ``at`` (row, column), of which ``bits`` differ
    (None: the two were rounded apart anyway), the first of ``count`` among ``of`` that were compared. Codes and scales
    are those bytes, in hexadecimal; ``by``: what computed it again."""

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
    """How much was compared: ``codes`` of operands, ``values`` of products, and ``unsteady``, how many products a
    kernel does not give alike twice."""

    products: int = 0
    codes: int = 0
    values: int = 0
    unsteady: int = 0


def compare(result: Result, draw: random.Random, done: ComparisonCounts) -> Difference | None:
    """The first difference in a GEMM, operands before the product; None where there is none. ``done`` is added to."""
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
    """The first difference between q and the reference's cast of x [rows, columns]; ``noted``: the scale is given, and
    only the codes are made again."""
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
            if (one := first_difference(f"a {what} of {name}", actual, wanted, by, first)) is not None:
                return one
    return None


def _bands(x: Tensor, spec: CastSpec) -> Iterator[tuple[slice, slice]]:
    """Rectangles of whole blocks that cover x, of about `BAND` values: whole rows, or whole columns where a block takes
    those."""
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
    """The product against the same kernel's on the same operands; None too where that gives other bits each time."""
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
    """A tile of the product against the reference's, on the CPU."""
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
    # Equal infinities differ by a NaN, and so does what overflows the result's dtype from what does not fp32's.
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
    """Some rows (columns) of an operand with all that they are multiplied by, in host memory: whole blocks of them."""
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
    """Where two tensors [rows, columns] of one dtype differ in their bits, NaN from NaN apart, if anywhere; ``first``:
    where theirs begins in what is named."""
    a, b = _as_bits(actual), _as_bits(wanted)
    apart = a != b
    if not bool(apart.any()):
        return None
    plain = actual.element_size() > 1
    if plain:
        apart &= ~(actual.isnan() & wanted.isnan())
        if not bool(apart.any()):
            return None
    at = _first_index(apart)
    ours, theirs = int(a[at]), int(b[at])
    mask = (1 << (8 * actual.element_size())) - 1
    words = (f"{float(actual[at]):.9g}", f"{float(wanted[at]):.9g}") if plain else (f"0x{ours:02x}", f"0x{theirs:02x}")
    where, bits = (first[0] + at[0], first[1] + at[1]), ((ours ^ theirs) & mask).bit_count()
    return Difference(what, where, *words, bits, int(apart.sum()), apart.numel(), by)


def _as_bits(x: Tensor) -> Tensor:
    return x.view(_BITS[x.element_size()])


def _first_index(apart: Tensor) -> tuple[int, int]:
    at = int(apart.flatten().int().argmax())
    return at // apart.shape[1], at % apart.shape[1]
