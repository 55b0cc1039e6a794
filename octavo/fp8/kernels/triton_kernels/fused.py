"""RMSNorm and SwiGLU with FP8 outputs: results are quantized while they are still in registers.

``octavo/fp8/kernels/reference.py`` defines the arithmetic. The kernels quantize the result after it is rounded to the
input's dtype, so that codes and scales are bit for bit the cast of the plain layer's output.

Bytes per element of 16 bits, read + written, without scales; "unfused" is the plain layer as one kernel plus one cast
into both layouts, "eager" is PyTorch op by op plus that cast::

    kernel                          reads        writes                    fused   unfused   eager
    rmsnorm -> row                  x 2          y 2, row 1                  5        7        39
    rmsnorm -> row, col             x 2 + 2*     y 2, row 1, col 1           6-8      8        40
    rmsnorm -> row, col, no y       x 2 + 2*     row 1, col 1                4-6      8        40
    rmsnorm backward                dy, x 4      dx 2, sums 0.5             6.5      10        94
    swiglu -> row, col              gate, up 4   h 2, row 1, col 1           8       10        14
    swiglu -> row, col, no h        gate, up 4   row 1, col 1                6       10        14
    swiglu backward                 3 x 2        2 x (row 1, col 1)         10       18        30

    * the second read of x, from the L2 cache where x is still cached

For the backward of RMSNorm, which casts nothing, "unfused" is a kernel for each gradient.

Three kinds of program. ``rmsnorm_rows`` holds whole rows: statistics, result and row codes from one read. A column
block needs 128 rows at a time; 128 whole rows do not fit in a multiprocessor (1 MB at K = 4096), and the rows of all
multiprocessors do not fit in the cache. So with a column layout ``rstd_of_rows`` reads x for the statistics and
``rmsnorm_tile`` reads it again in 128 x 128 tiles, in reverse order: the rows that were read last are cached. Tiles
also keep every multiprocessor busy when there are fewer panels of 128 rows than multiprocessors. A compiled graph
computes the statistics itself, together with the residual sum before the norm, and passes ``rstd``. SwiGLU needs no
statistics: ``swiglu`` and ``swiglu_backward`` use tiles of 128 x 128. All tiles, ragged or whole, of any format and
dtype, have one form (``fused_tiles.py``); :func:`_program` chooses its size and its threads.

Tiles quantize blocks along one dimension, of 32 or 128, and down the columns 128 x 128 too; ``rmsnorm_rows`` also
quantizes whole rows. For others
(rows of SwiGLU, columns, tensors) the amax is known only when all programs have finished: the result is written first
and then cast by ``cast.py``; the gradients of SwiGLU are then written in 16 bits once, too. The kernels collect the
amax of a whole tensor as they run, which saves a pass.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.formats import E8M0
from octavo.fp8.kernels import reference
from octavo.fp8.kernels.layout import ALIGN, SCALE_ALIGN, ceil_div, codes_buffer, grid_shape, round_up
from octavo.fp8.kernels.reference import check_rmsnorm, check_swiglu
from octavo.fp8.kernels.triton_kernels import cast
from octavo.fp8.kernels.triton_kernels import fused_kernels as kernels
from octavo.fp8.kernels.triton_kernels.launch import launch

_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
WIDEST = 16384  # columns that one program holds as a whole
BACKWARD_ROWS = 16  # of a program; each writes a row of fp32 sums, half a byte a value
TILE = 128
_SQUARE = (TILE, TILE)


class _Out:
    """One quantized output: the buffers ``codes`` and ``scales`` that a kernel fills, and their views ``quantized``."""

    def __init__(self, like: Tensor, spec: CastSpec, contract: int) -> None:
        (rows, cols), device = like.shape, like.device
        held, data = codes_buffer(rows, cols, spec, contract, device)
        free, blocks = (grid_shape(rows, cols, spec)) if contract == 1 else reversed(grid_shape(rows, cols, spec))
        if spec.scale == "e8m0":
            self.scales = torch.empty(free, blocks, dtype=torch.uint8, device=device)
            scale = self.scales.view(E8M0)
        elif spec.block[contract] == -1:
            self.scales = scale = torch.empty(free, 1, dtype=torch.float32, device=device)
        elif spec.block[1 - contract] != 1:
            self.scales = torch.empty(free, round_up(blocks, SCALE_ALIGN), dtype=torch.float32, device=device)
            scale = self.scales[:, :blocks]
        else:
            self.scales = torch.empty(blocks, round_up(free, ALIGN), dtype=torch.float32, device=device)
            scale = self.scales.t()[:free]
        self.codes = held.view(torch.uint8)
        self.quantized = Quantized(data, scale if contract == 1 else scale.t(), spec)


def _cast(spec: CastSpec | None, contract: int) -> tuple[int, bool, bool, bool] | None:
    """Return the constant that describes a cast to a kernel: CAST in ``fused_kernels``."""
    if spec is None:
        return None
    return max(spec.block[contract], 0), spec.scale != "fp32", spec.format == "e5m2", spec.block == _SQUARE


def _out(like: Tensor, spec: CastSpec | None, contract: int) -> _Out | None:
    """Return the output that the program of a tile quantizes, or None if the blocks do not fit in a tile."""
    if spec is None or (spec.block[1 - contract] != 1 and (contract, spec.block) != (0, _SQUARE)):
        return None
    return _Out(like, spec, contract) if spec.block[contract] in (32, TILE) else None


def _program(
    row: CastSpec | None, col: CastSpec | None, shape: torch.Size, itemsize: int, results: int
) -> dict[str, Any]:
    """Return the constants of a tile's program that quantizes this many results of a shape with these specs."""
    high = 32 if col is None else TILE
    whole = shape[0] % high == shape[1] % TILE == 0  # nothing to mask
    constants: dict[str, Any] = {"ROW": _cast(row, 1), "COL": _cast(col, 0), "BM": high, "BK": TILE, "WHOLE": whole}
    if col is None:
        return constants | {"num_warps": 4}
    # With 128 registers a thread, two programs of 8 warps share a multiprocessor: one computes while the other waits
    # for memory. Two results of fp32, with masks, written in 16 bits too (no row codes), or with blocks of 32, which
    # have more scales, need the registers of 16 warps.
    wide = results == 2 and (itemsize == 4 or not whole or row is None or 32 in col.block)
    return constants | {"num_warps": 16 if wide else 8, "maxnreg": 128}


def _tiles(
    like: Tensor,
    row: CastSpec | None,
    row_out: _Out | None,
    col: CastSpec | None,
    col_out: _Out | None,
    results: int = 1,
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and the constants of a program; tiles cover the padding of every output."""
    constants = _program(row if row_out else None, col if col_out else None, like.shape, like.itemsize, results)
    down = like.shape[0] if col_out else round_up(like.shape[0], ALIGN)
    return (ceil_div(like.shape[1], TILE), ceil_div(down, constants["BM"])), constants


def _unit(*tensors: Tensor) -> int:
    """Return the largest of 1, 2, 4, 8, 16 that divides the columns and all row strides.

    Triton vectorizes loads only where it can prove alignment, and for arguments it checks only "divides by 16"; 3420
    columns would be read one by one. Passing 3420 / 4 and the constant 4 proves 4 at a time.
    """
    return gcd(16, tensors[0].shape[1], *(t.stride(0) for t in tensors))


def _rows_of(x: Tensor) -> Tensor:
    """x with contiguous columns; rows may have any stride, as in one half of a joint gate and up."""
    x = x.detach()
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _pair(out: _Out | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if out is None else (out.codes, out.scales)


def _top(like: Tensor, *outs: tuple[_Out | None, CastSpec | None]) -> Tensor | None:
    """Return a zero for the amax of a kernel's result if all later casts need the whole tensor's; else None."""
    blocks = {spec.block for out, spec in outs if out is None and spec is not None}
    return cast.zeros(1, like.device) if blocks == {(-1, -1)} else None


def _results(
    y: Tensor | None, top: Tensor | None,
    row: CastSpec | None, row_out: _Out | None, col: CastSpec | None, col_out: _Out | None,
) -> tuple[Quantized | None, Quantized | None]:  # fmt: skip
    """(row, column) results: what the kernel quantized, else the cast of y, in one pass for both; None for no spec."""
    results = [None if out is None else out.quantized for out in (row_out, col_out)]
    jobs = [(s, c) for s, c, out in ((row, 1, row_out), (col, 0, col_out)) if s is not None and out is None]
    if jobs:
        assert y is not None
        for (_, contract), q in zip(jobs, cast.quantize_jobs(y, tuple(jobs), top), strict=True):
            results[1 - contract] = q
    return results[0], results[1]


def _plain(
    like: Tensor, emit: bool, *outs: tuple[_Out | None, CastSpec | None], dtype: torch.dtype | None = None
) -> Tensor | None:
    """Return a buffer for the result, in ``dtype`` or ``like``'s, if the caller wants it (``emit``) or a later cast
    reads it."""
    wanted = emit or any(out is None and spec is not None for out, spec in outs)
    return torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device) if wanted else None


def rmsnorm_quantize(
    x: Tensor, weight: Tensor, eps: float, row: CastSpec | None, col: CastSpec | None,
    out: torch.dtype | None = None, low: torch.dtype | None = None, rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Quantized | None, Quantized | None]:  # fmt: skip
    """See ``Backend.rmsnorm_quantize``. Raises CastError for shapes or dtypes that do not fit."""
    y, rstd, row_q, col_q = _rmsnorm(x, weight, eps, row, col, out, low, rstd, emit=True)
    assert y is not None
    return y, rstd, row_q, col_q


def rmsnorm_codes(
    x: Tensor,
    weight: Tensor,
    eps: float,
    row: CastSpec | None,
    col: CastSpec | None,
    out: torch.dtype | None = None,
    low: torch.dtype | None = None,
    rstd: Tensor | None = None,
) -> tuple[Tensor, Quantized | None, Quantized | None]:
    """:func:`rmsnorm_quantize` without y, for callers that do not read it: (rstd, y under ``row``, y under ``col``)."""
    return _rmsnorm(x, weight, eps, row, col, out, low, rstd, emit=False)[1:]


def _rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    row: CastSpec | None,
    col: CastSpec | None,
    out: torch.dtype | None,
    low: torch.dtype | None,
    known_rstd: Tensor | None,
    emit: bool,
) -> tuple[Tensor | None, Tensor, Quantized | None, Quantized | None]:
    check_rmsnorm(x, weight)
    x, weight = _rows_of(x), weight.detach().contiguous()
    rows, cols = x.shape
    row_out, col_out = _out(x, row, 1), _out(x, col, 0)
    by_rows = col_out is None and cols <= WIDEST and known_rstd is None  # a program of whole rows computes rstd itself
    if by_rows and row is not None and row.block == (1, -1):
        row_out = _Out(x, row, 1)
    y = _plain(x, emit, (row_out, row), (col_out, col), dtype=out)
    dtypes = {"OUT": _TL[out or x.dtype], "LOW": _TL[low or out or x.dtype]}
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device) if known_rstd is None else known_rstd.contiguous()
    unit = _unit(x)
    size = (rows, x.stride(0) // unit, cols // unit)
    top = _top(x, (row_out, row), (col_out, col))
    if by_rows:
        # About 4096 values per program, one row at least; a warp for each 1024 of a row.
        wide = max(TILE, triton.next_power_of_2(cols))
        high = max(1, 4096 // wide)
        constants = dtypes | {"CAST": _cast(row, 1), "UNIT": unit, "BM": high, "BK": wide}
        constants["num_warps"] = max(4, wide // 1024)
        programs = ceil_div(round_up(rows, ALIGN), high)
        launch(kernels.rmsnorm_rows, (programs,), x, weight, rstd, y, *_pair(row_out), top, *size, eps, **constants)
    else:
        if known_rstd is None:
            constants = {"UNIT": unit, "BM": 4, "BK": 1024, "num_warps": 4}
            launch(kernels.rstd_of_rows, (ceil_div(rows, 4),), x, rstd, *size, eps, **constants)
        grid, constants = _tiles(x, row, row_out, col, col_out)
        outs = (*_pair(row_out), *_pair(col_out))
        launch(kernels.rmsnorm_tile, grid, x, weight, rstd, y, *outs, top, *size, UNIT=unit, **dtypes, **constants)
    to_cast = y if y is None or low is None else y.to(low)
    return y if emit else None, rstd, *_results(to_cast, top, row, row_out, col, col_out)


def rmsnorm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, needs_x: bool, needs_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """See ``Backend.rmsnorm_backward``. Raises CastError for shapes or dtypes that do not fit."""
    check_rmsnorm(x, weight)
    rows, cols = x.shape
    if cols > WIDEST:
        return reference.rmsnorm_backward(dy, x, weight, rstd, needs_x, needs_w)
    dy, x, weight = _rows_of(dy), _rows_of(x), weight.detach().contiguous()
    programs = ceil_div(rows, BACKWARD_ROWS)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else None
    # A row of sums for each program, whose number follows from the shape: dw has the same bits on every GPU.
    sums = torch.empty(programs, cols, dtype=torch.float32, device=x.device) if needs_w else None
    unit = _unit(dy, x)
    size = (rows, dy.stride(0) // unit, x.stride(0) // unit, cols // unit)
    constants = {"UNIT": unit, "OUT": _TL[x.dtype], **_whole_rows(cols)}
    launch(kernels.rmsnorm_backward, (programs,), dy, x, weight, rstd.contiguous(), dx, sums, *size, **constants)
    return dx, None if sums is None else sums.sum(0).to(weight.dtype)


def _whole_rows(cols: int) -> dict[str, int]:
    """Return the constants of a program of ``rmsnorm_backward``: 16 values of a row in each thread."""
    wide = max(TILE, triton.next_power_of_2(cols))
    return {"BK": wide, "ROWS": BACKWARD_ROWS, "num_warps": min(32, max(4, wide // 512))}


def swiglu_quantize(
    gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
) -> tuple[Tensor, Quantized | None, Quantized | None]:
    """See ``Backend.swiglu_quantize``. Raises CastError for shapes or dtypes that do not fit."""
    h, row_q, col_q = _swiglu(gate, up, row, col, emit=True)
    assert h is not None
    return h, row_q, col_q


def swiglu_codes(
    gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
) -> tuple[Quantized | None, Quantized | None]:
    """:func:`swiglu_quantize` without h, for callers that do not read it: (h under ``row``, h under ``col``)."""
    return _swiglu(gate, up, row, col, emit=False)[1:]


def _swiglu(
    gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None, emit: bool
) -> tuple[Tensor | None, Quantized | None, Quantized | None]:
    check_swiglu("swiglu_quantize", gate, up)
    gate, up = _rows_of(gate), _rows_of(up)
    row_out, col_out = _out(gate, row, 1), _out(gate, col, 0)
    h = _plain(gate, emit, (row_out, row), (col_out, col))
    unit = _unit(gate, up)
    size = (gate.shape[0], gate.stride(0) // unit, up.stride(0) // unit, gate.shape[1] // unit)
    grid, constants = _tiles(gate, row, row_out, col, col_out)
    outs = (*_pair(row_out), *_pair(col_out))
    top = _top(gate, (row_out, row), (col_out, col))
    launch(kernels.swiglu, grid, gate, up, h, *outs, top, *size, UNIT=unit, **constants)
    return h if emit else None, *_results(h, top, row, row_out, col, col_out)


def swiglu_backward_quantize(
    dh: Tensor, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
) -> tuple[Quantized | None, Quantized | None, Quantized | None, Quantized | None]:
    """See ``Backend.swiglu_backward_quantize``. Raises CastError for shapes or dtypes that do not fit."""
    check_swiglu("swiglu_backward_quantize", dh, gate, up)
    dh, gate, up = _rows_of(dh), _rows_of(gate), _rows_of(up)
    gate_row, gate_col, up_row, up_col = (_out(gate, s, c) for _ in range(2) for s, c in ((row, 1), (col, 0)))
    dgate, dup = (_plain(gate, False, (gate_row, row), (gate_col, col)) for _ in range(2))
    unit = _unit(dh, gate, up)
    size = (gate.shape[0], *(t.stride(0) // unit for t in (dh, gate, up)), gate.shape[1] // unit)
    grid, constants = _tiles(gate, row, gate_row, col, gate_col, results=2)
    outs = (*_pair(gate_row), *_pair(gate_col), *_pair(up_row), *_pair(up_col))
    tops = _top(gate, (gate_row, row), (gate_col, col)), _top(up, (up_row, row), (up_col, col))
    launch(kernels.swiglu_backward, grid, dh, gate, up, dgate, dup, *outs, *tops, *size, UNIT=unit, **constants)
    return (
        *_results(dgate, tops[0], row, gate_row, col, gate_col),
        *_results(dup, tops[1], row, up_row, col, up_col),
    )
