"""The linear layer as ``torch.compile`` traces it: the same three GEMMs, as operators of one graph.

:class:`octavo.fp8.Linear` and :func:`octavo.fp8.linear` come here while a compiler is tracing; the operators and the
gradient are in :mod:`octavo.fp8.kernels.ops`. Values and gradients are those of the eager path, bit for bit as far as
the GEMMs go. What a compiled layer does not do is report: ``fp8.count_gemms`` and ``fp8.health`` see eager steps alone,
since a graph that all blocks share knows no layer's name. Take proofs and health figures in steps under
``torch.compiler.set_stance("force_eager")``, as octavo's own training does.

Delayed scaling stays outside: its histories are written in every forward, which must not happen twice when a compiler
reorders or recomputes. Such a layer breaks the graph, and ``fullgraph=True`` refuses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.fp8.kernels import ops
from octavo.fp8.kernels.registry import select
from octavo.fp8.recipe import GEMMS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, key: str) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N]; ``key`` as ``ops.describe`` gives it.

    In x's dtype (autocast's under autocast), rounded once. Raises RuntimeError for shapes that do not fit.
    """
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"An FP8 linear layer multiplies inputs of {weight.shape[1]} features, its weight being "
            f"{list(weight.shape)}; found an input of shape {list(x.shape)}."
        )
    device = x.device.type
    # Dynamo of torch 2.11 cannot ask is_autocast_available; meta is the device without.
    if x.dtype != torch.float64 and device != "meta" and torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    x_MK = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
    parts = ops.gemms(key)
    # Only a weight that is trained needs x again; the codes in wgrad layout are all that is kept of it.
    keeps = weight.requires_grad and torch.is_grad_enabled()
    codes = torch.ops.octavo.cast(x_MK.detach(), parts.operand("fwd", 0), parts.operand("wgrad", 1) if keeps else "")
    y_MN = torch.ops.octavo.linear(x_MK, weight, bias, *codes, key)
    return y_MN.view(*x.shape[:-1], weight.shape[0])


def key(casts: str, device: str, backend: str) -> str:
    """``ops.describe`` of a recipe's casts (``ops.casts_of``) on the backends chosen for them.

    Raises BackendError where one asked for cannot serve.
    """
    recipe = ops.recipe_of(casts)
    selections = {
        gemm: select(gemm, recipe_or_spec=recipe, device=device, requested=backend)
        for gemm in GEMMS
        if recipe.gemm(gemm) is not None
    }
    return ops.describe(recipe, selections)


# What torch.compiler.assume_constant_result does, without importing torch._dynamo before the first call: choosing a
# backend asks the machine, which a compiler cannot trace and need not.
key._dynamo_marked_constant = True  # type: ignore[attr-defined]


def leave() -> None:
    """End the graph before a layer with delayed scaling; under ``fullgraph=True`` an error with this reason."""
    torch._dynamo.graph_break(
        "delayed scaling writes amax histories in every forward and runs outside the compiled graph. Use another "
        "recipe (tensorwise scales by the current amax), or torch.compile without fullgraph=True."
    )


def leave_weight() -> None:
    """End the graph before a layer whose weight is FP8 between steps; an error under ``fullgraph=True``."""
    torch._dynamo.graph_break(
        "an FP8 weight (param: true, or frozen) finds its codes outside the compiled graph. Use torch.compile without "
        "fullgraph=True, or param=False."
    )
