"""``linear``: one layer as in training, including quantization: forward, dgrad, wgrad, and their sum.

``fwd`` is a forward that saves tensors for the backward. ``fwd+dgrad`` has a frozen weight, ``fwd+wgrad`` an input that
needs no gradient, and ``sum`` has both gradients. The codes of the weight are cached between calls, as between the
micro-steps of an optimizer step; ``sum, new weight`` casts the weight in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from octavo import fp8
from octavo.bench import peers
from octavo.bench.bench import Bench, Call, Rotation, Work
from octavo.bench.suite_gemm import FEW, SHAPES, SMALL, TOKENS

PARTS = ("sum", "sum, new weight", "fwd", "fwd+dgrad", "fwd+wgrad")  # the most informative first
COMPILED = "qwen3-8b gate_up"
_GEMMS = {"fwd": 1, "fwd+dgrad": 2, "fwd+wgrad": 2, "sum": 3, "sum, new weight": 3}


def run(bench: Bench) -> None:
    """Measure every part of every layer of :mod:`octavo.bench.peers`, for all shapes."""
    m = bench.tokens or (FEW if bench.small else TOKENS)
    shapes = SMALL[:1] if bench.small else SHAPES
    for part in PARTS:
        for label, n, k in shapes:
            # Compiling takes longer than measuring: one shape is enough to show its effect.
            layers = peers.linear_builders(bench, n, k, compiling=part == "sum" and label == COMPILED)
            candidates = {name: partial(_make_call, bench, make, part, m, n, k) for name, make in layers.items()}
            work = Work(flops=2.0 * m * n * k * _GEMMS[part])
            bench.case("linear", f"{label} {part} M={m} N={n} K={k}", bench.high, candidates, work)


def _make_call(bench: Bench, make: Callable[[], nn.Module], part: str, m: int, n: int, k: int) -> Call:
    layer = make()
    needs_x, needs_w = part in ("fwd", "fwd+dgrad", "sum", "sum, new weight"), part != "fwd+dgrad"
    for parameter in layer.parameters():
        parameter.requires_grad_(needs_w)
    inputs = Rotation(lambda: bench.randn(m, k, grad=needs_x))
    dys = Rotation(lambda: bench.randn(m, n))

    def forward() -> torch.Tensor:
        return layer(inputs())

    def whole() -> None:
        if part == "sum, new weight":
            fp8.invalidate(layer)
        x = inputs()
        wanted = [*([x] if needs_x else []), *(layer.parameters() if needs_w else [])]
        torch.autograd.grad(layer(x), wanted, dys())

    return forward if part == "fwd" else whole
