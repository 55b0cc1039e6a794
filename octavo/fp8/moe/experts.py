"""Mixture-of-experts layers in FP8: two grouped linears with the family's own gate between them.

Hugging Face keeps the experts of a layer in two Parameters of three dimensions, ``gate_up_proj`` [E, 2I, H] and
``down_proj`` [E, H, I] (or both transposed), whatever the family, and calls the module with (hidden_states,
top_k_index, top_k_weights). A module of that structure is recognised by it, and its forward is replaced by
:class:`Experts`' on the instance: the class becomes a subclass of both, so that parameters, names, hooks, a family's
own ``_apply_gate`` and ``isinstance`` stay.

The forward, with P = M k pairs of a token and one of its k experts::

    lay the P rows out by expert                          [M, H] -> [R, H]    kernels/groups.py
    gate_up_proj, the gate, down_proj on all R rows       [R, H] -> [R, H]    moe/grouped.py
    take each pair's row, weigh it, add a token's k       [R, H] -> [M, H]

Before a module is converted this must give the stock module's output on random input (:func:`matches_stock`). GEMMs are
counted under ``<module>.gate_up_proj`` and ``<module>.down_proj``, a grouped one as one call of every expert. Where the
experts run one by one, those without tokens run no GEMM and count as idle. Either way they get a gradient of zeros.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.fp8.blocks import mlp
from octavo.fp8.blocks.probe import cache_trial, make_generator
from octavo.fp8.dense import delayed, sources
from octavo.fp8.dense.gemms import Site
from octavo.fp8.dense.inputs import Source, compute_dtype, with_source
from octavo.fp8.dense.linear import GemmArgs, three_gemms
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
"""In the __dict__ of a module of experts with adapters: a Beside whose results are added."""


def is_experts(module: nn.Module) -> bool:
    """True for a module with Parameters ``gate_up_proj`` and ``down_proj`` of three dimensions."""
    weights = [module._parameters.get(name) for name in PROJECTIONS]
    return all(w is not None and w.dim() == 3 for w in weights)


def why_not(module: nn.Module) -> str | None:
    """Why FP8 experts cannot replace this module of experts; None if its structure is the known one."""
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
    """Run the stock module and ours, in high precision, on the same random input: None if they agree, else why not.

    The tolerance allows for a sum in the weights' dtype that is taken in another order.
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


@cache_trial
def stand_in_matches(module: nn.Module) -> str | None:
    """The same for experts without values: two random ones of their size answer, in the same module."""
    twin, generator = copy.copy(module), make_generator()
    twin.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(torch.randn(2, *p.shape[1:], generator=generator).to(p.dtype) / 16)
        for name, p in module._parameters.items()
    }
    if hasattr(twin, "num_experts"):
        twin.__dict__["num_experts"] = 2
    return matches_stock(twin)


class Experts(CachesWeights):
    """The forward of experts in FP8; see the module's docstring."""

    _sites: dict[str, Site]
    _stock: type[nn.Module]  # the class before conversion

    @classmethod
    def convert(cls, module: nn.Module, sites: Mapping[str, Site]) -> Experts:
        """Turn a module of experts into an FP8 one, in place; ``sites`` by projection, both of them."""
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
        """The recipe of a projection whose scales are of former steps, one of which each expert keeps."""
        late = (site.recipe for site in self._sites.values() if site.recipe.delayed is not None)
        return next((recipe.summary() for recipe in late), None)

    def _weight_codes(self) -> Mapping[str, WeightCache]:
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

        ``torch.compile`` leaves it out in one piece, as it does the linear layers that look at caches and counters.

        Raises RuntimeError where a parametrization was put on a weight after :func:`octavo.fp8.apply`, as PEFT does in
        each forward for its ``target_parameters``: there would be new values, and so new codes, in each forward.
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
        """One projection of all rows: grouped where recipe and backends can, else expert by expert."""
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
            return three_gemms(rows, weights[expert], biases[expert], call)

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
        """The class is made on the fly, so that a copy or a pickle names the stock class instead."""
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
    """The (N, K) weight of each expert, as views that autograd gathers into one gradient (zeros for the unused)."""
    weight = local_parameter(module, name)
    assert weight is not None
    parts = weight.unbind(0)
    return tuple(p.t() for p in parts) if getattr(module, "is_transposed", False) else parts


def _apply_gate(module: nn.Module, gate_up: Tensor) -> Tensor:
    """[m, 2I] -> [m, I], by the family's own rule where it has one."""
    family_gate = getattr(module, "_apply_gate", None)
    if family_gate is not None:
        return family_gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return module.act_fn(gate) * up  # type: ignore[operator]


def _expert_biases(module: nn.Module, name: str) -> tuple[Tensor | None, ...]:
    """The bias [N] of each expert, or a None for each."""
    weight, bias = local_parameter(module, name), local_parameter(module, f"{name}_bias")
    assert weight is not None
    return (None,) * weight.shape[0] if bias is None else bias.unbind(0)


def run_mixture(
    module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, project: Project, saves: bool = False
) -> Tensor:
    """Lay the (token, choice) pairs out by expert, run both projections, take the rows back and add a token's k.
    ``saves``: what is between the projections and after them is saved in FP8. What :data:`ADAPTERS` makes of their
    inputs, if the module has it, is added to the projections."""
    weight = local_parameter(module, "gate_up_proj")
    assert weight is not None
    beside: Adapters | None = module.__dict__.get(ADAPTERS)
    if beside is not None:
        project = partial(_project_with_adapters, project, beside)
    dtype = compute_dtype(hidden)
    tokens, chosen, top_k, dealt = hidden, top_k_index.reshape(-1), top_k_index.shape[-1], None
    exchange: Exchange | None = module.__dict__.get(EXCHANGE)
    if exchange is not None:  # from here on a token is a row that some rank sent, with one choice
        dealt = exchange.plan_dispatch(chosen, weight.shape[0] * exchange.ranks)
        tokens, chosen, top_k = dealt.dispatch(hidden, top_k, dtype), dealt.experts, 1
    # An index beyond the last expert is a place that expert parallelism left empty: it has no row and adds zero.
    groups, pair_of, row_of = group_rows(chosen, weight.shape[0])
    x = ToRows.apply(tokens, pair_of, row_of, top_k, dtype)
    gate = partial(_apply_gate, module)
    if beside is None or weight.requires_grad:
        gate_up = project("gate_up_proj", x, groups)
    else:  # an adapter of a frozen weight keeps the tokens, not a row for each choice
        again = partial(gather_rows, top_k=top_k, dtype=dtype)
        with with_source(x, Source((tokens.detach(), pair_of), again)):
            gate_up = project("gate_up_proj", x, groups)
    if saves:
        y = run_gated(gate, gate_up, lambda h: project("down_proj", h, groups))
    else:
        y = project("down_proj", gate(gate_up), groups)
    pairs, nobody = ToPairs.apply(y, pair_of, row_of), (row_of >= groups.rows).unsqueeze(1)
    if dealt is not None:
        pairs, nobody = dealt.combine(pairs), (dealt.place >= len(dealt.order)).unsqueeze(1)
    if getattr(module, "has_post_expert_norm", False):
        pairs = module.post_expert_norm(pairs.masked_fill(nobody, 0))  # type: ignore[operator]
    weights = top_k_weights.reshape(-1, 1).masked_fill(nobody, 0)
    answers = weight_pairs(pairs, weights) if saves else pairs * weights
    # Gathering and adding in a fixed order is deterministic; index_add_ is not on a GPU.
    out = answers.view(*top_k_index.shape, answers.shape[-1]).sum(-2).to(hidden.dtype)
    return out if out.shape == hidden.shape else out.view(hidden.shape)


def _project_with_adapters(project: Project, beside: Adapters, name: str, x: Tensor, groups: Groups) -> Tensor:
    y, extra = project(name, x, groups), beside.get(name)
    return y if extra is None else y + extra(x, groups)


# --- what is saved in FP8 between the projections and after them -------------------------------------------------

SAVES_FP8 = "_saves_rows"
"""In the __dict__ of a module of experts that saves FP8."""


def save_in_fp8(experts: nn.Module) -> None:
    add_attribute(experts, SAVES_FP8, True)


def run_gated(gate: Callable[[Tensor], Tensor], gate_up: Tensor, down: Callable[[Tensor], Tensor]) -> Tensor:
    """down(gate(gate_up)), on what FP8 holds of gate_up [R, 2I]."""
    if gate_up.dtype not in sources.DTYPES or not gate_up.numel():
        return down(gate(gate_up))
    h, source = mlp.activation_product(gate, gate_up)
    if source is None:
        return down(h)
    with with_source(h, source):
        return down(h)


def weight_pairs(pairs: Tensor, weights: Tensor) -> Tensor:
    """pairs [P, H] * weights [P, 1]; what the gradient of the weights needs of the pairs is saved in FP8."""
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
