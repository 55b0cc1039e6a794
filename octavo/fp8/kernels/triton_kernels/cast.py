"""Casts in Triton: bit for bit those of ``octavo/fp8/arithmetic/cast.py``, laid out as :mod:`octavo.fp8.kernels.layout`
says.

x becomes a matrix [rows, columns] by a view, whatever its two strides are; one that is contiguous down its columns is
cast as its transpose, with the block turned too. The kernels (``cast_tiles``) then know one case. What runs is settled
by shapes, strides and specs alone::

    every block lies within a tile, or amax is given    one launch
    rows, columns or tensors longer than a tile         a pass for their amax (2 launches: zeros, maxima), then one

Tiles, so that stores fill lines of 128 bytes, or half of one, and a multiprocessor has several programs whose loads,
arithmetic and stores overlap: 64 x 128 for two layouts at once, 128 x 128 where blocks of 128 both ways need it; 32 x
128 for rows alone, 128 x 64 for columns alone; for whole rows, as many rows as make up 4096 values.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.formats import E8M0
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.capture import capturing
from octavo.fp8.kernels.groups import Groups
from octavo.fp8.kernels.layout import Operand, as_bytes, ceil_div, round_up
from octavo.fp8.kernels.triton_kernels import cast_tiles
from octavo.fp8.kernels.triton_kernels.cast_tiles import Facts
from octavo.fp8.kernels.triton_kernels.launch import launch

SIDES = (1, 16, 32, 64, 128)  # of finite blocks: they divide every tile
LONGEST_ROW = 32768  # that one program casts: 64 values for each of 512 threads
_WHOLE = ((-1, -1), (1, -1), (-1, 1))
_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Job = tuple[CastSpec, int]  # a cast, and the dimension that its GEMM contracts


class Laid(NamedTuple):
    """What a kernel fills: ``codes`` [batch, free, contracted] uint8, padded; ``data`` [batch, rows, columns], the view
    of the real ones; ``scale`` [batch, row blocks, column blocks]; ``padding``: the kernel writes row and column blocks
    up to multiples of these."""

    codes: Tensor
    data: Tensor
    scale: Tensor
    padding: tuple[int, int]


class Tile(NamedTuple):
    """Rows and columns of one program's tile, its warps, and the most registers a thread may take (None: any)."""

    rows: int
    cols: int
    warps: int
    registers: int | None = None


def quantize(x: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
    """See ``Backend.quantize``."""
    return _cast(x, [(spec, contract)])[0]


def quantize_both(x: Tensor, row: CastSpec, col: CastSpec) -> tuple[Quantized, Quantized]:
    """See ``Backend.quantize_both``: one pass over x, or two where whole rows, columns or the tensor share a scale."""
    first, second = _cast(x, [(row, 1), (col, 0)])
    return first, second


def quantize_with_scale(
    x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None, contracts: Sequence[int] = (1,)
) -> list[Quantized]:
    """See ``Backend.quantize_with_scale``, for each of ``contracts``, 1 before 0; one launch if ``amax`` is given."""
    x_MK = cast.flat(x)
    lay = cast.layout(x_MK.shape[0], x_MK.shape[1], spec.block)
    scale = cast.on_grid("scale", scale, x_MK, lay, spec)
    amax = None if amax is None else cast.on_grid("amax", amax, x_MK, lay, spec)
    return _cast(x, [(spec, contract) for contract in contracts], scale, amax)


def _cast(x: Tensor, jobs: Sequence[Job], scale: Tensor | None = None, amax: Tensor | None = None) -> list[Quantized]:
    x_1MK = cast.flat(x).unsqueeze(0)
    outs = run(x_1MK, jobs, scale if scale is None else scale[None], amax if amax is None else amax[None])
    # A matrix keeps its strides: a view of the same shape may give sides of 1 others, and layout.lies reads them.
    data = [o.data[0] if x.dim() == 2 else o.data[0].view(x.shape) for o in outs]
    return [Quantized(d, o.scale[0], spec) for d, o, (spec, _) in zip(data, outs, jobs, strict=True)]


def run(
    x: Tensor,
    jobs: Sequence[Job],
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    groups: Groups | None = None,
) -> list[Laid]:
    """Cast x [batch, rows, columns] for one contraction, or for 1 and 0 in that order.

    ``scale``, ``amax`` [batch, row blocks, column blocks], fp32, contiguous: given from outside, for one spec.
    ``groups``: the rows are those of experts (batch 1), and "all rows" of a block means all of an expert; the scale of
    such a block is [1, experts, column blocks]. Raises CastError for a block that no tile can hold.
    """
    _, rows, cols = x.shape
    if groups is None and x.stride(2) != 1 and x.stride(1) == 1:
        flip = [None if t is None else t.transpose(1, 2).contiguous() for t in (scale, amax)]
        turned = [(_turned(spec), 1 - contract) for spec, contract in reversed(jobs)]
        outs = run(x.transpose(1, 2), turned, flip[0], flip[1])
        return [o._replace(data=o.data.transpose(1, 2), scale=o.scale.transpose(1, 2)) for o in reversed(outs)]
    for spec, _ in jobs:
        if spec.block not in _WHOLE and not all(side in SIDES for side in spec.block):
            raise CastError(f"Triton has no cast for blocks of {spec}: sides are {SIDES} or whole; use the reference.")
    laid = [allocate(x, spec, contract, groups) for spec, contract in jobs]
    if not x.numel():
        if scale is not None:
            kept = scale if jobs[0][0].scale != "e8m0" else (scale.view(torch.int32) >> 23).to(torch.uint8)
            for out in laid:
                as_bytes(out.scale).copy_(kept)
        return laid

    tile = _tile(jobs, rows, cols, amax is not None)
    tops = {} if amax is None else {spec.block: amax.view(torch.int32) for spec, _ in jobs}
    if amax is None:
        longer = {spec.block for spec, _ in jobs if not _holds(spec.block, tile, rows, cols, groups)}
        tops = _maxima(x, longer, groups) if longer else {}
    forms: list[Facts | None] = [None, None]
    args: list[list[object]] = [[x, 0, x, 0, 0, 0, x, x], [x, 0, x, 0, 0, 0, x, x]]
    down, across = round_up(rows, layout.ALIGN), round_up(cols, layout.ALIGN)
    for out, (spec, contract) in zip(laid, jobs, strict=True):
        top = tops.get(spec.block)
        by_expert = groups is not None and spec.block[0] == -1
        if by_expert:
            _write_scales(tops[spec.block], out.scale, spec)
        forms[contract] = facts(spec, top is None, scale is not None, not by_expert, out.padding)
        s = as_bytes(out.scale)
        args[contract] = [
            out.codes, out.codes.stride(1), s, *s.stride(), x if top is None else top, x if scale is None else scale
        ]  # fmt: skip
        # Scales may be padded further than codes: some tiles then write nothing else.
        down = max(down, _extent(rows, spec.block[0], out.padding[0]))
        across = max(across, _extent(cols, spec.block[1], out.padding[1]))
    across = ceil_div(across, tile.cols)
    unit, even = _access(x)
    launch(
        cast_tiles.cast_kernel,
        (ceil_div(down, tile.rows) * across, x.shape[0]),
        *(x, *x.stride(), rows, cols, across, *args[1], *args[0], *_pointers(x, groups)),
        CAST1=forms[1],
        CAST0=forms[0],
        GROUPED=groups is not None,
        EVEN=even,
        UNIT=unit,
        TR=tile.rows,
        TC=tile.cols,
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )
    return laid


def facts(spec: CastSpec, from_tile: bool, given: bool, write_scale: bool, padding: tuple[int, int]) -> Facts:
    """The constant that describes a cast to the kernel."""
    e5m2, e8m0 = spec.format == "e5m2", spec.scale == "e8m0"
    return Facts(*spec.block, spec.scale != "fp32", e5m2, e8m0, write_scale, from_tile, given, *padding)


def allocate(x: Tensor, spec: CastSpec, contract: int, groups: Groups | None = None) -> Laid:
    """Room for the cast of x [batch, rows, columns], as :mod:`~octavo.fp8.kernels.layout` has it, for each of a batch.

    Nothing is written yet, unless x is empty: its scales are 1 then.
    """
    batch, rows, cols = x.shape
    codes = torch.empty(batch, *layout.padded_sizes(rows, cols, spec, contract), dtype=torch.uint8, device=x.device)
    real = codes.view(spec.fmt.dtype)
    data = real[:, :rows, :cols] if contract == 1 else real[:, :cols, :rows].transpose(1, 2)
    grid = layout.grid_of(rows, cols, spec)
    along, across = spec.block[contract], spec.block[1 - contract]
    dtype = torch.uint8 if spec.scale == "e8m0" else torch.float32
    free, contracted = grid[1 - contract], grid[contract]
    pads = (1, 1)  # of free and contracted blocks
    if groups is not None and spec.block[0] == -1:
        grid = (groups.experts, grid[1])
        held = view = torch.empty(batch, *grid, dtype=dtype, device=x.device)
    else:
        if along != -1 and spec.scale != "e8m0":
            pads = (layout.ALIGN, 1) if across == 1 else (1, layout.SCALE_ALIGN)
        sizes = round_up(free, pads[0]), round_up(contracted, pads[1])
        if across == 1 and pads[0] > 1:
            held = torch.empty(batch, sizes[1], sizes[0], dtype=dtype, device=x.device).transpose(1, 2)
        else:
            held = torch.empty(batch, *sizes, dtype=dtype, device=x.device)
        view = held[:, :free, :contracted]
        view = view if contract == 1 else view.transpose(1, 2)
    if not x.numel():
        held.fill_(127 if spec.scale == "e8m0" else 1)
    scale = view.view(E8M0) if spec.scale == "e8m0" else view
    return Laid(codes, data, scale, pads if contract == 1 else (pads[1], pads[0]))


def _turned(spec: CastSpec) -> CastSpec:
    """The cast of the transpose."""
    return CastSpec(spec.format, (spec.block[1], spec.block[0]), spec.scale)


def _tile(jobs: Sequence[Job], rows: int, cols: int, amax_given: bool) -> Tile:
    """The tile that fits these casts best: see the top of this file."""
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
    if height * width > 8192:
        return Tile(height, width, 8, registers=128)  # two programs a multiprocessor; fits without spilling
    return Tile(height, width, 4 if len(jobs) == 1 else 8)


def _holds(block: tuple[int, int], tile: Tile, rows: int, cols: int, groups: Groups | None) -> bool:
    """Whether every block lies within one tile."""
    whole_rows = block[0] != -1 or (rows <= tile.rows and groups is None)
    return whole_rows and (block[1] != -1 or cols <= tile.cols)


def _extent(size: int, side: int, padding: int) -> int:
    """How far the blocks of one dimension, padded, reach."""
    return 1 if side == -1 else round_up(ceil_div(size, side), padding) * side


def _access(x: Tensor) -> tuple[bool, int]:
    """Whether rows of x are contiguous, and the power of two up to 16 that divides their length and distances."""
    batch, rows, cols = x.shape
    if x.stride(2) != 1 and cols != 1:
        return False, 1
    return True, math.gcd(16, cols, x.stride(1) if rows > 1 else 0, x.stride(0) if batch > 1 else 0)


def _pointers(x: Tensor, groups: Groups | None) -> tuple[Tensor, Tensor, Tensor]:
    return (x, x, x) if groups is None else (groups.sizes, groups.starts, groups.tiles)


def _maxima(x: Tensor, blocks: set[tuple[int, int]], groups: Groups | None) -> dict[tuple[int, int], Tensor]:
    """amax patterns (int32) of whole rows, columns or tensors of x [batch, rows, columns], by block, in one pass.

    Of columns and tensors there is one for each of a batch, or of the experts in ``groups``.
    """
    batch, rows, cols = x.shape
    many = batch if groups is None else groups.experts
    sizes = {(1, -1): batch * rows, (-1, 1): many * cols, (-1, -1): many}
    held = _zeros(sum(sizes[b] for b in blocks), x.device)
    tops = dict(zip(blocks, held.split([sizes[b] for b in blocks]), strict=True))
    by_row, by_col = (1, -1) in blocks, (-1, 1) in blocks
    tile = Tile(64, 128, 8) if by_row and by_col else Tile(32, 128, 4)
    steps = 2 if by_row and by_col else 4  # as many loads in flight as leave registers for a second program
    high, wide = (tile.rows, tile.cols * steps) if by_row else (tile.rows * steps, tile.cols)
    across = ceil_div(cols, wide)
    unit, even = _access(x)
    launch(
        cast_tiles.amax_kernel,
        (ceil_div(rows, high) * across, batch),
        *(x, *x.stride(), rows, cols, across, *(tops.get(b, held) for b in sizes), *_pointers(x, groups)),
        ROWS=by_row,
        COLS=by_col,
        ALL=(-1, -1) in blocks,
        GROUPED=groups is not None,
        EVEN=even,
        UNIT=unit,
        TR=tile.rows,
        TC=tile.cols,
        STEPS=steps,
        num_warps=tile.warps,
    )
    return tops


_slabs: dict[tuple[int, torch.device, int], Tensor] = {}  # by thread, device and stream: what is left of each
_SLAB = 4096


def _zeros(count: int, device: torch.device) -> Tensor:
    """int32 zeros to take maxima in. A few are cut from a slab that is filled once for thousands of casts: each would
    be a launch of its own otherwise. A CUDA graph, whose replays take their maxima anew, fills its own. No mode sees
    the slab come, which outlives what the mode watches: the accountant would put it down to a layer."""
    if count > _SLAB // 64 or capturing(device):
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = threading.get_ident(), device, stream
    left = _slabs.get(key)
    if left is None or left.shape[0] < count:
        with torch.inference_mode(False), _disable_current_modes():
            left = torch.zeros(_SLAB, dtype=torch.int32, device=device)
    cut = -(-count // 4) * 4  # pieces begin at multiples of 16 bytes
    _slabs[key] = left[cut:]
    return left[:count]


def _write_scales(top: Tensor, scale: Tensor, spec: CastSpec) -> None:
    """Scales of amax patterns, one each, in the same order."""
    n, e8m0 = top.numel(), spec.scale == "e8m0"
    constants = {"POW2": spec.scale != "fp32", "E5M2": spec.format == "e5m2", "E8M0": e8m0, "BLOCK": 1024}
    launch(cast_tiles.scales_kernel, (ceil_div(n, 1024),), top, as_bytes(scale), n, **constants)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """See ``octavo.fp8.arithmetic.cast.dequantize``; codes and scales may have any strides."""
    if dtype not in _OUT_DTYPES:
        return dequantize(q).to(dtype)
    cast.fitting(q)
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


def relaid(q: Quantized, contract: int) -> Operand:
    """``layout.k_major`` whose copy of codes, where one is needed, is made by a kernel."""
    return layout.k_major(q if layout.lies(q, contract) else transpose(q, contract), contract)


def transpose(q: Quantized, contract: int) -> Quantized:
    """The same q [rows, columns] with its codes laid out anew for the contraction of dimension ``contract``."""
    rows, cols = q.data.shape
    codes = q.data.view(torch.uint8)
    sizes = layout.padded_sizes(rows, cols, q.spec, contract)
    buffer = relay((codes if contract == 1 else codes.t()).unsqueeze(0), sizes)[0].view(q.data.dtype)
    return q._replace(data=buffer[:rows, :cols] if contract == 1 else buffer[:cols, :rows].t())


def relay(codes: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Codes [batch, free, contracted] (uint8, any strides) as a contiguous buffer [batch, *sizes], padded with zeros.

    Tiles of 128 x 128 bytes: whole lines are read along one dimension and written along the other.
    """
    batch, free, contracted = codes.shape
    out = torch.empty(batch, *sizes, dtype=torch.uint8, device=codes.device)
    across = ceil_div(sizes[1], 128)
    launch(
        cast_tiles.relay_kernel,
        (ceil_div(sizes[0], 128) * across, batch),
        *(codes, *codes.stride(), out, free, contracted, sizes[1], across),
        EVEN_F=math.gcd(16, free),
        EVEN_K=math.gcd(16, contracted),
        TF=128,
        TK=128,
        num_warps=8,
    )
    return out
