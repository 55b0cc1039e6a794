"""Mixture-of-experts layers in FP8: two grouped linear layers with the model's gate between them.

Hugging Face stores the experts of a layer in two three-dimensional parameters, ``gate_up_proj`` [E, 2I, H] and
``down_proj`` [E, H, I] (or both transposed), and calls the module with (hidden_states, top_k_index, top_k_weights).
Modules are recognized by this structure. Their class is replaced by a subclass of it and of :class:`Experts`, so that
parameters, names, hooks, a model's ``_apply_gate`` and ``isinstance`` keep working.

The forward, with P = M k pairs of a token and one of its k experts::

    group the P rows by expert                            [M, H] -> [R, H]    kernels/groups.py
    gate_up_proj, the gate, down_proj on all R rows       [R, H] -> [R, H]    moe/grouped.py
    weight the row of each pair, sum the k of a token     [R, H] -> [M, H]

Before conversion the result must match the stock module on random input (:func:`matches_stock`). GEMMs are counted
under
``<module>.gate_up_proj`` and ``<module>.down_proj``; a grouped GEMM counts as one call per expert. If experts run one
by one, experts without tokens run no GEMM and count as idle. In both cases their gradient is zero.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.fp8.blocks import mlp
from octavo.fp8.blocks.probe import cache_trial, make_generator
from octavo.fp8.dense import delayed, sources
from octavo.fp8.dense.gemms import LayerGemms
from octavo.fp8.dense.inputs import Recomputable, compute_dtype, with_recomputable
from octavo.fp8.dense.linear import GemmArgs, fp8_linear
from octavo.fp8.dense.swap import add_attribute
from octavo.fp8.kernels.groups import Groups, group_rows
from octavo.fp8.moe.exchange import EXCHANGE, Exchange, local_parameter
from octavo.fp8.moe.grouped import Grouped, grouped_gemms, run_each_expert, why_not_grouped
from octavo.fp8.moe.rows import ToPairs, ToRows, gather_rows
from octavo.fp8.observe import recorder
from octavo.fp8.weights.cache import CachesWeights, WeightCache, WeightSlice

PROJECTIONS = ("gate_up_proj", "down_proj")
Project = Callable[[str, Tensor, Groups], Tensor]  # (projection, x [R, K], groups) -> y [R, N]
Adapters = Mapping[str, Callable[[Tensor, Groups], Tensor]]  # projection -> (x [R, K], groups) -> [R, N]
ADAPTERS = "_beside"
"""Key in the __dict__ of a module of experts with adapters: an Adapters mapping whose results are added."""


def is_experts(module: nn.Module) -> bool:
    """Return True for a module with three-dimensional parameters ``gate_up_proj`` and ``down_proj``."""
    weights = [module._parameters.get(name) for name in PROJECTIONS]
    return all(w is not None and w.dim() == 3 for w in weights)


def why_not(module: nn.Module) -> str | None:
    """Return why FP8 experts cannot replace this module, or None if its structure is supported."""
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(arguments) != 3 or not any(word in arguments[1] for word in ("index", "indices")):
        return f"experts called with ({', '.join(arguments)}), not (hidden_states, top_k_index, top_k_weights)"
    if not getattr(module, "has_gate", True):
        return "experts without a gate"
    if not hasattr(module, "_apply_gate") and not hasattr(module, "act_fn"):
        return "experts with neither act_fn nor _apply_gate"
    if getattr(module, "_is_expert_parallel", False):
        return "experts spread over ranks"
    up, down = _expert_weights(module, "gate_up_proj"), _expert_weights(module, "down_proj")
    if up[0].shape[0] % 2 or down[0].shape != (up[0].shape[1], up[0].shape[0] // 2):
        return f"experts of shapes {list(up[0].shape)} and {list(down[0].shape)} that are not [2I, H] and [H, I]"
    return None


def matches_stock(module: nn.Module, tokens: int = 8, top_k: int = 2) -> str | None:
    """Compare the stock forward with the forward of this module, in high precision, on random input.

    Returns None if they match, else the difference. The tolerance allows for a different order of sums in the dtype of
    the weights.
    """
    weight = module._parameters["gate_up_proj"]
    assert weight is not None
    experts, hidden = weight.shape[0], _expert_weights(module, "gate_up_proj")[0].shape[1]
    device, generator = weight.device, torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).to(device, weight.dtype)
    top_k = min(top_k, experts)
    index = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].to(device)
    share = torch.rand(tokens, top_k, generator=generator).to(device, weight.dtype)

    def project(name: str, rows: Tensor, groups: Groups) -> Tensor:
        weights, biases = _expert_weights(module, name), _expert_biases(module, name)
        return run_each_expert(rows, groups, lambda e, expert_rows: F.linear(expert_rows, weights[e], biases[e]))[0]

    with torch.no_grad():
        stock = module(x, index, share).double()
        ours = run_mixture(module, x, index, share, project).double()
    if stock.shape != ours.shape:
        return f"the stock module returns shape {list(stock.shape)}, our experts {list(ours.shape)}"
    largest = float(stock.nan_to_num().abs().max())
    gap = float((stock - ours).nan_to_num().abs().max())
    allowed = 16 * torch.finfo(weight.dtype).eps * max(largest, torch.finfo(torch.float32).tiny)
    if gap > allowed or not torch.equal(stock.isnan(), ours.isnan()):
        return f"our forward of experts differs from the stock module by {gap:.3g} where outputs reach {largest:.3g}"
    return None


_STAND_IN_VALUES = 99_991  # a prime number


@cache_trial
def stand_in_matches(module: nn.Module) -> str | None:
    """Run :func:`matches_stock` for experts on the meta device, with two random experts of the same size."""
    twin, generator = copy.copy(module), make_generator()
    # Drawing every value of large experts would take most of the time of a search over plans. A prime number of values
    # divides no dimension, so no two rows of a weight are equal.
    values = torch.randn(_STAND_IN_VALUES, generator=generator) / 16

    def fill(shape: Sequence[int]) -> Tensor:
        size = math.prod(shape)
        return values.repeat(-(-size // _STAND_IN_VALUES))[:size].view(*shape)

    twin.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(fill((2, *p.shape[1:])).to(p.dtype))
        for name, p in module._parameters.items()
    }
    if hasattr(twin, "num_experts"):
        twin.__dict__["num_experts"] = 2
    return matches_stock(twin)


class Experts(CachesWeights):
    """FP8 forward of a module of experts; see the module docstring."""

    _sites: dict[str, LayerGemms]
    _stock: type[nn.Module]  # the class before conversion

    @classmethod
    def convert(cls, module: nn.Module, sites: Mapping[str, LayerGemms]) -> Experts:
        """Convert a module of experts to FP8 in place. ``sites``: one for each projection."""
        module.__dict__["_sites"] = dict(sites)
        module.__class__ = _fp8_class(type(module))
        assert isinstance(module, cls)
        for name, site in sites.items():
            if site.recipe.delayed is not None:
                weight = module._parameters[name]
                assert weight is not None
                delayed.attach_histories(module, site, slots=weight.shape[0], suffix=f"_{name}")
        return module

    @property
    def scaled_late(self) -> str | None:
        """Recipe of a projection with delayed scaling, which has one history per expert, or None."""
        late = (site.recipe for site in self._sites.values() if site.recipe.delayed is not None)
        return next((recipe.summary() for recipe in late), None)

    def _weight_caches(self) -> Mapping[str, WeightCache]:
        return {name: site.codes for name, site in self._sites.items() if site.codes is not None}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)
        for name, site in self._sites.items():
            weight = self._parameters[name]
            if site.scaling is not None and weight is not None:
                site.scaling.move_to(weight.device)
        return out

    @torch._disable_dynamo
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [M, H], top_k_index and top_k_weights [M, k] -> [M, H].

        ``torch.compile`` does not trace it, like other FP8 layers that use caches and counters.

        Raises RuntimeError if a weight got a parametrization after :func:`octavo.fp8.apply`, as PEFT does for its
        ``target_parameters``: the weight, and its codes, would be recomputed in each forward.
        """
        if "parametrizations" in self._modules:
            raise RuntimeError(
                "FP8 experts cannot multiply by a weight that is computed again in each forward, as PEFT's "
                "target_parameters do. Call fp8.plan after get_peft_model, which keeps such experts as they are, "
                "or train adapters of experts with octavo train (lora.targets)."
            )
        saves = SAVES_FP8 in self.__dict__
        return run_mixture(self, hidden_states, top_k_index, top_k_weights, self._project, saves)

    def _project(self, name: str, x: Tensor, groups: Groups) -> Tensor:
        """Run one projection of all rows: as grouped GEMMs if recipe and backends support it, else per expert."""
        site = self._sites[name]
        weight, bias = local_parameter(self, name), local_parameter(self, f"{name}_bias")
        assert weight is not None
        transposed, grad = bool(getattr(self, "is_transposed", False)), torch.is_grad_enabled()
        if why_not_grouped(site.recipe, site.selections, x.device) is None:
            way = Grouped(groups, transposed)
            call = GemmArgs(site, weight, WeightSlice(None, transposed), grad, self.training, way, share_codes=False)
            return grouped_gemms(x, bias, call)
        weights, biases = _expert_weights(self, name), _expert_biases(self, name)

        def run(expert: int, rows: Tensor) -> Tensor:
            part = WeightSlice(expert, transposed)
            call = GemmArgs(site, weight, part, grad, self.training)
            return fp8_linear(rows, weights[expert], biases[expert], call)

        y, ran = run_each_expert(x, groups, run)
        recorder.record_idle_experts(site.name, groups.experts - ran)
        return y

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}={list(self._parameters[name].shape)} "  # type: ignore[union-attr]
            + f"fp8={self._sites[name].recipe.summary()}"
            for name in PROJECTIONS
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle by the stock class, because the FP8 class is created at runtime."""
        return _rebuild, (self._stock,), self.__dict__.copy()


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _fp8_class(stock: type[nn.Module]) -> type[nn.Module]:
    if stock not in _classes:
        _classes[stock] = type(f"Fp8{stock.__name__}", (Experts, stock), {"__module__": __name__, "_stock": stock})
    return _classes[stock]


def _rebuild(stock: type[nn.Module]) -> nn.Module:
    fp8_class = _fp8_class(stock)
    return fp8_class.__new__(fp8_class)


def _expert_weights(module: nn.Module, name: str) -> tuple[Tensor, ...]:
    """Return the (N, K) weight of each expert as views; autograd combines their gradients, zero for unused experts."""
    weight = local_parameter(module, name)
    assert weight is not None
    parts = weight.unbind(0)
    return tuple(p.t() for p in parts) if getattr(module, "is_transposed", False) else parts


def _apply_gate(module: nn.Module, gate_up: Tensor) -> Tensor:
    """Apply the gate, [m, 2I] -> [m, I], with the model's ``_apply_gate`` if it has one."""
    family_gate = getattr(module, "_apply_gate", None)
    if family_gate is not None:
        return family_gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return module.act_fn(gate) * up  # type: ignore[operator]


def _expert_biases(module: nn.Module, name: str) -> tuple[Tensor | None, ...]:
    """Return the bias [N] of each expert, or None for each."""
    weight, bias = local_parameter(module, name), local_parameter(module, f"{name}_bias")
    assert weight is not None
    return (None,) * weight.shape[0] if bias is None else bias.unbind(0)


def run_mixture(
    module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, project: Project, saves: bool = False
) -> Tensor:
    """Run a mixture: group (token, choice) pairs by expert, run both projections, and sum the k results of each token.

    ``saves``: activations between and after the projections are saved in FP8. Results of :data:`ADAPTERS`, if the
    module has them, are added to the projections.
    """
    weight = local_parameter(module, "gate_up_proj")
    assert weight is not None
    adapters: Adapters | None = module.__dict__.get(ADAPTERS)
    if adapters is not None:
        project = partial(_project_with_adapters, project, adapters)
    dtype = compute_dtype(hidden)
    tokens, chosen, top_k, dispatched = hidden, top_k_index.reshape(-1), top_k_index.shape[-1], None
    exchange: Exchange | None = module.__dict__.get(EXCHANGE)
    if exchange is not None:  # from here on a token is a received row with one choice
        dispatched = exchange.plan_dispatch(chosen, weight.shape[0] * exchange.ranks)
        tokens, chosen, top_k = dispatched.dispatch(hidden, top_k, dtype), dispatched.experts, 1
    # An index beyond the last expert is an empty slot of expert parallelism: it has no row and adds zero.
    groups, pair_of, row_of = group_rows(chosen, weight.shape[0])
    x = ToRows.apply(tokens, pair_of, row_of, top_k, dtype)
    gate = partial(_apply_gate, module)
    if adapters is None or weight.requires_grad:
        gate_up = project("gate_up_proj", x, groups)
    else:  # an adapter of a frozen weight saves the tokens, not one row per choice
        again = partial(gather_rows, top_k=top_k, dtype=dtype)
        with with_recomputable(x, Recomputable((tokens.detach(), pair_of), again)):
            gate_up = project("gate_up_proj", x, groups)
    if saves:
        y = run_gated(gate, gate_up, lambda h: project("down_proj", h, groups))
    else:
        y = project("down_proj", gate(gate_up), groups)
    pairs, is_empty = ToPairs.apply(y, pair_of, row_of), (row_of >= groups.rows).unsqueeze(1)
    if dispatched is not None:
        pairs, is_empty = dispatched.combine(pairs), (dispatched.place >= len(dispatched.order)).unsqueeze(1)
    if getattr(module, "has_post_expert_norm", False):
        pairs = module.post_expert_norm(pairs.masked_fill(is_empty, 0))  # type: ignore[operator]
    weights = top_k_weights.reshape(-1, 1).masked_fill(is_empty, 0)
    weighted = weight_pairs(pairs, weights) if saves else pairs * weights
    # Summing in a fixed order is deterministic; index_add_ on a GPU is not.
    out = weighted.view(*top_k_index.shape, weighted.shape[-1]).sum(-2).to(hidden.dtype)
    return out if out.shape == hidden.shape else out.view(hidden.shape)


def _project_with_adapters(project: Project, adapters: Adapters, name: str, x: Tensor, groups: Groups) -> Tensor:
    y, extra = project(name, x, groups), adapters.get(name)
    return y if extra is None else y + extra(x, groups)


# --- activations saved in FP8 ------------------------------------------------------------------------------------

SAVES_FP8 = "_saves_rows"
"""Key in the __dict__ of a module of experts that saves activations in FP8."""


def save_in_fp8(experts: nn.Module) -> None:
    add_attribute(experts, SAVES_FP8, True)


def run_gated(gate: Callable[[Tensor], Tensor], gate_up: Tensor, down: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute down(gate(gate_up)) from the FP8 values of gate_up [R, 2I]."""
    if gate_up.dtype not in sources.DTYPES or not gate_up.numel():
        return down(gate(gate_up))
    h, recomputable = mlp.activation_product(gate, gate_up)
    if recomputable is None:
        return down(h)
    with with_recomputable(h, recomputable):
        return down(h)


def weight_pairs(pairs: Tensor, weights: Tensor) -> Tensor:
    """Compute pairs [P, H] * weights [P, 1]; pairs are saved in FP8 for the gradient of the weights."""
    if pairs.dtype not in sources.DTYPES or not pairs.numel():
        return pairs * weights
    return _WeightPairs.apply(pairs, weights)


class _WeightPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: Tensor, weights: Tensor) -> Tensor:
        saved = sources.encode_activation(pairs) if ctx.needs_input_grad[1] else None
        ctx.dtypes = pairs.dtype, weights.dtype
        sources.save_named(ctx, weights=weights, pairs=saved)
        return pairs * weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weights, saved = sources.load_saved(ctx).values()
        dpairs = (dy * weights).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        dweights = None
        if saved is not None:
            pairs = sources.decode_activation(saved, ctx.dtypes[0])
            dweights = (dy * pairs).sum(1, keepdim=True).to(ctx.dtypes[1])
        return dpairs, dweights
