"""One FP8 layer under ``torch.compile``, held against the same layer of the reference backend on the CPU: part of the
self-check of versions that were not tested (:mod:`octavo.fp8.kernels.self_check`).

The layer is traced by Dynamo and AOTAutograd into one graph, forward and backward, and the graph is run as it is
(``aot_eager``): that is what reads this project's code and may read it otherwise in a newer torch. Inductor's own code
generation is left out; it would take the seconds that the whole check has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.dense.delayed import convert
from octavo.fp8.dense.gemms import Site
from octavo.fp8.kernels.registry import Selection, get
from octavo.fp8.kernels.self_check import BOUND, Fault, farthest, sizes, spread


def compiled_layer(recipe: Recipe, selections: Mapping[str, Selection], device: torch.device) -> Fault | None:
    """Where y, dx or dw of a compiled layer [24 or 320 outputs] is beyond twice what a product may lose to rounding."""
    tokens, outputs, inputs = sizes(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x, w, dy = (
        spread(seed, *shape).to(dtype)
        for seed, shape in enumerate(((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    )
    reference = {gemm: Selection(get("reference"), "", ()) for gemm in selections}
    want = _step(_layer(w, recipe, reference), x, dy)
    layer = _layer(w.to(device), recipe, selections)

    def forward(x: Tensor) -> Tensor:
        return layer(x)

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=False)
    got = _step(layer, x.to(device), dy.to(device), compiled)
    x, w, dy = (t.float().abs() for t in (x, w, dy))
    for name, mine, exact, most in zip(
        ("y", "dx", "dw"), got, want, (x @ w.t(), dy @ w, dy.t() @ x), strict=True
    ):  # fmt: skip
        if (fault := farthest(name, mine, exact.float(), most * 2 * BOUND)) is not None:
            return fault
    return None


def _layer(w: Tensor, recipe: Recipe, selections: Mapping[str, Selection]) -> nn.Linear:
    """Made without a random number: those of the process stay where they are."""
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(w.clone())
    return convert(layer, Site("self-check", recipe, selections))


def _step(
    layer: nn.Linear, x: Tensor, dy: Tensor, forward: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, dx, dw)"""
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        y = (forward or layer)(x)
        dx, dw = torch.autograd.grad(y, (x, layer.weight), dy)
    return y.detach(), dx, dw
