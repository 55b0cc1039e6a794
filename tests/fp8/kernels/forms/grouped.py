"""The forms of the grouped GEMMs: ``triton_kernels/grouped.py``, as the experts of Qwen3-30B-A3B launch them."""

from __future__ import annotations

import itertools

import torch

from octavo.fp8.arithmetic.cast import Quantized
from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.kernels.groups import TILE, Groups
from octavo.fp8.kernels.layout import CONTRACTED
from octavo.fp8.kernels.triton_kernels import grouped
from tests.fp8.kernels import recorded
from tests.fp8.kernels.forms import Variant
from tests.fp8.kernels.forms.gemm import GPUS, RECIPES, distinct

EXPERTS, ROWS = 128, 8 * 8192 + 128 * TILE
SHAPES = ((768, 2048), (2048, 768))  # (N, K) of gate and up, of down


GROUPS = Groups(
    torch.empty(EXPERTS, dtype=torch.int32, device="meta"),
    torch.empty(EXPERTS + 1, dtype=torch.int32, device="meta"),
    torch.empty(ROWS // TILE, dtype=torch.int32, device="meta"),
    ROWS,
)


def variants() -> list[Variant]:
    """The forms of both kernels, of every recipe and architecture."""
    results: list[Variant] = []
    for gpu, title, op, shape in itertools.product(GPUS, RECIPES, CONTRACTED, SHAPES):
        with recorded.launches(grouped) as observed:
            getattr(grouped, op)(*grouped_operands(title, op, *shape), GROUPS, torch.bfloat16, gpu=gpu)
        results += [recorded.variant(f"grouped {title} {op}", gpu.sm, *launch) for launch in observed]
    return distinct(results)


def grouped_operands(title: str, op: str, n: int, k: int) -> tuple[Quantized, Quantized]:
    """Both operands of a grouped GEMM of experts with N outputs and K inputs, on the meta device."""
    casts = recipe(*title.split()).gemm(op)
    assert casts is not None
    sides = {"fwd": ((ROWS, k), (EXPERTS, n, k)), "dgrad": ((ROWS, n), (EXPERTS, n, k))}
    a, b = sides.get(op, ((ROWS, n), (ROWS, k)))
    a_dim, b_dim = CONTRACTED[op]
    return recorded.operand(casts.a, a_dim, *a), recorded.operand(casts.b, b_dim, *b)
