"""Adapters of experts: low-rank products on each expert's rows, without materializing the delta of a weight.

PEFT adapts the three-dimensional parameters of a mixture-of-experts layer by ``target_parameters``: a ``ParamWrapper``
around the module for each of them (nested: the first parameter's inside), with all experts' factors in one matrix
each. For a weight of E experts, W_e [N, K] as its GEMM multiplies by it, and adapters of rank r::

    lora_A.weight [r E, K]    A_e = rows e r .. (e + 1) r
    lora_B.weight [N, r E]    B_e = columns e, e + E, e + 2 E, ...      (rank-major: column j E + e is B_e's column j)
    W_e' = W_e + s B_e A_e,   s = alpha / r, of rsLoRA alpha / sqrt(r)

(PEFT before 0.19 swaps the two sizes of a weight stored as [E, N, K]: A [r E, N] and B [K, r E], and the delta is their
product transposed. :func:`factors` reads both forms.)

PEFT replaces W by W + s B A, for all experts, in every forward: this is impossible for FP8 codes, and the sum is as
large as the layer. :func:`replace_forwards` keeps PEFT's modules, names, configuration and files and replaces the
forward of the outer wrapper: on the rows that :mod:`octavo.fp8.moe.experts` sorts by expert,

    y_e = base(x_e) + s (x_e A_e^T) B_e^T

with base in FP8 from frozen codes, or in high precision. Factors are multiplied in x's dtype. Saved for the backward
are s x_e A_e^T [R, r], and x only if the base cannot recompute it: for gate_up_proj the tokens are saved instead of one
row for each of their experts, for down_proj the FP8 codes of gate and up if activations are saved in FP8. Experts
without tokens get gradients of zero.

PEFT refuses dropout, DoRA and a bias for such parameters, because W + s B A has no place for them.
:func:`check_settings` does the same, because no program could read a file with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.adapters.errors import AdapterError
from octavo.fp8 import moe
from octavo.fp8.dense import Recomputable, get_recomputable
from octavo.fp8.kernels import Groups

if TYPE_CHECKING:
    from octavo.config import LoraSection


def stock_name(name: str) -> str:
    """Return the name of a module or parameter without adapters, that is without PEFT's ``base_layer``."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the three-dimensional parameters of a model's experts by stock name: the allowed ``target_parameters``."""
    parameters: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        if moe.is_experts(module):
            for projection in moe.PROJECTIONS:
                parameter = module._parameters[projection]
                assert parameter is not None
                parameters[f"{stock_name(name)}.{projection}"] = parameter
    return parameters


def why_not(module: nn.Module) -> str | None:
    """Return why these experts cannot be computed row by row, as adapters require, or None if they can."""
    if isinstance(module, moe.Experts):  # compared with the stock module when it was converted
        return None
    return moe.why_not(module) or (None if _is_meta(module) else moe.matches_stock(module))


def sort_parameters(model: nn.Module) -> None:
    """Restore the order in which the classes of experts define their parameters. Names in an adapter's file depend on
    it: PEFT wraps the first parameter first, and loading may have changed the order."""
    for module in model.modules():
        if moe.is_experts(module):
            for name in [n for n in module._parameters if not n.startswith(moe.PROJECTIONS[0])]:
                module._parameters[name] = module._parameters.pop(name)


def check_settings(names: Iterable[str], lora: LoraSection) -> None:
    """Raise AdapterError for dropout and DoRA if ``names``, the targeted parameters of experts, is not empty."""
    first = next(iter(names), None)
    settings = {"lora.dropout": lora.dropout, "lora.dora": lora.dora}
    wrong = [f"{key}={value}" for key, value in settings.items() if value]
    if first is not None and wrong:
        raise AdapterError(
            f"{' and '.join(wrong)} cannot be used for experts, but {first} is a target: PEFT adapts their "
            "weights as W + B A, which has no place for dropout, DoRA or a bias, and could not read such an adapter. "
            'Set lora.dropout: 0 and lora.dora: false, or exclude experts: lora.exclude: ["**.experts"]'
        )


def wrappers(outer: nn.Module) -> dict[str, Any]:
    """Return projection -> PEFT's wrapper, for nested wrappers."""
    by_projection, module = {}, outer
    while _is_wrapper(module):
        by_projection[str(module.parameter_name)] = module
        module = module.base_layer  # type: ignore[assignment]
    return by_projection


def factors(wrapper: Any, adapter: str) -> tuple[Tensor, Tensor]:
    """Return (A [E, r, K], B [E, N, r]) of one adapter, so that W_e [N, K] + s B_e A_e is the adapted weight of expert
    e, in GEMM orientation for every storage. Views of PEFT's parameters, through which gradients flow."""
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    experts = wrapper.num_experts
    down, up = a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    transposed = bool(getattr(wrapper.get_base_layer(), "is_transposed", False))
    if transposed or getattr(wrapper, "_did_swap_in_out_features", False):
        return down, up
    return up.mT, down.mT  # PEFT before 0.19: A is for the first dimension of the parameter, which is N


def replace_forwards(model: nn.Module) -> int:
    """Replace the forward of experts that PEFT wrapped, in place; returns the number of modules of experts.

    The wrappers and their parameters remain PEFT's. May be called again. Raises AdapterError for wrapped parameters of
    other modules, and for experts with a structure that cannot be computed row by row.
    """
    # Only the outermost wrapper of a module runs: it computes for the nested ones too.
    outer = [(name, module) for name, module in model.named_modules() if _is_wrapper(module)]
    inner = {id(module.base_layer) for _, module in outer}
    outer = [(name, module) for name, module in outer if id(module) not in inner]
    checked: set[tuple[object, ...]] = set()
    for name, module in outer:
        base, by_projection = module.get_base_layer(), wrappers(module)
        unsupported = [p for p in by_projection if p not in moe.PROJECTIONS]
        if unsupported or not moe.is_experts(base):
            raise AdapterError(
                f"{name}.{(unsupported or list(by_projection))[0]} cannot be adapted as a parameter: only "
                f"{' and '.join(moe.PROJECTIONS)} of experts can ([E, N, K]). Name linear layers in "
                "target_modules"
            )
        kind = (type(base), *(tuple(base._parameters[p].shape) for p in moe.PROJECTIONS))
        if kind not in checked and (why := why_not(base)):
            raise AdapterError(
                f"{name}: experts of this structure cannot have adapters: {why}. Exclude them with "
                'lora.exclude: ["**.experts"]'
            )
        checked.add(kind)
        if not isinstance(base, moe.Experts):
            moe.enable_row_forward(base)
        module.__class__ = _adapted_class()
    return len(outer)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _adapted_class() -> type[nn.Module]:
    """Return PEFT's wrapper with Octavo's forward, created on first use because PEFT may not be installed."""
    from peft.tuners.lora.layer import ParamWrapper

    if ParamWrapper in _classes:
        return _classes[ParamWrapper]

    class AdaptedExperts(ParamWrapper):
        @torch._disable_dynamo
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            """Return the forward of the module of experts; see the docstring of :mod:`octavo.adapters.experts`."""
            base = self.get_base_layer()
            # The base calls these functions at its projections. An attribute, because stock experts pass no arguments
            # through; deleted afterwards, so that a call of the base by itself has no adapters.
            base.__dict__[moe.ADAPTERS] = {
                name: partial(low_rank, wrapper)
                for name, wrapper in wrappers(self).items()
                if not (wrapper.disable_adapters or wrapper.merged) and _active_adapters(wrapper)
            }
            try:
                return base(*args, **kwargs)
            finally:
                del base.__dict__[moe.ADAPTERS]

    AdaptedExperts.__name__ = ParamWrapper.__name__  # PEFT looks for this name when it adds a second adapter
    _classes[ParamWrapper] = AdaptedExperts
    return AdaptedExperts


def low_rank(wrapper: Any, x: Tensor, groups: Groups) -> Tensor:
    """Return s B_e A_e x [R, N] for every expert's rows x [R, K], summed over active adapters; padding rows are
    undefined."""
    recomputable = get_recomputable(x)
    parts = [
        _LowRank.apply(x, *factors(wrapper, adapter), wrapper.scaling[adapter], groups, recomputable)
        for adapter in _active_adapters(wrapper)
    ]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _active_adapters(wrapper: Any) -> list[str]:
    return [adapter for adapter in wrapper.active_adapters if adapter in wrapper.lora_A]


class _LowRank(torch.autograd.Function):
    """x [R, K], A [E, r, K], B [E, N, r] -> s (x A^T) B^T [R, N], with the factors of each row's expert."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, scale: float, groups: Groups, recomputable: Recomputable | None
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            h = moe.grouped_fwd(x, _contiguous_factor(down, x.dtype), None, groups) * scale
            y = moe.grouped_fwd(h, _contiguous_factor(up, x.dtype), None, groups)
        saved = (x,) if recomputable is None else recomputable.tensors
        ctx.recompute = None if recomputable is None else recomputable.recompute
        ctx.save_for_backward(*groups[:3], h, down, up, *(saved if ctx.needs_input_grad[1] else ()))
        ctx.scale, ctx.rows, ctx.dtype = scale, groups.rows, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        sizes, starts, tiles, h, down, up, *saved = ctx.saved_tensors
        groups = Groups(sizes, starts, tiles, ctx.rows)
        needs_x, needs_down, needs_up = ctx.needs_input_grad[:3]
        dx = ddown = dup = None
        with torch.autocast(dy.device.type, enabled=False):
            if needs_up:
                dup = moe.grouped_wgrad(dy, h, groups, up.dtype)
            if needs_x or needs_down:
                dh = moe.grouped_dgrad(dy, _contiguous_factor(up, dy.dtype), groups) * ctx.scale
            if needs_down:
                x = saved[0] if ctx.recompute is None else ctx.recompute(*saved).to(ctx.dtype)
                ddown = moe.grouped_wgrad(dh, x, groups, down.dtype)
            if needs_x:
                dx = moe.grouped_dgrad(dh, _contiguous_factor(down, dy.dtype), groups)
        return dx, ddown, dup, None, None, None


def _contiguous_factor(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a factor as grouped GEMMs need it: contiguous rows."""
    return factor.to(dtype).contiguous()


def _is_wrapper(module: object) -> bool:
    """Return whether this is PEFT's wrapper of a parameter; tested by name, so that PEFT is not imported for it."""
    return any(cls.__name__ == "ParamWrapper" for cls in type(module).__mro__)


def _is_meta(module: nn.Module) -> bool:
    return any(p.is_meta for p in module.parameters())
