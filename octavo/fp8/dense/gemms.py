"""The three GEMMs of a layer: their backends (:class:`LayerGemms`), and one implementation for all such layers.

With x [M, K], w [N, K], dy [M, N]::

    fwd    y  = x @ w.T (+ bias)     dgrad  dx = dy @ w     wgrad  dw = dy.T @ x,  accumulated in fp32

Linear layers, gated MLPs and experts run the same three GEMMs, in FP8 or in high precision, and report them to the
recorder the same way. Only the casts and products of matrices differ (:class:`DenseOps`, and the grouped version in
:mod:`octavo.fp8.moe.grouped`, which has the same methods). :mod:`octavo.fp8.arithmetic.cast` defines the casts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.base import accelerator
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import GEMMS, Recipe
from octavo.fp8.dense.graph_arguments import describe
from octavo.fp8.dense.inputs import (
    CastRequest,
    Input,
    QuantizedPair,
    cast_matrix,
    compute_dtype,
    is_autocast_enabled,
    is_functorch_active,
    without_autocast,
)
from octavo.fp8.invariance import is_active, row_linear
from octavo.fp8.kernels.registry import Backend, BackendError, Selection, select
from octavo.fp8.observe.recorder import HIGH, LayerRecord, Result
from octavo.fp8.self_check.reference_checks import kernel_checks
from octavo.fp8.self_check.untested import run_checks
from octavo.fp8.weights.cache import WeightCache, WeightSlice, has_values
from octavo.fp8.weights.shards import is_plain_tensor


class Requests(NamedTuple):
    """The casts of an operand of two GEMMs, along its rows and along its columns; None if that GEMM runs in high
    precision."""

    row: CastRequest | None
    col: CastRequest | None


class ScaledCasts(Protocol):
    """Casts of one forward and its backward whose scales do not come from the current amax."""

    def cast_x(self, x: Input, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair: ...

    def cast_dy(self, dy: Tensor, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair: ...


class Scaling(Protocol):
    """A source of scales for x and dy that replaces the current amax."""

    def begin(self, x: Tensor, slot: int | None, training: bool, record: LayerRecord) -> ScaledCasts: ...

    def move_to(self, device: torch.device) -> None: ...


@dataclass(eq=False)
class LayerGemms:
    """The GEMMs of one layer.

    Args:
        name: under which its GEMMs are counted.
        recipe: its casts.
        selections: the backend of each FP8 GEMM.
        codes: the cache of its weight's codes.
        scaling: None to cast by the current amax; :mod:`octavo.fp8.dense.delayed` sets it.

    ``x`` holds the casts of the input for fwd and wgrad, ``dy`` the casts of the output's gradient for dgrad and wgrad.
    """

    name: str
    recipe: Recipe
    selections: Mapping[str, Selection]
    codes: WeightCache = field(default_factory=WeightCache)
    scaling: Scaling | None = None
    key: str = field(init=False)  # for compiled graphs, equal for all layers with this recipe and backends
    x: Requests = field(init=False)
    dy: Requests = field(init=False)
    shares_weight: bool = field(init=False)  # dgrad multiplies by the codes of the forward

    def __post_init__(self) -> None:
        fwd, dgrad = self.recipe.fwd, self.recipe.dgrad
        self.shares_weight = fwd is not None and dgrad is not None and fwd.b == dgrad.b
        self.codes.layer = self.name
        self.key = describe(self.recipe, self.selections)
        self.x = Requests(self._request("fwd", "a"), self._request("wgrad", "b"))
        self.dy = Requests(self._request("dgrad", "a"), self._request("wgrad", "a"))

    def set_recipe(self, recipe: Recipe, selections: Mapping[str, Selection]) -> None:
        """Use this recipe from the next forward on, and drop the weight's codes."""
        self.recipe, self.selections = recipe, selections
        self.codes.drop()
        self.__post_init__()

    def _request(self, name: str, operand: str) -> CastRequest | None:
        gemm = self.recipe.gemm(name)
        return None if gemm is None else CastRequest(self.selections[name].backend, getattr(gemm, operand))

    def __deepcopy__(self, memo: dict[int, object]) -> LayerGemms:
        codes, scaling = copy.deepcopy(self.codes, memo), copy.deepcopy(self.scaling, memo)
        return LayerGemms(self.name, self.recipe, self.selections, codes, scaling)

    @property
    def backend(self) -> Selection:
        """The selection of the first GEMM that runs in FP8."""
        return next(iter(self.selections.values()))


class DenseOps:
    """The casts and products of a linear layer, whose operands are single matrices."""

    tensors: tuple[Tensor, ...] = ()  # saved for the backward
    sizes: Tensor | None = None  # rows of each expert, on their device
    cast: Callable[[Tensor, CastRequest | None, CastRequest | None], QuantizedPair] = staticmethod(cast_matrix)

    def restore(self, tensors: Sequence[Tensor]) -> tuple[DenseOps, list[Tensor]]:
        """Split the tensors that a forward saved into (the ops for its backward, the remaining tensors)."""
        return self, list(tensors)

    def cast_weight(self, backend: Backend, w: Tensor, spec: CastSpec, contract: int) -> Quantized:
        return backend.quantize(w, spec, contract)

    def flops(self, rows: int, outputs: int, inputs: int) -> int:
        """Return the FLOPs of one GEMM, or of one row of it if ``sizes`` holds the numbers of rows."""
        return 2 * rows * outputs * inputs

    def fwd(self, backend: Backend, x: Quantized, w: Quantized, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        return backend.gemm_fwd(x, w, dtype, bias)

    def dgrad(self, backend: Backend, dy: Quantized, w: Quantized, dtype: torch.dtype) -> Tensor:
        return backend.gemm_dgrad(dy, w, dtype)

    def wgrad(self, backend: Backend, dy: Quantized, x: Quantized, dtype: torch.dtype) -> Tensor:
        return backend.gemm_wgrad(dy, x, dtype)

    def high_fwd(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        product = row_linear if torch._C._len_torch_function_stack() and is_active() else high_linear
        return product(x, w.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def high_dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        return high_mm(dy, w.to(dy.dtype))

    def high_wgrad(self, dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        return high_mm(dy.t(), x).to(dtype)

    def bias_grad(self, dy: Tensor) -> Tensor:
        return dy.sum(0, dtype=torch.float32)

    def operand(self, record: LayerRecord, role: str, x: Tensor, q: Quantized) -> None:
        record.operand(role, x, q)

    def weight(self, record: LayerRecord, w: Tensor, q: Quantized) -> None:
        record.operand("w", w, q)

    def gradient(self, record: LayerRecord, dw: Tensor, dy: Tensor, x: Tensor) -> None:
        record.gradient(dw, dy, x)

    def product(self, record: LayerRecord, gemm: str, a: Tensor, b: Tensor) -> None:
        record.product(gemm, a, b)

    def result(self, record: LayerRecord, result: Result) -> None:
        record.result(result)


class InferenceOps(DenseOps):
    """:class:`DenseOps` without a backward, as in generation, where a backend may have a kernel for few rows."""

    def fwd(self, backend: Backend, x: Quantized, w: Quantized, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        return backend.gemm_decode(x, w, dtype, bias)


DENSE_OPS, INFERENCE_OPS = DenseOps(), InferenceOps()


def get_weight_codes(
    site: LayerGemms, ops: DenseOps, gemm: str, weight: Tensor, part: WeightSlice, spec: CastSpec
) -> Quantized:
    """Return the codes of a weight for fwd or dgrad; dgrad reads the forward's codes if both have the same cast."""
    backend = site.selections[gemm].backend
    forward, shared = gemm == "fwd", site.shares_weight
    cast = partial(ops.cast_weight, backend, contract=1 if forward or shared else 0)
    return site.codes.get(weight, part, spec, backend, forward, cast, shared)


def fwd(
    site: LayerGemms, ops: DenseOps, x: Input | None, x_q: Quantized | None, weight: Tensor, part: WeightSlice,
    bias: Tensor | None, dtype: torch.dtype, record: LayerRecord,
) -> tuple[Tensor, Quantized | None]:  # fmt: skip
    """Return (y [M, N] in ``dtype``, the codes of w or None if the backward need not save them).

    y is computed from the codes ``x_q``, or from ``x`` if fwd stays in high precision. The backward must save the codes
    of w if dgrad uses them too and they were cast during a graph capture, when no cache holds codes.
    """
    gemm = site.recipe.fwd
    if record.is_observed and not record.recompute and x is not None and has_values(weight):
        ops.product(record, "fwd", x.matrix(), part.of(weight))
    if gemm is None or x_q is None:
        assert x is not None
        if record.has_counters:
            record.gemm("fwd", HIGH, ops.flops(x.rows, *part.shape(weight)))
        return ops.high_fwd(x.high_precision(), part.of(weight), bias), None
    backend = site.selections["fwd"].backend
    w_q = get_weight_codes(site, ops, "fwd", weight, part, gemm.b)
    if record.keeps_x and not record.recompute and x is not None:
        ops.operand(record, "x", x.matrix(), x_q)
        if has_values(weight):
            ops.weight(record, part.of(weight), w_q)
    if record.has_counters:
        record.gemm("fwd", backend.name, ops.flops(x_q.data.shape[0], *part.shape(weight)))
    y = ops.fwd(backend, x_q, w_q, dtype, bias)
    if "fwd" in record.checked_gemms:
        # Observers may rerun the GEMM, or compare it with its operands in high precision.
        exact, w = None if x is None else x.matrix(), part.of(weight) if has_values(weight) else None
        rerun, uses_history = partial(ops.fwd, backend, x_q, w_q, dtype, bias), site.scaling is not None
        ops.result(record, Result("fwd", backend.name, exact, x_q, w, w_q, uses_history, bias, y, rerun))
    return y, w_q if site.codes.captured and site.shares_weight else None


def dgrad(
    site: LayerGemms,
    ops: DenseOps,
    dy: Tensor,
    dy_q: Quantized | None,
    weight: Tensor,
    part: WeightSlice,
    w_q: Quantized | None,
    dtype: torch.dtype,
    record: LayerRecord,
) -> Tensor:
    """Return dx [M, K] in ``dtype``. ``w_q`` holds the codes of w if the forward saved them."""
    gemm = site.recipe.dgrad
    if record.is_observed and has_values(weight):
        ops.product(record, "dgrad", dy, part.of(weight))
    if gemm is None or dy_q is None:
        if record.counters:
            record.gemm("dgrad", HIGH, ops.flops(dy.shape[0], *part.shape(weight)))
        return ops.high_dgrad(dy, part.of(weight))
    if w_q is None:
        # From the cache if the weight has not changed; after resharding, a new cast of the gathered weight.
        w_q = get_weight_codes(site, ops, "dgrad", weight, part, gemm.b)
    backend = site.selections["dgrad"].backend
    if record.keeps_x:
        ops.operand(record, "dy", dy, dy_q)
    if record.counters:
        record.gemm("dgrad", backend.name, ops.flops(dy.shape[0], *part.shape(weight)))
    dx = ops.dgrad(backend, dy_q, w_q, dtype)
    if "dgrad" in record.checked_gemms:
        shown, w = dy if record.shows_operands else None, part.of(weight) if has_values(weight) else None
        rerun, uses_history = partial(ops.dgrad, backend, dy_q, w_q, dtype), site.scaling is not None
        ops.result(record, Result("dgrad", backend.name, shown, dy_q, w, w_q, uses_history, None, dx, rerun))
    return dx


def wgrad(
    site: LayerGemms,
    ops: DenseOps,
    dy: Tensor,
    dy_q: Quantized | None,
    x: Quantized | Tensor,
    exact: Tensor | None,
    dtype: torch.dtype,
    record: LayerRecord,
) -> Tensor:
    """Return dw [N, K] in ``dtype``. ``x`` is the operand that the forward saved; ``exact`` is x in high precision, for
    observers."""
    if dy_q is None or not isinstance(x, Quantized):
        assert isinstance(x, Tensor)
        if record.is_observed:
            ops.product(record, "wgrad", dy, x)
        if record.counters:
            record.gemm("wgrad", HIGH, ops.flops(dy.shape[0], dy.shape[1], x.shape[1]))
        return ops.high_wgrad(dy, x, dtype)
    backend = site.selections["wgrad"].backend
    if record.counters:
        record.gemm("wgrad", backend.name, ops.flops(dy.shape[0], dy.shape[1], x.data.shape[1]))
    dw = ops.wgrad(backend, dy_q, x, dtype)
    if "wgrad" in record.checked_gemms:
        shown, uses_history = dy if record.shows_operands else None, site.scaling is not None
        rerun = partial(ops.wgrad, backend, dy_q, x, dtype)
        ops.result(record, Result("wgrad", backend.name, shown, dy_q, exact, x, uses_history, None, dw, rerun))
    if record.is_observed and exact is not None:
        ops.product(record, "wgrad", dy, exact)
    # wgrad casts x and dy separately, along their rows, so both operands are reported again.
    if record.keeps_x and exact is not None:
        ops.operand(record, "x_wgrad", exact, x)
        ops.operand(record, "dy_wgrad", dy, dy_q)
        ops.gradient(record, dw, dy, exact)
    return dw


def select_backends(recipe: Recipe, device: torch.device, requested: str = "auto") -> dict[str, Selection]:
    """Select the backend of each GEMM that the recipe runs in FP8, and check its kernels if a version is untested.

    Raises BackendError if the requested backend does not support a GEMM, or a kernel differs from the reference.
    """
    selections = {
        gemm: select(gemm, recipe_or_spec=recipe, device=device, requested=requested)
        for gemm in GEMMS
        if recipe.gemm(gemm) is not None
    }
    for gemm, selection in selections.items():
        run_checks(kernel_checks(recipe, gemm, selection.backend.name, device), device)
    return selections


def select_layer_backends(
    recipe: Recipe,
    device: torch.device,
    shape: Sequence[int | None],
    requested: str = "auto",
    kind: str = "linear",
    gemms: Sequence[str] = GEMMS,
) -> dict[str, Selection]:
    """Select the backend of each GEMM that ``recipe`` runs in FP8, for a layer of ``kind`` and shape (M or None, N, K).

    Experts use grouped GEMMs if every GEMM has a backend for them, otherwise backends that run experts one by one.
    Raises BackendError if the requested backend, or every backend, does not support a GEMM.
    """

    def select_all(prefix: str) -> dict[str, Selection]:
        return {
            gemm: select(prefix + gemm, recipe_or_spec=recipe, device=device, shape=shape, requested=requested)
            for gemm in gemms
            if recipe.gemm(gemm) is not None
        }

    if kind == "experts" and recipe.delayed is None:
        try:
            return select_all("grouped_")
        except BackendError:
            return select_all("")
    return select_all("")


# --- products in high precision ---------------------------------------------------------------------------------------
#
# A CPU without 16-bit instructions (AVX2 without AVX-512: most laptops) multiplies BF16 several times slower than fp32,
# and gradients up to 59 times (benchmarks/bf16_cpu.py). There a product of matrices that are not narrow is computed in
# fp32 from the same operands and rounded once, which is what the instructions do; only the order of the sums differs.
# Elsewhere, while a compiler traces, and with a torch function mode such as invariance, which replaces products itself,
# these are torch's own functions.

MIN_INTENSITY = 6
"""Multiplications per element of the three matrices from which fp32 is faster. With fewer, as in decoding one token,
converting the weight takes most of the time."""


def high_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, differentiable: x [..., K] @ weight [N, K].T + bias [N] -> [..., N]; follows autocast."""
    dtype = compute_dtype(x)
    if not is_computed_in_fp32(x, weight, dtype) or is_functorch_active():
        return F.linear(x, weight, bias)
    with without_autocast(x):
        y: Tensor = _WideLinear.apply(x.to(dtype), weight, None if bias is None else bias.to(dtype))
    return y


def high_mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``torch.mm``: a [M, K] @ b [K, N], written to ``out`` if it is given; without a gradient."""
    if not is_computed_in_fp32(a, b, a.dtype):
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    y = a.float() @ b.float()
    return y.to(a.dtype) if out is None else out.copy_(y)


def high_addmm(start: Tensor, a: Tensor, b: Tensor, alpha: float = 1) -> Tensor:
    """``torch.addmm``: start [M, N] + alpha a [M, K] @ b [K, N]; without a gradient."""
    if not is_computed_in_fp32(a, b, a.dtype):
        return torch.addmm(start, a, b, alpha=alpha)
    return torch.addmm(start.float(), a.float(), b.float(), alpha=alpha).to(start.dtype)


def stock_forward(stock: type[nn.Module], module: nn.Module, x: object) -> Tensor | None:
    """Return the output of a linear layer, or of a convolution over single patches, as one product in fp32; None for
    other modules and inputs, whose own forward is as good. ``stock`` is the class whose forward is replaced: a class
    derived from torch's may compute something else.

    A patch embedding that gets its patches cut, x [patches, C, *kernel], is a product of rows with the flattened
    weight. Where products have their own instructions it stays a convolution, whose sums for a patch do not depend on
    how many there are, and have the bits of the stock model.
    """
    if stock not in (nn.Linear, nn.Conv2d, nn.Conv3d):
        return None
    weight = module._parameters.get("weight")
    if weight is None or not isinstance(x, Tensor) or not is_plain_tensor(x) or not is_plain_tensor(weight):
        return None
    if torch._C._len_torch_function_stack():
        return None
    bias = module._parameters["bias"]
    if stock is nn.Linear:
        return high_linear(x, weight, bias)
    assert isinstance(module, nn.Conv2d | nn.Conv3d)
    if not _is_one_patch(module, x):
        return None
    rows, matrix = x.flatten(1), weight.flatten(1)
    if not is_computed_in_fp32(rows, matrix, compute_dtype(x)):
        return None
    return high_linear(rows, matrix, bias).view(x.shape[0], -1, *[1] * (x.dim() - 2))


def _is_one_patch(conv: nn.Conv2d | nn.Conv3d, x: Tensor) -> bool:
    """Whether each row of x is one patch of this convolution: its output has one position."""
    no_padding = conv.padding == (0,) * len(conv.kernel_size) and conv.groups == 1
    return no_padding and x.shape[2:] == conv.kernel_size and set(conv.dilation) == {1} and x.shape[0] > 0


def is_computed_in_fp32(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether a product of these operands in ``dtype`` is computed in fp32."""
    if dtype not in (torch.bfloat16, torch.float16) or a.device.type != "cpu" or type(b) not in (Tensor, nn.Parameter):
        return False
    if accelerator.multiplies_on_cpu(dtype) or torch._C._len_torch_function_stack() or torch.compiler.is_compiling():
        return False
    if not is_autocast_enabled(a) and not a.dtype == b.dtype == dtype:
        return False
    inner = max(a.shape[-1], 1)
    rows, columns = a.numel() // inner, b.numel() // inner
    elements = a.numel() + b.numel() + rows * columns
    return rows * columns * inner >= MIN_INTENSITY * elements > 0


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        # The weight itself is saved: its copy under autocast would be kept by each call, where torch shares one.
        w = weight.to(x.dtype).float()
        return F.linear(x.float(), w, None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        with without_autocast(dy):
            dx = high_mm(rows, weight.to(x.dtype)).view(x.shape) if needs_x else None
            dw = high_mm(rows.t(), x.reshape(-1, x.shape[-1])).to(weight.dtype) if needs_w else None
        return dx, dw, rows.sum(0) if needs_b else None
