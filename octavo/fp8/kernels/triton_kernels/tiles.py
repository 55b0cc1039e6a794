"""Which form of a GEMM kernel runs, and with which tiles: settled on the host, from shapes and the kind of GPU alone.

Nothing is timed at run time, so the same call always runs the same code, on the first step as on the last, and a CUDA
graph can hold it. What a tile of m x n with steps of 128 costs (one program, FP8 codes)::

    loads     (m + n) * 128 bytes a step        feeds 2 m n * 128 operations: intensity 2 m n / (m + n) per byte
    sums      m * n fp32 values                 over 32 * warps threads; twice that where each step starts from zero
    stages    (m + n) * 128 bytes each          of the shared memory: 99 KiB on SM89 and SM120, 227 KiB on SM90 and 100

Hence 128 x 256 (intensity 171) only where sums are not held twice, 128 x 128 (128) otherwise, and smaller tiles when
these would leave multiprocessors without work. On SM90 it is 256 x 128, since Triton 3.6 has a compiler that lets each
product of 128 x 256 wait for the one before it under a scale a tensor; experts, whose tiles are 128 rows, have neither.
:func:`choose` takes the tile with the smallest ``waves * m * n / rate``: rate is what a tile of this size reaches of
the best one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.fp8.arithmetic.cast import CastError, CastSpec
from octavo.fp8.kernels.layout import ceil_div
from octavo.fp8.kernels.triton_kernels.launch import INTERPRETED

GROUP = 8  # row tiles that go down together: see contraction.place
STEP = 128
FEW = 64  # rows of a product that only reads its weights once: see decode
_LEAST = 4 * STEP  # of the contraction for one program: what is in flight when it begins


class Gpu(NamedTuple):
    """Compute capability as in 90 (0: the interpreter), and multiprocessors."""

    sm: int
    processors: int


class Grain(NamedTuple):
    """How an operand's scales belong to its codes (see ``contraction``), and the formats of both."""

    free: int
    side: int
    e8m0: bool
    e5m2: bool


class Form(NamedTuple):
    """What a kernel is compiled for beside its tile."""

    a: Grain
    b: Grain
    promote: bool
    scaled: bool
    tma: bool

    @property
    def fine(self) -> bool:
        """Whether scales change within a step of 128."""
        return not self.scaled and 32 in (self.a.side, self.b.side)

    @property
    def twice(self) -> bool:
        """Whether each step's product is held beside the sum."""
        return not self.scaled and (self.promote or self.a.side > 0 or self.b.side > 0)


class Tile(NamedTuple):
    """Rows, columns and steps of one program's tile, its warps, and the stages in flight."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# (m, n, warps, stages, rate): compiled ahead of time, none of these spills.
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


# Of products of few rows: (columns, warps, stages). Half of an SM's shared memory at most, so that two programs fit.
_DECODE = {90: (64, 4, 6), 100: (64, 4, 6), 120: (64, 4, 3)}


def family(sm: int) -> int:
    """The architecture whose tiles serve this one."""
    return 90 if 90 <= sm < 100 else 100 if 100 <= sm < 120 else 120


@lru_cache(maxsize=64)
def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    return Gpu(found.major * 10 + found.minor, found.multi_processor_count)


def gpu_of(device: torch.device) -> Gpu:
    """What tiles depend on, of a device; the CPU is the interpreter."""
    if device.type != "cuda":
        return Gpu(0, 1)
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


def grain(spec: CastSpec, contract: int) -> Grain:
    """How scales of ``spec`` belong to the codes of an operand whose dimension ``contract`` is contracted. Raises
    CastError if they change along the contraction otherwise than every 32 or 128."""
    free, side = (0 if n == -1 else n for n in (spec.block[1 - contract], spec.block[contract]))
    if side not in (0, 32, 128) or free not in (0, 1, 128):
        raise CastError(
            f"Triton's GEMMs take scales that hold for 32, 128 or all of the contraction, and for 1, 128 or all of the "
            f"other dimension; {spec} contracted along dimension {contract} has blocks of {spec.block}. Cast that "
            "operand along the contraction, or use backend='reference'."
        )
    return Grain(free, side, spec.scale == "e8m0", spec.format == "e5m2")


def form(a: Grain, b: Grain, fast: bool, gpu: Gpu) -> Form:
    """The form for two operands. ``fast``: sums may be left to the tensor core, whatever its precision."""
    blackwell = gpu.sm >= 100
    scaled = blackwell and all((g.free, g.side, g.e8m0) == (1, 32, True) for g in (a, b))
    exact = 100 <= gpu.sm < 120  # tensor memory sums in fp32
    whole = a.side == b.side == 0  # other scales are applied to each step's product anyway
    return Form(a, b, promote=whole and not (fast or exact), scaled=scaled, tma=gpu.sm >= 90)


@lru_cache(maxsize=4096)
def choose(rows: int, cols: int, what: Form, gpu: Gpu, batch: int = 1, tallest: int = 256) -> Tile:
    """The tile for ``batch`` results of [rows, cols], of at most ``tallest`` rows."""

    def cost(candidate: tuple[Tile, float]) -> float:
        (m, n, *_), rate = candidate
        programs = batch * ceil_div(rows, m) * ceil_div(cols, n)
        return ceil_div(programs, gpu.processors) * m * n / rate

    return min((c for c in candidates(what, gpu) if c[0].m <= tallest), key=cost)[0]


def fixed(what: Form, gpu: Gpu, tallest: int = 256) -> Tile:
    """The one tile of a product whose rows must not depend on their number: good for 128 rows of a usual layer."""
    return choose(STEP, 32 * STEP, what, gpu, tallest=tallest)


def candidates(what: Form, gpu: Gpu) -> list[tuple[Tile, float]]:
    """The tiles of a form, each with its rate."""
    k = 32 if what.fine else STEP
    table = (_TWICE if what.twice else _WIDE)[family(gpu.sm)]
    found = [(Tile(m, n, k, warps, stages), rate) for m, n, warps, stages, rate in table]
    # Where 128 rows share a scale, a tile has one.
    return [(t, r) for t, r in found if (what.a.free != 128 or t.m <= 128) and (what.b.free != 128 or t.n <= 128)]


def decode(what: Form, gpu: Gpu) -> Tile:
    """The one tile of a product of few rows: the same for 1 as for :data:`FEW`."""
    n, warps, stages = _DECODE[family(gpu.sm)]
    if what.scaled and gpu.sm < 120:
        return Tile(128, n, STEP, warps, stages - 2)  # the least that tcgen05 multiplies by scales
    return Tile(FEW, n, 32 if what.fine else STEP, warps, stages)


def stretch(cols: int, contracted: int, tile: Tile, gpu: Gpu) -> int:
    """How much of the contraction one program takes, so that all multiprocessors read weights: a multiple of 128."""
    wanted = min(ceil_div(gpu.processors, ceil_div(cols, tile.n)), max(1, contracted // _LEAST))
    return ceil_div(contracted, wanted * STEP) * STEP


def options(what: Form, tile: Tile) -> dict[str, Any]:
    """The arguments of a launch that all GEMM kernels share."""
    return {"FORM": what, "TILE": tile, "GROUP_M": GROUP, "num_warps": tile.warps, "num_stages": tile.stages}


def source(codes: Tensor, rows: int, cols: int, block: tuple[int, int], tma: bool) -> Tensor | TensorDescriptor:
    """Codes [rows held, columns held] as a kernel takes them; ``rows`` and ``cols`` are the real ones, beyond which a
    descriptor reads zeros. The interpreter decodes them itself, from bytes."""
    if INTERPRETED:
        codes = codes.view(torch.uint8)
    return TensorDescriptor(codes, [rows, cols], [codes.stride(0), 1], list(block)) if tma else codes
