"""Builds the linear layers to compare: high precision, Octavo by recipe and backend, and other libraries.

Other libraries are included if they are installed; nothing here is needed to use Octavo. Each function returns a module
with a weight [N, K] in the bench's precision on its device, or raises :class:`Unavailable`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import torch
import torch._dynamo.config
from torch import nn

from octavo import fp8
from octavo.base import accelerator
from octavo.base.recipe_specs import CANDIDATES, SPECS, names_in_library
from octavo.bench.bench import Bench, Unavailable
from octavo.fp8 import kernels

# Recipes that more GPUs multiply natively come first, because a time budget drops the last ones.
RECIPES = tuple(sorted(CANDIDATES, key=lambda name: SPECS[name].native))
VARIANTS = tuple(name for name, spec in SPECS.items() if spec.variant)
#: recipes with one layout of a weight, which a GPU may also keep transposed for dgrad; the compiled rows are limited to
#: these
SHARED = tuple(name for name in RECIPES if SPECS[name].layouts == 1)


def high_precision_linear(bench: Bench, n: int, k: int) -> nn.Module:
    """Return a plain ``nn.Linear``."""
    return nn.Linear(k, n, bias=False, device=bench.device, dtype=bench.dtype)


def octavo_linear(
    bench: Bench, n: int, k: int, recipe: str, backend: str = "auto", weight_codes: str = "keep"
) -> nn.Module:
    """Return a linear layer in FP8, converted by a plan as in a training run."""
    model = nn.Sequential(high_precision_linear(bench, n, k))
    try:
        return fp8.apply(model, fp8.plan(model, fp8.Policy(recipe=recipe, backend=backend, weight_codes=weight_codes)))
    except fp8.BackendError as error:
        raise Unavailable(str(error)) from error


def compile_module(make: Callable[[], nn.Module], whole: bool = True) -> nn.Module:
    """Return the module of ``make`` under torch.compile; ``whole`` makes graph breaks an error.

    Exceeding the recompilation limit is always an error, because dynamo would continue in eager mode and be timed as if
    it were compiled. If graph breaks are allowed, the code between graphs runs eagerly, as in a training run.
    """
    if importlib.util.find_spec("torch._inductor") is None:
        raise Unavailable("this build of torch has no inductor")
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.recompile_limit = 32  # candidates of a case share a block's code, and each is a graph of it
    return torch.compile(make(), fullgraph=whole)  # type: ignore[return-value]


def torchao_linear(bench: Bench, n: int, k: int, recipe: str) -> nn.Module:
    """Return torchao's float8 training layer, compiled as its documentation recommends."""
    if importlib.util.find_spec("torchao") is None:
        raise Unavailable("torchao is not installed")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = nn.Sequential(high_precision_linear(bench, n, k))
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    return compile_module(lambda: model)


class _Autocast(nn.Module):
    """Runs a TransformerEngine layer inside its autocast, which every forward needs."""

    def __init__(self, layer: nn.Module, enter: Callable[[], object]) -> None:
        super().__init__()
        self.layer, self.enter = layer, enter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.enter():  # type: ignore[attr-defined]
            return self.layer(x)


def transformer_engine_linear(bench: Bench, n: int, k: int, recipe: str) -> nn.Module:
    """Return TransformerEngine's Linear under one of its recipes: DelayedScaling, Float8CurrentScaling or
    Float8BlockScaling."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise Unavailable("transformer_engine is not installed")
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    layer = te.Linear(k, n, bias=False, params_dtype=bench.dtype, device=bench.device)
    return _Autocast(layer, partial(te.fp8_autocast, enabled=True, fp8_recipe=getattr(recipes, recipe)()))


def supported_backends(bench: Bench, recipe: str) -> list[str]:
    """Return the backends that can run all three GEMMs of a recipe on the device and that `auto` may choose; on a CPU
    only the reference. Recipes whose scales the tensor cores do not support (MXFP8 before Blackwell) have none: they
    are emulated, cannot win, and would take a fifth of the time of a suite."""
    native, capability = SPECS[recipe].native, accelerator.compute_capability(bench.device)
    if not SPECS[recipe].is_native_on_all and capability is not None and capability < native:
        return []
    built = fp8.recipe(recipe)
    backends: list[str] = []
    for name in kernels.names():
        backend = kernels.get(name)
        whys = [backend.supports(op, built, bench.device, None) for op in ("fwd", "dgrad", "wgrad")]
        if not any(whys) and backend.why_not_auto(bench.device) is None and not (name == "reference" and backends):
            backends.append(name)
    return backends


def linear_builders(bench: Bench, n: int, k: int, compiling: bool) -> dict[str, Callable[[], nn.Module]]:
    """Return the builders of all linear layers by row name; ``compiling`` adds layers under torch.compile."""
    builders: dict[str, Callable[[], nn.Module]] = {bench.high: partial(high_precision_linear, bench, n, k)}
    for recipe in RECIPES:
        for backend in supported_backends(bench, recipe):
            builders[f"{recipe} {backend}"] = partial(octavo_linear, bench, n, k, recipe, backend)
    if accelerator.is_gpu(bench.device):  # the reference reads codes in either layout
        for recipe in SHARED:
            for backend in supported_backends(bench, recipe)[:1]:
                layer = partial(octavo_linear, bench, n, k, recipe, backend, "both")
                builders[f"{recipe} {backend}, both layouts of w"] = layer
    for recipe in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"):
        builders[f"TransformerEngine {recipe}"] = partial(transformer_engine_linear, bench, n, k, recipe)
    if compiling:
        builders[f"{bench.high} compiled"] = partial(compile_module, partial(high_precision_linear, bench, n, k))
        for recipe in SHARED:
            builders[f"{recipe} compiled"] = partial(compile_module, partial(octavo_linear, bench, n, k, recipe))
        for recipe in names_in_library("torchao"):
            builders[f"torchao {recipe}"] = partial(torchao_linear, bench, n, k, recipe)
    return builders
