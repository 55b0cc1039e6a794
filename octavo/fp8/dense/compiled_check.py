"""Compare an FP8 layer under ``torch.compile`` with the same layer of the reference backend on the CPU.

This is part of the self-check of untested versions (:mod:`octavo.fp8.self_check`). Dynamo and AOTAutograd trace
the forward and the backward of the layer into one graph, which runs without further compilation (``aot_eager``): these
parts of torch read this project's code and may behave differently in a newer torch. Inductor's code generation is not
checked, because it would use up the time limit of the self-check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.dense.delayed import convert
from octavo.fp8.dense.gemms import LayerGemms
from octavo.fp8.kernels.registry import Selection, get
from octavo.fp8.self_check.reference_checks import BOUND, find_largest_error, random_matrix, sizes
from octavo.fp8.self_check.untested import Mismatch


def check_compiled_layer(recipe: Recipe, selections: Mapping[str, Selection], device: torch.device) -> Mismatch | None:
    """Return the first of y, dx and dw of a compiled layer that differs by more than twice the rounding error of a
    product, or None."""
    tokens, outputs, inputs = sizes(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x, w, dy = (
        random_matrix(seed, *shape).to(dtype)
        for seed, shape in enumerate(((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    )
    reference = {gemm: Selection(get("reference"), "", ()) for gemm in selections}
    expected_results = _run_step(_make_layer(w, recipe, reference), x, dy)
    layer = _make_layer(w.to(device), recipe, selections)

    def forward(x: Tensor) -> Tensor:
        return layer(x)

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=False)
    results = _run_step(layer, x.to(device), dy.to(device), compiled)
    x, w, dy = (t.float().abs() for t in (x, w, dy))
    for name, actual, expected, magnitude in zip(
        ("y", "dx", "dw"), results, expected_results, (x @ w.t(), dy @ w, dy.t() @ x), strict=True
    ):  # fmt: skip
        if (mismatch := find_largest_error(name, actual, expected.float(), magnitude * 2 * BOUND)) is not None:
            return mismatch
    return None


def _make_layer(w: Tensor, recipe: Recipe, selections: Mapping[str, Selection]) -> nn.Linear:
    """Return an FP8 layer with weight w, created on meta so that the random state of the process does not change."""
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(w.clone())
    return convert(layer, LayerGemms("self-check", recipe, selections))


def _run_step(
    layer: nn.Linear, x: Tensor, dy: Tensor, forward: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one forward and backward, and return (y, dx, dw)."""
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        y = (forward or layer)(x)
        dx, dw = torch.autograd.grad(y, (x, layer.weight), dy)
    return y.detach(), dx, dw
