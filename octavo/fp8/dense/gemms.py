"""Where the GEMMs of a layer run: recipe, backends and the weight's codes, in one object for each layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import GEMMS, Recipe
from octavo.fp8.dense import compiled
from octavo.fp8.dense.casts import Want
from octavo.fp8.kernels.registry import BackendError, Selection, select
from octavo.fp8.weights.cache import Part, WeightCodes
from octavo.fp8.weights.fp8_tensor import Fp8Weight


@dataclass(eq=False)
class Site:
    """Where GEMMs run: the name they are counted under, the recipe, the backend of each FP8 GEMM, the weight's codes.

    ``codes`` is None for :func:`linear`, which keeps nothing between calls.
    """

    name: str
    recipe: Recipe
    selections: Mapping[str, Selection]
    codes: WeightCodes | None = field(default_factory=WeightCodes)
    key: str = field(init=False)  # what of this a compiled graph knows, the same text for all layers of a recipe

    def __post_init__(self) -> None:
        self.key = compiled.describe(self.recipe, self.selections)

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        return Site(self.name, self.recipe, self.selections, copy.deepcopy(self.codes, memo))

    @property
    def backend(self) -> Selection:
        """The selection of the first GEMM that runs in FP8."""
        return next(iter(self.selections.values()))

    def want(self, gemm: str, spec: CastSpec) -> Want:
        """A cast for a GEMM, by the backend that runs it."""
        return Want(self.selections[gemm].backend, spec)

    def weight(self, gemm: str, owner: Tensor, part: Part, spec: CastSpec) -> Quantized:
        """The codes of a weight for fwd or dgrad: dgrad reads those of the forward where the cast is the same."""
        backend = self.selections[gemm].backend
        contract = 1 if gemm == "fwd" or self.shares_weight else 0
        cast = partial(backend.quantize, contract=contract)
        if self.codes is None:
            own = owner.codes(spec, part.slot) if isinstance(owner, Fp8Weight) else None
            return cast(part.of(owner), spec) if own is None else own
        return self.codes.get(owner, part, spec, backend, forward=gemm == "fwd", cast=cast)

    @property
    def shares_weight(self) -> bool:
        """Whether dgrad multiplies by the codes of the forward."""
        fwd, dgrad = self.recipe.fwd, self.recipe.dgrad
        return fwd is not None and dgrad is not None and fwd.b == dgrad.b


def select_backends(chosen: Recipe, device: torch.device, requested: str = "auto") -> dict[str, Selection]:
    """The backend of each GEMM that the recipe runs in FP8. Raises BackendError where one asked for cannot serve."""
    return {
        gemm: select(gemm, recipe_or_spec=chosen, device=device, requested=requested)
        for gemm in GEMMS
        if chosen.gemm(gemm) is not None
    }


def backends_for(
    chosen: Recipe,
    device: torch.device,
    shape: Sequence[int | None],
    requested: str = "auto",
    kind: str = "linear",
    gemms: Sequence[str] = GEMMS,
) -> dict[str, Selection]:
    """The backend of each GEMM that ``chosen`` runs in FP8, for a layer of ``kind`` and shape (M or None, N, K).

    Experts take the backends of grouped GEMMs where every GEMM has one, else those that run experts one by one.
    Raises BackendError where one asked for cannot serve, or none can.
    """

    def pick(prefix: str) -> dict[str, Selection]:
        return {
            gemm: select(prefix + gemm, recipe_or_spec=chosen, device=device, shape=shape, requested=requested)
            for gemm in gemms
            if chosen.gemm(gemm) is not None
        }

    if kind == "experts" and chosen.delayed is None:
        try:
            return pick("grouped_")
        except BackendError:
            return pick("")
    return pick("")
