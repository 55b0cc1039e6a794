"""Casts in Triton, with the bits of ``octavo/fp8/arithmetic/cast.py`` and the layout of
:mod:`octavo.fp8.kernels.layout`.

x is viewed as a matrix [rows, columns] with any two strides; a matrix with contiguous columns is cast as its transpose,
with the block transposed too, so that the kernels (``cast_tiles``) have one case. Shapes, strides and specs decide
which launches run::

    every block fits in a tile, or amax is given        one launch
    rows, columns or tensors longer than a tile         a pass for their amax (2 launches: zeros, maxima), then one

Tiles are chosen such that stores fill lines of 128 bytes, or half of one, and a multiprocessor has several programs
whose loads, arithmetic and stores overlap: 64 x 128 for two layouts at once, 128 x 128 where blocks of 128 in both
dimensions need it; 32 x 128 for rows only, 128 x 64 for columns only; for whole rows, rows of 4096 values together. 64
values of a thread share its addresses; a program has 4 warps, so that more programs fit, unless the tile is 128 x 128:
:data:`TILES_OF_TWO` has its two candidates, and ``octavo bench cast`` times both.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.formats import E8M0
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.capture import is_capturing
from octavo.fp8.kernels.groups import Groups
from octavo.fp8.kernels.layout import Operand, as_bytes, ceil_div, round_up
from octavo.fp8.kernels.triton_kernels import cast_tiles
from octavo.fp8.kernels.triton_kernels.cast_blocks import Facts
from octavo.fp8.kernels.triton_kernels.launch import launch
from octavo.fp8.kernels.triton_kernels.room import BufferShapes, CastBuffers, allocate_shapes, buffer_shapes

SIDES = (1, 16, 32, 64, 128)  # sides of finite blocks: they divide every tile
LONGEST_ROW = 32768  # longest row that one program casts: 64 values for each of 512 threads
_WHOLE = ((1, -1), (-1, 1), (-1, -1))
_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Job = tuple[CastSpec, int]  # a cast, and the dimension that its GEMM contracts
Jobs = tuple[Job, ...]


class Tile(NamedTuple):
    """Rows and columns of one program's tile, its warps, and the most registers a thread may take, or None for no
    limit."""

    rows: int
    cols: int
    warps: int
    registers: int | None = None


TILES_OF_TWO = {warps: Tile(128, 128, warps, registers=1024 // warps) for warps in (16, 8)}
"""Tiles for two casts with blocks of 128 in both dimensions, by warps; two programs fit a multiprocessor. 16 warps need
more instructions in all, but twice the warps hide the time between load and store. The first is the default."""


def quantize(x: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
    """See ``Backend.quantize``."""
    return _cast(x, ((spec, contract),))[0]


def quantize_both(x: Tensor, row: CastSpec, col: CastSpec, tile: Tile | None = None) -> tuple[Quantized, Quantized]:
    """See ``Backend.quantize_both``: one pass over x, or two where whole rows, columns or the tensor share a scale.

    ``tile``: another than the default, such as one of :data:`TILES_OF_TWO`, to measure it.
    """
    first, second = _cast(x, ((row, 1), (col, 0)), tile=tile)
    return first, second


def quantize_jobs(x: Tensor, jobs: Jobs, top: Tensor | None = None) -> list[Quantized]:
    """x under one cast, or under two for contractions of 1 and 0; ``top`` [1]: the int32 pattern of its amax, if it is
    known and all blocks are the whole of x."""
    return _cast(x, jobs, amax=None if top is None else top.view(torch.float32))


def quantize_with_scale(
    x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None, contracts: Sequence[int] = (1,)
) -> list[Quantized]:
    """See ``Backend.quantize_with_scale``, for each of ``contracts``, 1 before 0; one launch if ``amax`` is given."""
    x_MK = cast.as_matrix(x)
    lay = cast.layout(x_MK.shape[0], x_MK.shape[1], spec.block)
    scale = cast.expand_to_grid("scale", scale, x_MK, lay, spec)
    amax = None if amax is None else cast.expand_to_grid("amax", amax, x_MK, lay, spec)
    return _cast(x, tuple((spec, contract) for contract in contracts), scale, amax)


def _cast(
    x: Tensor, jobs: Jobs, scale: Tensor | None = None, amax: Tensor | None = None, tile: Tile | None = None
) -> list[Quantized]:
    outs = run(cast.as_matrix(x), jobs, scale, amax, tile=tile)
    # A view may change the strides of dimensions of size 1, which layout.is_k_major reads: a matrix keeps its own.
    if x.dim() != 2:
        outs = [out._replace(data=out.data.view(x.shape)) for out in outs]
    return [Quantized(out.data, out.scale, spec) for out, (spec, _) in zip(outs, jobs, strict=True)]


def run(
    x: Tensor,
    jobs: Jobs,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    groups: Groups | None = None,
    tile: Tile | None = None,
) -> list[CastBuffers]:
    """Cast x [rows, columns], or a batch of such, for one contraction, or for 1 and 0 in that order.

    ``scale``, ``amax`` [row blocks, column blocks], fp32, contiguous: given by the caller, for one spec.
    ``groups``: rows belong to experts, and "all rows" of a block means all rows of an expert; the scale of such a block
    is [experts, column blocks]. ``tile``: another than the default. Raises CastError for a block that no tile can hold.
    """
    # Contiguous columns: cast the transpose, whose rows are contiguous.
    if groups is None and x.stride(-1) != 1 and x.stride(-2) == 1:
        flip = [None if t is None else t.mT.contiguous() for t in (scale, amax)]
        jobs_of_transpose = tuple((_transpose(spec), 1 - contract) for spec, contract in reversed(jobs))
        outs = run(x.mT, jobs_of_transpose, flip[0], flip[1], tile=tile)
        return [o._replace(data=o.data.mT, scale=o.scale.mT) for o in reversed(outs)]
    experts = None if groups is None else groups.experts
    plan = _plan(x.shape, x.stride(), jobs, scale is not None, amax is not None, experts, tile)
    laid = [allocate_shapes(place, x.device) for place in plan.rooms]
    if not x.numel():
        for out, (spec, _) in zip(laid, jobs, strict=True):
            out.scales.fill_(127 if spec.scale == "e8m0" else 1)
        if scale is not None:
            stored = scale if jobs[0][0].scale != "e8m0" else (scale.view(torch.int32) >> 23).to(torch.uint8)
            for out in laid:
                as_bytes(out.scale).copy_(stored)
        return laid

    # Maxima that the cast cannot take from its own tiles need a separate pass before it.
    tops = {} if amax is None else {spec.block: amax.view(torch.int32) for spec, _ in jobs}
    if plan.longer:
        tops = _maxima(x, plan.longer, groups)
    # x is passed for pointers that the constants make unused.
    args: list[tuple[object, ...]] = [(x, 0, x, 0, 0, 0, x, x), (x, 0, x, 0, 0, 0, x, x)]
    for out, numbers, (spec, contract) in zip(laid, plan.numbers, jobs, strict=True):
        top = tops.get(spec.block)
        if groups is not None and spec.block[0] == -1:
            _write_scales(tops[spec.block], out.scales, spec)
        pointers = (x if top is None else top, x if scale is None else scale)
        args[contract] = (out.codes, numbers[0], out.scales, *numbers[1:], *pointers)
    launch(
        cast_tiles.cast_kernel, plan.grid, x, *plan.sizes, *args[1], *args[0], *_pointers(x, groups), **plan.constants
    )
    return laid


class Plan(NamedTuple):
    """The parts of a cast that follow from shape, strides and specs."""

    rooms: tuple[BufferShapes, ...]  # of each job
    longer: tuple[tuple[int, int], ...]  # blocks longer than a tile, whose amax takes a separate pass
    grid: tuple[int, int]
    sizes: tuple[int, ...]  # strides of x, rows, columns, tiles per row of tiles
    numbers: tuple[tuple[int, ...], ...]  # of each job: pitch of the codes, strides of the scales
    constants: dict[str, object]


@lru_cache(maxsize=4096)
def _plan(
    shape: torch.Size,
    strides: tuple[int, ...],
    jobs: Jobs,
    scale_given: bool,
    amax_given: bool,
    experts: int | None,
    tile: Tile | None,
) -> Plan:
    """Computed once for all layers and steps that cast a matrix of this geometry."""
    for spec, _ in jobs:
        if spec.block not in _WHOLE and not all(side in SIDES for side in spec.block):
            raise CastError(f"Triton has no cast for blocks of {spec}: sides are {SIDES} or whole; use the reference.")
    batch, rows, cols = _batch_sizes(shape)
    tile = tile or _tile(jobs, rows, cols, amax_given)
    steps = _batch_strides(shape, strides)
    unit, even = _access(batch, rows, cols, steps)
    forms: list[Facts | None] = [None, None]
    rooms, numbers, longer = [], [], []
    down, across = round_up(rows, layout.ALIGN), round_up(cols, layout.ALIGN)
    for spec, contract in jobs:
        place = buffer_shapes(shape, spec, contract, experts)
        within = not amax_given and _fits(spec.block, tile, rows, cols, experts)
        if not (within or amax_given or spec.block in longer):
            longer.append(spec.block)
        by_expert = experts is not None and spec.block[0] == -1
        forms[contract] = facts(spec, within, scale_given, not by_expert, place.padding, not unit)
        rooms.append(place)
        numbers.append((place.strides[-1 - contract], math.prod(place.scales[-2:]), *place.steps[-2:]))
        # Scales may be padded further than codes: some tiles then write only scales.
        down = max(down, _extent(rows, spec.block[0], place.padding[0]))
        across = max(across, _extent(cols, spec.block[1], place.padding[1]))
    inside = unit and tile.rows % 4 == 0
    whole = experts is None and (down, across) == (rows, cols) and rows % tile.rows == cols % tile.cols == 0
    edges = inside and not whole
    across = ceil_div(across, tile.cols)
    constants: dict[str, object] = {
        "CAST1": forms[1],
        "CAST0": forms[0],
        "GROUPED": experts is not None,
        "EVEN": even,
        "UNIT": unit,
        "BATCH": batch > 1,
        "INSIDE": inside,
        "EDGES": edges,
    }
    constants |= {"TR": tile.rows, "TC": tile.cols, "num_warps": tile.warps}
    constants["maxnreg"] = _register_cap(tile, even, edges)
    grid = ceil_div(down, tile.rows) * across, batch
    return Plan(tuple(rooms), tuple(longer), grid, (*steps, rows, cols, across), tuple(numbers), constants)


def _batch_sizes(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (batch, rows, columns) of a matrix or of a batch of matrices."""
    return (1 if len(shape) == 2 else shape[0]), shape[-2], shape[-1]


def _batch_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """Return the strides of a batch of matrices, or of a matrix as a batch of one."""
    return (shape[0] * strides[0] if len(shape) == 2 else strides[0]), strides[-2], strides[-1]


def facts(
    spec: CastSpec, from_tile: bool, scale_given: bool, write_scale: bool, padding: tuple[int, int], scattered: bool
) -> Facts:
    """Return the constant that describes a cast to the kernel; ``scattered``: rows of x are not contiguous."""
    return Facts(
        *spec.block,
        pow2=spec.scale != "fp32",
        e5m2=spec.format == "e5m2",
        e8m0=spec.scale == "e8m0",
        write_scale=write_scale,
        from_tile=from_tile,
        scale_given=scale_given,
        pad_rows=padding[0],
        pad_cols=padding[1],
        # Kernels that move single bytes through shared memory: scales of e8m0, or codes of values loaded one by one.
        integers=spec.scale == "e8m0" or scattered,
    )


def _transpose(spec: CastSpec) -> CastSpec:
    """Return the cast of the transpose that gives the same codes."""
    return CastSpec(spec.format, (spec.block[1], spec.block[0]), spec.scale)


def _tile(jobs: Sequence[Job], rows: int, cols: int, amax_given: bool) -> Tile:
    """Return the best tile for these casts: see the module docstring."""
    spec, contract = jobs[0]
    if len(jobs) == 1 and spec.block == (1, -1) and contract == 1 and cols <= LONGEST_ROW and not amax_given:
        width = max(128, 1 << (cols - 1).bit_length())
        height = max(1, 4096 // width)
        return Tile(height, width, min(16, max(4, height * width // 1024)))
    if len(jobs) == 2:
        height, width = 64, 128
    else:
        height, width = (32, 128) if contract == 1 else (128, 64)
    height = max(height, *(s.block[0] for s, _ in jobs))
    width = max(width, *(s.block[1] for s, _ in jobs))
    if height * width <= 8192:
        return Tile(height, width, 4)
    # Divisions by scales that are no powers of two need the registers of 8 warps.
    casts = {(spec.format, spec.block, spec.scale == "fp32") for spec, _ in jobs}
    return TILES_OF_TWO[16 if len(casts) == 2 and not any(divides for *_, divides in casts) else 8]


def _register_cap(tile: Tile, even: int, edges: bool) -> int | None:
    """Return the most registers a thread may take, or None for no limit."""
    if tile == TILES_OF_TWO[16] and even >= 8:
        return None  # loads of 16 bytes keep to 64 registers without a cap, which would cost 3 % more instructions
    return tile.registers or (128 if edges and tile.warps < 16 else None)


def _fits(block: tuple[int, int], tile: Tile, rows: int, cols: int, experts: int | None) -> bool:
    """True if every block fits in one tile."""
    whole_rows = block[0] != -1 or (rows <= tile.rows and experts is None)
    return whole_rows and (block[1] != -1 or cols <= tile.cols)


def _extent(size: int, side: int, padding: int) -> int:
    """Return the end of the padded blocks of one dimension, in elements."""
    return 1 if side == -1 else round_up(ceil_div(size, side), padding) * side


def _access(batch: int, rows: int, cols: int, strides: tuple[int, int, int]) -> tuple[bool, int]:
    """Return whether rows of x are contiguous, and the power of two up to 16 that divides their length and strides."""
    if strides[2] != 1 and cols != 1:
        return False, 1
    return True, math.gcd(16, cols, strides[1] if rows > 1 else 0, strides[0] if batch > 1 else 0)


def _pointers(x: Tensor, groups: Groups | None) -> tuple[Tensor, Tensor, Tensor]:
    return (x, x, x) if groups is None else (groups.sizes, groups.starts, groups.tiles)


_Block = tuple[int, int]


def _maxima(x: Tensor, blocks: tuple[_Block, ...], groups: Groups | None) -> dict[_Block, Tensor]:
    """amax patterns (int32) of whole rows, columns or tensors of x [*batch, rows, columns], by block, in one pass.

    Columns and tensors have one for each matrix of a batch, or for each expert in ``groups``.
    """
    plan = _plan_maxima(x.shape, x.stride(), blocks, None if groups is None else groups.experts)
    buffer = zeros(sum(plan.counts), x.device)
    tops = dict(zip(blocks, buffer.split(plan.counts) if len(blocks) > 1 else (buffer,), strict=True))
    pointers = (tops.get(b, buffer) for b in _WHOLE)
    launch(cast_tiles.amax_kernel, plan.grid, x, *plan.sizes, *pointers, *_pointers(x, groups), **plan.constants)
    return tops


class PlanOfMaxima(NamedTuple):
    """The launch of :func:`_maxima`; ``counts``: the number of maxima for each kind of block."""

    counts: list[int]
    grid: tuple[int, int]
    sizes: tuple[int, ...]
    constants: dict[str, object]


@lru_cache(maxsize=4096)
def _plan_maxima(
    shape: torch.Size, strides: tuple[int, ...], blocks: tuple[_Block, ...], experts: int | None
) -> PlanOfMaxima:
    batch, rows, cols = _batch_sizes(shape)
    many = batch if experts is None else experts
    counts = {(1, -1): batch * rows, (-1, 1): many * cols, (-1, -1): many}
    by_row, by_col = (1, -1) in blocks, (-1, 1) in blocks
    tile = Tile(64, 128, 8) if by_row and by_col else Tile(32, 128, 4)
    loads = 2 if by_row and by_col else 4  # tiles in flight: as many as leave registers for a second program
    high, wide = (tile.rows, tile.cols * loads) if by_row else (tile.rows * loads, tile.cols)
    across = ceil_div(cols, wide)
    steps = _batch_strides(shape, strides)
    unit, even = _access(batch, rows, cols, steps)
    constants: dict[str, object] = {
        "ROWS": by_row,
        "COLS": by_col,
        "ALL": (-1, -1) in blocks,
        "GROUPED": experts is not None,
    }
    constants |= {"EVEN": even, "UNIT": unit, "TR": tile.rows, "TC": tile.cols, "STEPS": loads}
    constants["num_warps"] = tile.warps
    grid = ceil_div(rows, high) * across, batch
    return PlanOfMaxima([counts[b] for b in blocks], grid, (*steps, rows, cols, across), constants)


_slabs: dict[tuple[int, torch.device, int], Tensor] = {}  # the rest of a slab, by thread, device and stream
_SLAB = 4096


def zeros(count: int, device: torch.device) -> Tensor:
    """int32 zeros [count] to take maxima in.

    A few zeros are cut from a slab that is filled once for thousands of casts: otherwise each cast would need a launch
    for them. While a CUDA graph is captured, the zeros are its own, so that every replay clears them.
    """
    if count > _SLAB // 64 or is_capturing(device):
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = threading.get_ident(), device, stream
    left = _slabs.get(key)
    if left is None or left.shape[0] < count:
        # The slab outlives the modes that are active now: an accountant of memory would charge it to one layer.
        with torch.inference_mode(False), _disable_current_modes():
            left = torch.zeros(_SLAB, dtype=torch.int32, device=device)
    cut = -(-count // 4) * 4  # pieces begin at multiples of 16 bytes
    _slabs[key] = left[cut:]
    return left[:count]


def _write_scales(top: Tensor, scales: Tensor, spec: CastSpec) -> None:
    """Store the scale of each amax pattern, in the same order."""
    n, e8m0 = top.numel(), spec.scale == "e8m0"
    constants = {"POW2": spec.scale != "fp32", "E5M2": spec.format == "e5m2", "E8M0": e8m0, "BLOCK": 1024}
    launch(cast_tiles.scales_kernel, (ceil_div(n, 1024),), top, scales, n, **constants)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """See ``octavo.fp8.arithmetic.cast.dequantize``; codes and scales may have any strides."""
    if dtype not in _OUT_DTYPES:
        return dequantize(q).to(dtype)
    cast.check_scales(q)
    codes = q.data.view(torch.uint8).reshape(q.data.shape[:-1].numel(), q.data.shape[-1])
    rows, cols = codes.shape
    out = torch.empty(q.data.shape, dtype=dtype, device=codes.device)
    scale = as_bytes(q.scale)
    high = max(128 if codes.stride(1) != 1 else 32, q.spec.block[0])
    across = ceil_div(cols, 128)
    launch(
        cast_tiles.dequantize_kernel,
        (ceil_div(rows, high) * across,),
        *(codes, *codes.stride(), scale, *scale.stride(), out, rows, cols, across),
        BR=q.spec.block[0],
        BC=q.spec.block[1],
        E5M2=q.spec.format == "e5m2",
        E8M0=q.scale.dtype is E8M0,
        EVEN=math.gcd(16, cols),
        TR=high,
        TC=128,
        num_warps=high // 8,
    )
    return out


def convert_to_k_major(q: Quantized, contract: int) -> Operand:
    """Convert as ``layout.k_major``, with a kernel for the copy of codes if one is needed."""
    return layout.k_major(q, contract, copy_to_layout)


def copy_to_layout(q: Quantized, contract: int) -> Quantized:
    """See ``Backend.copy_to_layout``. Tiles of 128 x 128 bytes read whole lines along one dimension and write them
    along the other."""
    data = q.data
    place, grid, numbers, sizes, constants = _plan_relay(data.shape, data.stride(), q.spec, contract)
    codes = torch.empty_strided(place.codes, place.strides, dtype=torch.uint8, device=data.device)
    launch(cast_tiles.relay_kernel, grid, data.view(torch.uint8), *numbers, codes, *sizes, **constants)
    laid = codes.view(data.dtype)
    return q._replace(data=laid if place.data == place.codes else laid.as_strided(place.data, place.strides))


@lru_cache(maxsize=4096)
def _plan_relay(
    shape: torch.Size, strides: tuple[int, ...], spec: CastSpec, contract: int
) -> tuple[BufferShapes, tuple[int, int], tuple[int, ...], tuple[int, ...], dict[str, object]]:
    """(buffer, grid, strides of the input, sizes, constants) of :func:`copy_to_layout`."""
    place, (batch, rows, cols), steps = (
        buffer_shapes(shape, spec, contract, None),
        _batch_sizes(shape),
        _batch_strides(shape, strides),
    )
    down, wide = layout.padded_sizes(rows, cols, spec, contract)
    free, contracted = (rows, cols) if contract == 1 else (cols, rows)
    numbers = (steps[0], *(steps[1:] if contract == 1 else (steps[2], steps[1])))
    across = ceil_div(wide, 128)
    constants: dict[str, object] = {
        "EVEN_F": math.gcd(16, free),
        "EVEN_K": math.gcd(16, contracted),
        "TF": 128,
        "TK": 128,
        "num_warps": 8,
    }
    return place, (ceil_div(down, 128) * across, batch), numbers, (free, contracted, wide, across), constants
