"""The forms of the grouped GEMMs: ``triton_kernels/grouped.py``, as the experts of Qwen3-30B-A3B launch them."""

from __future__ import annotations

import itertools

import torch

from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.kernels.groups import TILE, Groups
from octavo.fp8.kernels.layout import CONTRACTED
from octavo.fp8.kernels.triton_kernels import grouped
from tests.fp8.kernels import recorded
from tests.fp8.kernels.forms import Variant
from tests.fp8.kernels.forms.gemm import GPUS, RECIPES, distinct

EXPERTS, ROWS = 128, 8 * 8192 + 128 * TILE
SHAPES = ((768, 2048), (2048, 768))  # (N, K) of gate and up, of down


def variants() -> list[Variant]:
    """The forms of both kernels, of every recipe and architecture."""
    ints = [torch.empty(n, dtype=torch.int32, device="meta") for n in (EXPERTS, EXPERTS + 1, ROWS // TILE)]
    groups = Groups(*ints, ROWS)
    found: list[Variant] = []
    for gpu, title, op, (n, k) in itertools.product(GPUS, RECIPES, CONTRACTED, SHAPES):
        casts = recipe(*title.split()).gemm(op)
        assert casts is not None
        sides = {"fwd": ((ROWS, k), (EXPERTS, n, k)), "dgrad": ((ROWS, n), (EXPERTS, n, k))}
        shapes = sides.get(op, ((ROWS, n), (ROWS, k)))
        operands = [
            recorded.operand(s, d, *shape)
            for s, d, shape in zip((casts.a, casts.b), CONTRACTED[op], shapes, strict=True)
        ]
        with recorded.launches(grouped) as seen:
            getattr(grouped, op)(*operands, groups, torch.bfloat16, gpu=gpu)
        found += [recorded.variant(f"grouped {title} {op}", gpu.sm, *launch) for launch in seen]
    return distinct(found)
