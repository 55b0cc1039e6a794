"""Which backend would run the GEMMs of a recipe on a GPU that this machine does not have."""

from __future__ import annotations

from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.kernels.layout import CONTRACTED
from octavo.fp8.kernels.torch_backend import scaling_kind, why_not_on_gpu
from octavo.fp8.kernels.triton_backend import MIN_CAPABILITY, why_not_gemm


def backends_on(capability: tuple[int, int], recipe: Recipe, cuda: tuple[int, int]) -> tuple[str, ...]:
    """Return the backends that would run fwd, dgrad and wgrad of a recipe, each once, of those that come with a torch
    built for this CUDA version: its own GEMMs (cuBLAS), then Triton's. Empty without FP8 tensor cores."""
    if capability < MIN_CAPABILITY:
        return ()
    names = []
    for op in CONTRACTED:
        casts = recipe.gemm(op)
        kind = None if casts is None else scaling_kind(op, casts.a, casts.b)
        if kind is not None and why_not_on_gpu(kind, capability, cuda) is None:
            names.append("torch")
        elif why_not_gemm(op, recipe) is None:
            names.append("triton")
    return tuple(dict.fromkeys(names))
