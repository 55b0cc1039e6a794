"""The forms of the GEMMs, ``triton_kernels/gemm.py``, as layers of Qwen3-8B and of Qwen3-VL's towers launch them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import torch

from octavo.fp8.arithmetic.cast import Quantized
from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.kernels.layout import CONTRACTED
from octavo.fp8.kernels.triton_kernels import gemm
from octavo.fp8.kernels.triton_kernels.tiles import Gpu, Tile, candidates, form, scale_block
from tests.fp8.kernels import recorded
from tests.fp8.kernels.forms import Variant

SHAPES = (  # (N, K) of q and o, k and v, gate and up, down; of a tower's qkv, proj, fc1, fc2 and its merger's two
    *((4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288)),
    *((3456, 1152), (1152, 1152), (4304, 1152), (1152, 4304), (4608, 4608), (4096, 4608)),
)
TOKENS = (2048, 16384)
RECIPES = ("tensorwise", "tensorwise e4m3", "rowwise", "blockwise", "blockwise hybrid", "blockwise_1d", "mxfp8")
GPUS = (Gpu(89, 142), Gpu(90, 132), Gpu(100, 148), Gpu(120, 170))
"""An L40S, an H200, a B200 and an RTX 5090."""


@cache
def variants() -> list[Variant]:
    """What those shapes run, each form once, its first shape in its name; all tiles of one blockwise product."""
    results = list(_served())
    for gpu, op in itertools.product(GPUS, CONTRACTED):
        casts = recipe("blockwise").gemm(op)
        assert casts is not None
        what = form(
            *(scale_block(s, d) for s, d in zip((casts.a, casts.b), CONTRACTED[op], strict=True)),
            fast=op == "fwd",
            gpu=gpu,
        )
        for tile, _ in candidates(what, gpu):
            with recorded.launches(gemm) as observed:
                _run("blockwise", op, 16384, 12288, 4096, False, gpu, tile)
            results += [recorded.variant(f"gemm blockwise {op}", gpu.sm, *launch) for launch in observed]
    return distinct(results)


def _served() -> Iterator[Variant]:
    shapes = [(*turn, False) for turn in itertools.product(TOKENS, SHAPES)]
    shapes += [(tokens, shape, True) for tokens in TOKENS for shape in SHAPES if shape[1] == 1152]  # have a bias
    for gpu, title, op, (m, (n, k), bias) in itertools.product(GPUS, RECIPES, CONTRACTED, shapes):
        if bias and op != "fwd":
            continue
        with recorded.launches(gemm) as observed:
            _run(title, op, m, n, k, bias, gpu)
        for launch in observed:
            yield recorded.variant(f"gemm{'+bias' * bias} {title} {op}", gpu.sm, *launch)


def operands(title: str, op: str, m: int, n: int, k: int) -> tuple[Quantized, Quantized]:
    """Both operands of a GEMM of M tokens, N outputs and K inputs, on the meta device."""
    casts = recipe(*title.split()).gemm(op)
    assert casts is not None
    a_dim, b_dim = CONTRACTED[op]
    a, b = {"fwd": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[op]
    return recorded.operand(casts.a, a_dim, *a), recorded.operand(casts.b, b_dim, *b)


def _run(title: str, op: str, m: int, n: int, k: int, bias: bool, gpu: Gpu, tile: Tile | None = None) -> None:
    a, b = operands(title, op, m, n, k)
    added = torch.empty(n, dtype=torch.bfloat16, device="meta") if bias else None
    gemm.gemm(a, CONTRACTED[op][0], b, CONTRACTED[op][1], torch.bfloat16, added, gpu, tile)


def distinct(found: list[Variant]) -> list[Variant]:
    """The same form once, under the name of the first and its tile; with a number where only strides differ."""
    forms: dict[str, Variant] = {}
    names: set[tuple[str, tuple[int, ...]]] = set()
    for v in found:
        key = repr(
            (v.architectures, v.kernel.__name__, sorted(v.signature.items()), sorted(v.constants.items(), key=str))
        )
        if key in forms:
            continue
        m, n, k, *_ = v.constants.get("TILE") or (128, v.constants["BN"], 128)
        plain = f"{v.name} {m}x{n}x{k}"
        numbered = (plain if turn == 1 else f"{plain} ({turn})" for turn in itertools.count(1))
        name = next(name for name in numbered if (name, v.architectures) not in names)
        names.add((name, v.architectures))
        forms[key] = v._replace(name=name)
    return list(forms.values())
