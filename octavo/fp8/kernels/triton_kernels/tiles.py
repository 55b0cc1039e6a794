"""The choice of a GEMM kernel's form and tile, on the host, from shapes and the kind of GPU only.

Nothing is timed at run time, so the same call always runs the same code, from the first step to the last, and a CUDA
graph can capture it. The cost of a tile of m x n with steps of 128 (one program, FP8 codes)::

    loads     (m + n) * 128 bytes per step      feeds 2 m n * 128 operations: intensity 2 m n / (m + n) per byte
    sums      m * n fp32 values                 over 32 * warps threads; twice that where each step starts from zero
    stages    (m + n) * 128 bytes each          of the shared memory: 99 KiB on SM89 and SM120, 227 KiB on SM90 and 100

So 128 x 256 (intensity 171) is used only where sums are not held twice, 128 x 128 (128) otherwise, and smaller tiles
when these would leave multiprocessors idle. On SM90 it is 256 x 128: with one scale per tensor, the compiler of Triton
3.6 makes each product of 128 x 256 wait for the previous one. Experts, whose tiles have 128 rows, use neither.
:func:`choose` takes the tile with the smallest ``waves * m * n / rate``, where rate is the throughput of a tile of this
size relative to the best one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.fp8.arithmetic.cast import CastError, CastSpec
from octavo.fp8.kernels.layout import ceil_div
from octavo.fp8.kernels.triton_kernels.launch import INTERPRETED

GROUP = 8  # row tiles that share a column of tiles in L2: see contraction.place
STEP = 128  # codes of the contraction per step: also the side of the largest scaling block
FEW = 64  # the most rows of a product that the decode kernel takes, which reads weights once
_LEAST = 4 * STEP  # of the contraction per program: less would not fill the stages of its pipeline


class Gpu(NamedTuple):
    """Compute capability as in 90 (0: the interpreter), and multiprocessors."""

    sm: int
    processors: int


class ScaleBlock(NamedTuple):
    """The block of codes of an operand that share a scale (see ``contraction``), and the formats of scales and
    codes."""

    free: int  # rows that share a scale: 1, 128, or 0 for all
    side: int  # codes of the contraction that share a scale: 32, 128, or 0 for all
    e8m0: bool
    e5m2: bool


class Form(NamedTuple):
    """The constants of a compiled kernel, with the tile."""

    a: ScaleBlock
    b: ScaleBlock
    promote: bool  # each step's product starts from zero and is added in fp32
    scaled: bool  # the tensor core applies 1x32 e8m0 scales (SM100)
    tma: bool  # operands are TMA descriptors

    @property
    def fine(self) -> bool:
        """True if scales change within a step of 128."""
        return not self.scaled and 32 in (self.a.side, self.b.side)

    @property
    def twice(self) -> bool:
        """True if registers hold the product of a step and the sum at the same time."""
        return not self.scaled and (self.promote or self.a.side > 0 or self.b.side > 0)


class Tile(NamedTuple):
    """Rows, columns and steps of one program's tile, its warps, and the stages in flight."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# (m, n, warps, stages, rate) by architecture. Compiled ahead of time, none of these spills.
_WIDE = {
    90: ((256, 128, 8, 4, 1.0), (128, 128, 8, 4, 0.8), (64, 128, 4, 4, 0.6), (64, 64, 4, 4, 0.4)),
    100: ((128, 256, 8, 4, 1.0), (128, 128, 8, 4, 0.7)),
    120: ((128, 128, 8, 3, 1.0), (128, 64, 8, 3, 0.75), (64, 64, 4, 3, 0.5)),
}
_TWICE = {
    90: ((128, 128, 8, 4, 1.0), (64, 128, 4, 4, 0.75), (64, 64, 4, 4, 0.5)),
    100: ((128, 128, 8, 4, 1.0), (128, 64, 8, 4, 0.7)),
    120: ((128, 128, 8, 3, 1.0), (128, 64, 8, 3, 0.75), (64, 64, 4, 3, 0.5)),
}


# Products of few rows: (columns, warps, stages). At most half of an SM's shared memory, so that two programs fit.
_DECODE = {90: (64, 4, 6), 100: (64, 4, 6), 120: (64, 4, 3)}


def family(sm: int) -> int:
    """Return the architecture whose tiles are used for this one."""
    return 90 if 90 <= sm < 100 else 100 if 100 <= sm < 120 else 120


@lru_cache(maxsize=64)
def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(properties.major * 10 + properties.minor, properties.multi_processor_count)


def gpu_of(device: torch.device) -> Gpu:
    """Return the properties of a device that tiles depend on; a CPU means the interpreter."""
    if device.type != "cuda":
        return Gpu(0, 1)
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


def scale_block(spec: CastSpec, contract: int) -> ScaleBlock:
    """Return the block of codes that share a scale of ``spec`` in an operand whose dimension ``contract`` is
    contracted.

    Raises CastError unless blocks have 32, 128 or all elements along the contraction, and 1, 128 or all across it.
    """
    free, side = (0 if n == -1 else n for n in (spec.block[1 - contract], spec.block[contract]))
    if side not in (0, 32, 128) or free not in (0, 1, 128):
        raise CastError(
            "Triton's GEMMs support blocks with 32, 128 or all elements along the contraction and 1, 128 or all "
            f"across it; {spec} contracted along dimension {contract} has blocks of {spec.block}. Cast "
            "that operand along the contraction, or use backend='reference'."
        )
    return ScaleBlock(free, side, spec.scale == "e8m0", spec.format == "e5m2")


def form(a: ScaleBlock, b: ScaleBlock, fast: bool, gpu: Gpu) -> Form:
    """Return the form for two operands. ``fast``: the tensor core may accumulate in reduced precision."""
    blackwell = gpu.sm >= 100
    scaled = blackwell and all((g.free, g.side, g.e8m0) == (1, 32, True) for g in (a, b))
    exact = 100 <= gpu.sm < 120  # tensor cores of SM100 accumulate in fp32
    whole = a.side == b.side == 0  # otherwise scales are applied to each step's product, which promotes it
    return Form(a, b, promote=whole and not (fast or exact), scaled=scaled, tma=gpu.sm >= 90)


@lru_cache(maxsize=4096)
def choose(rows: int, cols: int, what: Form, gpu: Gpu, batch: int = 1, tallest: int = 256) -> Tile:
    """Return the tile for ``batch`` results of [rows, cols], of at most ``tallest`` rows."""

    def cost(candidate: tuple[Tile, float]) -> float:
        (m, n, *_), rate = candidate
        programs = batch * ceil_div(rows, m) * ceil_div(cols, n)
        return ceil_div(programs, gpu.processors) * m * n / rate

    return min((c for c in candidates(what, gpu) if c[0].m <= tallest), key=cost)[0]


def invariant_tile(what: Form, gpu: Gpu, tallest: int = 256) -> Tile:
    """Return the tile of a batch-invariant product, which is independent of the number of rows and chosen for 128."""
    return choose(STEP, 32 * STEP, what, gpu, tallest=tallest)


def candidates(what: Form, gpu: Gpu) -> list[tuple[Tile, float]]:
    """Return the tiles of a form, each with its rate."""
    k = 32 if what.fine else STEP
    table = (_TWICE if what.twice else _WIDE)[family(gpu.sm)]
    tiles = [(Tile(m, n, k, warps, stages), rate) for m, n, warps, stages, rate in table]
    # Where 128 rows share a scale, a tile must be inside one block: the kernel loads one scale for all of its rows.
    return [(t, r) for t, r in tiles if (what.a.free != 128 or t.m <= 128) and (what.b.free != 128 or t.n <= 128)]


def decode(what: Form, gpu: Gpu) -> Tile:
    """Return the tile of a product of few rows, the same for 1 row and for :data:`FEW`."""
    n, warps, stages = _DECODE[family(gpu.sm)]
    if what.scaled and gpu.sm < 120:
        return Tile(128, n, STEP, warps, stages - 2)  # tcgen05 applies scales to 128 rows at least
    return Tile(FEW, n, 32 if what.fine else STEP, warps, stages)


def contraction_per_program(cols: int, contracted: int, tile: Tile, gpu: Gpu) -> int:
    """Return the codes of the contraction per program, a multiple of 128, so that all multiprocessors read weights."""
    wanted = min(ceil_div(gpu.processors, ceil_div(cols, tile.n)), max(1, contracted // _LEAST))
    return ceil_div(contracted, wanted * STEP) * STEP


def options(what: Form, tile: Tile) -> dict[str, object]:
    """Return the launch arguments that all GEMM kernels share."""
    return {"FORM": what, "TILE": tile, "GROUP_M": GROUP, "num_warps": tile.warps, "num_stages": tile.stages}


def source(codes: Tensor, rows: int, cols: int, block: tuple[int, int], tma: bool) -> Tensor | TensorDescriptor:
    """Codes [padded rows, padded columns] as a kernel takes them: a descriptor, which reads zeros beyond the real
    ``rows`` and ``cols``, or the tensor. The interpreter gets bytes, which the kernels decode."""
    if INTERPRETED:
        codes = codes.view(torch.uint8)
    return TensorDescriptor(codes, [rows, cols], [codes.stride(0), 1], list(block)) if tma else codes
