"""The launches of the casts: tiles, grids and constants, from shape, strides and specs.

Tiles are chosen such that stores fill lines of 128 bytes, or half of one, and a multiprocessor has several programs
whose loads, arithmetic and stores overlap: 64 x 128 for two layouts at once, 128 x 128 where blocks of 128 in both
dimensions need it; 32 x 128 for rows only, 128 x 64 for columns only; for whole rows, rows of 4096 values together. 64
values of a thread share its addresses; a program has 4 warps, so that more programs fit, unless the tile is 128 x 128:
:data:`TILES_OF_TWO` has its two candidates, and ``octavo bench cast`` times both.

Plans are computed once for all layers and steps that cast a matrix of the same geometry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from octavo.fp8.arithmetic.cast import CastError, CastSpec
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.layout import ceil_div, round_up
from octavo.fp8.kernels.triton_kernels.cast_blocks import Facts
from octavo.fp8.kernels.triton_kernels.room import BufferShapes, buffer_shapes

SIDES = (1, 16, 32, 64, 128)  # sides of finite blocks: they divide every tile
LONGEST_ROW = 32768  # longest row that one program casts: 64 values for each of 512 threads
LONGEST_WITH_MAXIMA = 16384  # the same where the maxima of the columns need as many registers as the row
WHOLE = ((1, -1), (-1, 1), (-1, -1))

Block = tuple[int, int]
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


class RowsPlan(NamedTuple):
    """The launch of ``cast_rows.rows_kernel``."""

    place: BufferShapes
    grid: tuple[int]
    sizes: tuple[int, ...]  # strides of x, rows, columns, tiles
    pitch: int
    scale_step: int
    constants: dict[str, object]


@lru_cache(maxsize=4096)
def plan_rows(shape: torch.Size, strides: tuple[int, ...], spec: CastSpec, processors: int) -> RowsPlan:
    """Return the launch of ``cast_rows.rows_kernel`` on a GPU with so many multiprocessors."""
    rows, cols = shape
    place = buffer_shapes(shape, spec, 1, None)
    unit, even = _access(1, rows, cols, (0, strides[0], strides[1]))
    tile = _tile_of_rows(cols)
    tiles = ceil_div(round_up(rows, layout.ALIGN), tile.rows)
    constants: dict[str, object] = {
        "CAST": facts(spec, True, False, True, place.padding, unit),
        "EVEN": even,
        "UNIT": unit,
        "PADDED": cols % layout.ALIGN != 0,
        "TR": tile.rows,
        "TC": tile.cols,
        "STAGES": 3,
        "num_warps": tile.warps,
    }
    # As many programs as are resident together at 80 registers a thread: 24 warps a multiprocessor.
    programs = processors * max(1, 24 // tile.warps)
    sizes = (*strides, rows, cols, tiles)
    return RowsPlan(place, (min(tiles, programs),), sizes, place.strides[0], place.steps[0], constants)


class Plan(NamedTuple):
    """The parts of a cast that follow from shape, strides and specs."""

    rooms: tuple[BufferShapes, ...]  # of each job
    longer: tuple[tuple[int, int], ...]  # blocks longer than a tile, whose amax takes a separate pass
    grid: tuple[int, int]
    sizes: tuple[int, ...]  # strides of x, rows, columns, tiles per row of tiles
    numbers: tuple[tuple[int, ...], ...]  # of each job: pitch of the codes, strides of the scales
    constants: dict[str, object]


@lru_cache(maxsize=4096)
def plan_cast(
    shape: torch.Size,
    strides: tuple[int, ...],
    jobs: Jobs,
    scale_given: bool,
    amax_given: bool,
    experts: int | None,
    tile: Tile | None,
) -> Plan:
    """Return the launch of ``cast_tiles.cast_kernel``. Raises CastError for a block that no tile can hold."""
    for spec, _ in jobs:
        if spec.block not in WHOLE and not all(side in SIDES for side in spec.block):
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
        forms[contract] = facts(spec, within, scale_given, not by_expert, place.padding, unit)
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
    constants["maxnreg"] = _register_cap(tile, jobs, even, edges)
    grid = ceil_div(down, tile.rows) * across, batch
    return Plan(tuple(rooms), tuple(longer), grid, (*steps, rows, cols, across), tuple(numbers), constants)


def _batch_sizes(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (batch, rows, columns) of a matrix or of a batch of matrices."""
    return (1 if len(shape) == 2 else shape[0]), shape[-2], shape[-1]


def _batch_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """Return the strides of a batch of matrices, or of a matrix as a batch of one."""
    return (shape[0] * strides[0] if len(shape) == 2 else strides[0]), strides[-2], strides[-1]


def facts(
    spec: CastSpec, from_tile: bool, scale_given: bool, write_scale: bool, padding: tuple[int, int], unit: bool
) -> Facts:
    """Return the constant that describes a cast to the kernel."""
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
        # Scales of e8m0, and with Triton 3.6 codes of strided rows, move through shared memory as single bytes.
        integers=spec.scale == "e8m0" or not unit,
    )


def transpose(spec: CastSpec) -> CastSpec:
    """Return the cast of the transpose that gives the same codes."""
    return CastSpec(spec.format, (spec.block[1], spec.block[0]), spec.scale)


def _tile(jobs: Sequence[Job], rows: int, cols: int, amax_given: bool) -> Tile:
    """Return the best tile for these casts: see the module docstring."""
    spec, contract = jobs[0]
    if len(jobs) == 1 and spec.block == (1, -1) and contract == 1 and cols <= LONGEST_ROW and not amax_given:
        return _tile_of_rows(cols)
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


def _tile_of_rows(cols: int) -> Tile:
    """Return the tile that holds whole rows."""
    width = max(128, 1 << (cols - 1).bit_length())
    height = max(1, 4096 // width)
    return Tile(height, width, min(16, max(4, height * width // 1024)))


def _register_cap(tile: Tile, jobs: Jobs, even: int, edges: bool) -> int | None:
    """Return the most registers a thread may take, or None for no limit."""
    square = any(1 not in spec.block for spec, _ in jobs)
    if tile == TILES_OF_TWO[16] and even >= 8 and not (square and edges):
        return None  # it keeps to 64 registers without a cap, which would cost 3 % more instructions
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


class PlanOfMaxima(NamedTuple):
    """The launch of :func:`_maxima`; ``counts``: the number of maxima for each kind of block."""

    counts: list[int]
    grid: tuple[int, int]
    sizes: tuple[int, ...]
    constants: dict[str, object]


@lru_cache(maxsize=4096)
def plan_maxima(
    shape: torch.Size, strides: tuple[int, ...], blocks: tuple[Block, ...], experts: int | None
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


@lru_cache(maxsize=4096)
def plan_relay(
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
