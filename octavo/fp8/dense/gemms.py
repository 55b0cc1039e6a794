"""The three GEMMs of a layer: their backends (:class:`Site`), and one implementation for all layers that run them.

With x [M, K], w [N, K], dy [M, N]::

    fwd    y  = x @ w.T (+ bias)     dgrad  dx = dy @ w     wgrad  dw = dy.T @ x,  accumulated in fp32

A linear layer, a gated MLP and the experts of a layer run the same three, in FP8 or in high precision, with the same
reports to the recorder; only the casts and products of matrices differ (:class:`DenseOps`, and the grouped version in
:mod:`octavo.fp8.moe.grouped`, which has the same methods). :mod:`octavo.fp8.arithmetic.cast` defines the casts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import GEMMS, Recipe
from octavo.fp8.dense import compiled
from octavo.fp8.dense.inputs import CastRequest, Input, QuantizedPair, cast_matrix
from octavo.fp8.invariance import is_active, row_linear
from octavo.fp8.kernels.registry import Backend, BackendError, Selection, select
from octavo.fp8.kernels.self_check import kernel_checks, run_checks
from octavo.fp8.observe.recorder import HIGH, LayerRecord, Result
from octavo.fp8.weights.cache import WeightCache, WeightSlice, has_values


class Requests(NamedTuple):
    """The casts of one operand that two GEMMs read: along its rows, and along its columns; None in high precision."""

    row: CastRequest | None
    col: CastRequest | None


class ScaledCasts(Protocol):
    """The casts of one forward and its backward with scales that are not from the current amax."""

    def cast_x(self, x: Input, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair: ...

    def cast_dy(self, dy: Tensor, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair: ...


class Scaling(Protocol):
    """Where the scales of x and dy come from, if not from the current amax."""

    def begin(self, x: Tensor, slot: int | None, training: bool, seen: LayerRecord) -> ScaledCasts: ...

    def move_to(self, device: torch.device) -> None: ...


@dataclass(eq=False)
class Site:
    """The GEMMs of one layer: the name that they are counted under, the recipe, the backend of each FP8 GEMM, the
    weight's codes.

    ``x``: the casts of the input for fwd and wgrad; ``dy``: the casts of the output's gradient for dgrad and wgrad.
    ``scaling``: None for casts by the current amax; :mod:`octavo.fp8.dense.delayed` sets it.
    """

    name: str
    recipe: Recipe
    selections: Mapping[str, Selection]
    codes: WeightCache = field(default_factory=WeightCache)
    scaling: Scaling | None = None
    key: str = field(init=False)  # for compiled graphs: the same text for all layers of a recipe
    x: Requests = field(init=False)
    dy: Requests = field(init=False)
    shares_weight: bool = field(init=False)  # whether dgrad multiplies by the codes of the forward

    def __post_init__(self) -> None:
        fwd, dgrad = self.recipe.fwd, self.recipe.dgrad
        self.shares_weight = fwd is not None and dgrad is not None and fwd.b == dgrad.b
        self.key = compiled.describe(self.recipe, self.selections)
        self.x = Requests(self._request("fwd", "a"), self._request("wgrad", "b"))
        self.dy = Requests(self._request("dgrad", "a"), self._request("wgrad", "a"))

    def set_recipe(self, recipe: Recipe, selections: Mapping[str, Selection]) -> None:
        """Use another recipe from the next forward on; drops the weight's codes."""
        self.recipe, self.selections = recipe, selections
        self.codes.drop()
        self.__post_init__()

    def _request(self, name: str, operand: str) -> CastRequest | None:
        gemm = self.recipe.gemm(name)
        return None if gemm is None else CastRequest(self.selections[name].backend, getattr(gemm, operand))

    def __deepcopy__(self, memo: dict[int, object]) -> Site:
        codes, scaling = copy.deepcopy(self.codes, memo), copy.deepcopy(self.scaling, memo)
        return Site(self.name, self.recipe, self.selections, codes, scaling)

    @property
    def backend(self) -> Selection:
        """The selection of the first GEMM that runs in FP8."""
        return next(iter(self.selections.values()))


class DenseOps:
    """Casts and products of a linear layer, whose operands are single matrices."""

    tensors: tuple[Tensor, ...] = ()  # saved for the backward
    sizes: Tensor | None = None  # rows of each expert, on their device
    cast: Callable[[Tensor, CastRequest | None, CastRequest | None], QuantizedPair] = staticmethod(cast_matrix)

    def restore(self, tensors: Sequence[Tensor]) -> tuple[DenseOps, list[Tensor]]:
        """(this object for a backward, the remaining saved tensors), from the tensors that a forward saved."""
        return self, list(tensors)

    def cast_weight(self, backend: Backend, w: Tensor, spec: CastSpec, contract: int) -> Quantized:
        return backend.quantize(w, spec, contract)

    def flops(self, rows: int, outputs: int, inputs: int) -> int:
        """The operations of one GEMM; of one row if ``sizes`` has the number of rows."""
        return 2 * rows * outputs * inputs

    def fwd(self, backend: Backend, x: Quantized, w: Quantized, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        return backend.gemm_fwd(x, w, dtype, bias)

    def dgrad(self, backend: Backend, dy: Quantized, w: Quantized, dtype: torch.dtype) -> Tensor:
        return backend.gemm_dgrad(dy, w, dtype)

    def wgrad(self, backend: Backend, dy: Quantized, x: Quantized, dtype: torch.dtype) -> Tensor:
        return backend.gemm_wgrad(dy, x, dtype)

    def high_fwd(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        product = row_linear if torch._C._len_torch_function_stack() and is_active() else F.linear
        return product(x, w.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def high_dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        return dy @ w.to(dy.dtype)

    def high_wgrad(self, dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        return (dy.t() @ x).to(dtype)

    def bias_grad(self, dy: Tensor) -> Tensor:
        return dy.sum(0, dtype=torch.float32)

    def operand(self, seen: LayerRecord, role: str, x: Tensor, q: Quantized) -> None:
        seen.operand(role, x, q)

    def weight(self, seen: LayerRecord, w: Tensor, q: Quantized) -> None:
        seen.operand("w", w, q)

    def gradient(self, seen: LayerRecord, dw: Tensor, dy: Tensor, x: Tensor) -> None:
        seen.gradient(dw, dy, x)

    def product(self, seen: LayerRecord, gemm: str, a: Tensor, b: Tensor) -> None:
        seen.product(gemm, a, b)

    def result(self, seen: LayerRecord, result: Result) -> None:
        seen.result(result)


class InferenceOps(DenseOps):
    """:class:`DenseOps` without a backward, as in generation: a backend may have a kernel for few rows."""

    def fwd(self, backend: Backend, x: Quantized, w: Quantized, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        return backend.gemm_decode(x, w, dtype, bias)


DENSE_OPS, INFERENCE_OPS = DenseOps(), InferenceOps()


def get_weight_codes(
    site: Site, way: DenseOps, gemm: str, weight: Tensor, part: WeightSlice, spec: CastSpec
) -> Quantized:
    """The codes of a weight for fwd or dgrad; dgrad reads the forward's codes if both have the same cast."""
    backend = site.selections[gemm].backend
    forward, shared = gemm == "fwd", site.shares_weight
    cast = partial(way.cast_weight, backend, contract=1 if forward or shared else 0)
    return site.codes.get(weight, part, spec, backend, forward, cast, shared)


def fwd(
    site: Site, way: DenseOps, x: Input | None, x_q: Quantized | None, weight: Tensor, part: WeightSlice,
    bias: Tensor | None, dtype: torch.dtype, seen: LayerRecord,
) -> tuple[Tensor, Quantized | None]:  # fmt: skip
    """(y [M, N] in ``dtype``, the codes of w if the backward must save them).

    y comes from the codes ``x_q``, or from ``x`` if fwd stays in high precision. Codes of w are returned if they were
    cast during a graph capture, where no cache keeps them, and dgrad uses the same codes.
    """
    gemm = site.recipe.fwd
    if seen.is_observed and not seen.recompute and x is not None and has_values(weight):
        way.product(seen, "fwd", x.matrix(), part.of(weight))
    if gemm is None or x_q is None:
        assert x is not None
        if seen.has_counters:
            seen.gemm("fwd", HIGH, way.flops(x.rows, *part.shape(weight)))
        return way.high_fwd(x.high(), part.of(weight), bias), None
    backend = site.selections["fwd"].backend
    w_q = get_weight_codes(site, way, "fwd", weight, part, gemm.b)
    if seen.keeps_x and not seen.recompute and x is not None:
        way.operand(seen, "x", x.matrix(), x_q)
        if has_values(weight):
            way.weight(seen, part.of(weight), w_q)
    if seen.has_counters:
        seen.gemm("fwd", backend.name, way.flops(x_q.data.shape[0], *part.shape(weight)))
    y = way.fwd(backend, x_q, w_q, dtype, bias)
    if "fwd" in seen.checked_gemms:
        # Observers may run the GEMM again, or compare it with the operands in high precision.
        exact, w = None if x is None else x.matrix(), part.of(weight) if has_values(weight) else None
        again, noted = partial(way.fwd, backend, x_q, w_q, dtype, bias), site.scaling is not None
        way.result(seen, Result("fwd", backend.name, exact, x_q, w, w_q, noted, bias, y, again))
    return y, w_q if site.codes.captured and site.shares_weight else None


def dgrad(
    site: Site,
    way: DenseOps,
    dy: Tensor,
    dy_q: Quantized | None,
    weight: Tensor,
    part: WeightSlice,
    w_q: Quantized | None,
    dtype: torch.dtype,
    seen: LayerRecord,
) -> Tensor:
    """dx [M, K] in ``dtype``. ``w_q``: the codes of w if the forward saved them."""
    gemm = site.recipe.dgrad
    if seen.is_observed and has_values(weight):
        way.product(seen, "dgrad", dy, part.of(weight))
    if gemm is None or dy_q is None:
        if seen.counters:
            seen.gemm("dgrad", HIGH, way.flops(dy.shape[0], *part.shape(weight)))
        return way.high_dgrad(dy, part.of(weight))
    if w_q is None:
        # Cached codes if the weight has not changed; otherwise, after resharding, a new cast of the gathered weight.
        w_q = get_weight_codes(site, way, "dgrad", weight, part, gemm.b)
    backend = site.selections["dgrad"].backend
    if seen.keeps_x:
        way.operand(seen, "dy", dy, dy_q)
    if seen.counters:
        seen.gemm("dgrad", backend.name, way.flops(dy.shape[0], *part.shape(weight)))
    dx = way.dgrad(backend, dy_q, w_q, dtype)
    if "dgrad" in seen.checked_gemms:
        shown, w = dy if seen.shows_operands else None, part.of(weight) if has_values(weight) else None
        again, noted = partial(way.dgrad, backend, dy_q, w_q, dtype), site.scaling is not None
        way.result(seen, Result("dgrad", backend.name, shown, dy_q, w, w_q, noted, None, dx, again))
    return dx


def wgrad(
    site: Site,
    way: DenseOps,
    dy: Tensor,
    dy_q: Quantized | None,
    x: Quantized | Tensor,
    exact: Tensor | None,
    dtype: torch.dtype,
    seen: LayerRecord,
) -> Tensor:
    """dw [N, K] in ``dtype``. ``x``: saved by the forward; ``exact``: x in high precision, for observers."""
    if dy_q is None or not isinstance(x, Quantized):
        assert isinstance(x, Tensor)
        if seen.is_observed:
            way.product(seen, "wgrad", dy, x)
        if seen.counters:
            seen.gemm("wgrad", HIGH, way.flops(dy.shape[0], dy.shape[1], x.shape[1]))
        return way.high_wgrad(dy, x, dtype)
    backend = site.selections["wgrad"].backend
    if seen.counters:
        seen.gemm("wgrad", backend.name, way.flops(dy.shape[0], dy.shape[1], x.data.shape[1]))
    dw = way.wgrad(backend, dy_q, x, dtype)
    if "wgrad" in seen.checked_gemms:
        shown, noted = dy if seen.shows_operands else None, site.scaling is not None
        again = partial(way.wgrad, backend, dy_q, x, dtype)
        way.result(seen, Result("wgrad", backend.name, shown, dy_q, exact, x, noted, None, dw, again))
    if seen.is_observed and exact is not None:
        way.product(seen, "wgrad", dy, exact)
    # wgrad has casts of its own, along the rows of x and dy, so observers see both operands again.
    if seen.keeps_x and exact is not None:
        way.operand(seen, "x_wgrad", exact, x)
        way.operand(seen, "dy_wgrad", dy, dy_q)
        way.gradient(seen, dw, dy, exact)
    return dw


def select_backends(chosen: Recipe, device: torch.device, requested: str = "auto") -> dict[str, Selection]:
    """The backend of each GEMM that the recipe runs in FP8. Raises BackendError if the requested one does not support a
    GEMM, and if a kernel of an untested version differs from the reference."""
    selections = {
        gemm: select(gemm, recipe_or_spec=chosen, device=device, requested=requested)
        for gemm in GEMMS
        if chosen.gemm(gemm) is not None
    }
    for gemm, selection in selections.items():
        run_checks(kernel_checks(chosen, gemm, selection.backend.name, device), device)
    return selections


def select_layer_backends(
    chosen: Recipe,
    device: torch.device,
    shape: Sequence[int | None],
    requested: str = "auto",
    kind: str = "linear",
    gemms: Sequence[str] = GEMMS,
) -> dict[str, Selection]:
    """The backend of each GEMM that ``chosen`` runs in FP8, for a layer of ``kind`` and shape (M or None, N, K).

    Experts use grouped GEMMs if every GEMM has a backend for them, else backends that run experts one by one. Raises
    BackendError if the requested backend does not support a GEMM, or none does.
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
