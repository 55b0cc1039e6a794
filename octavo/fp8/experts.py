"""Mixture-of-experts layers in FP8: a plain loop over the experts, two linears each.

Hugging Face keeps the experts of a layer in two Parameters of three dimensions, ``gate_up_proj`` [E, 2I, H] and
``down_proj`` [E, H, I] (or both transposed), whatever the family, and calls the module with (hidden_states,
top_k_index, top_k_weights). A module of that structure is recognised by it, and its forward is replaced by
:class:`Experts`' on the instance: the class becomes a subclass of both, so that parameters, names, hooks, a family's
own ``_apply_gate`` and ``isinstance`` stay.

Before that the loop must give the stock module's output on random input (:func:`agrees`). GEMMs are counted under
``<module>.gate_up_proj`` and ``<module>.down_proj``, one call an expert with tokens; experts without tokens run no
GEMM, count as idle, and get a gradient of zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.fp8 import observe, scaling
from octavo.fp8.linear import Call, Site, three_gemms
from octavo.fp8.weights import HoldsCodes, Part, WeightCodes

PROJECTIONS = ("gate_up_proj", "down_proj")
Project = Callable[[str, int, Tensor, Tensor, "Tensor | None"], Tensor]  # (projection, expert, x, weight, bias) -> y


def is_experts(module: nn.Module) -> bool:
    """True for a module with Parameters ``gate_up_proj`` and ``down_proj`` of three dimensions."""
    weights = [module._parameters.get(name) for name in PROJECTIONS]
    return all(w is not None and w.dim() == 3 for w in weights)


def obstacle(module: nn.Module) -> str | None:
    """Why the loop cannot stand in for this module of experts; None if its structure is the known one."""
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(arguments) != 3 or not any(word in arguments[1] for word in ("index", "indices")):
        return f"experts called with ({', '.join(arguments)}), not (hidden_states, top_k_index, top_k_weights)"
    if not getattr(module, "has_gate", True):
        return "experts without a gate"
    if not hasattr(module, "_apply_gate") and not hasattr(module, "act_fn"):
        return "experts with neither act_fn nor _apply_gate"
    if getattr(module, "_is_expert_parallel", False):
        return "experts spread over ranks"
    up, down = _matrices(module, "gate_up_proj"), _matrices(module, "down_proj")
    if up[0].shape[0] % 2 or down[0].shape != (up[0].shape[1], up[0].shape[0] // 2):
        return f"experts of shapes {list(up[0].shape)} and {list(down[0].shape)} that are not [2I, H] and [H, I]"
    return None


def agrees(module: nn.Module, tokens: int = 8, top_k: int = 2) -> str | None:
    """Run the stock module and the loop in high precision on the same random input: None if they agree, else why not.

    The tolerance is that of a sum in the weights' dtype taken in another order.
    """
    weight = module._parameters["gate_up_proj"]
    assert weight is not None
    experts, hidden = weight.shape[0], _matrices(module, "gate_up_proj")[0].shape[1]
    device, generator = weight.device, torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).to(device, weight.dtype)
    top_k = min(top_k, experts)
    index = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].to(device)
    share = torch.rand(tokens, top_k, generator=generator).to(device, weight.dtype)
    with torch.no_grad():
        stock = module(x, index, share).double()
        ours = _loop(module, x, index, share, lambda _, e, x, w, b: F.linear(x, w, b)).double()
    if stock.shape != ours.shape:
        return f"the stock module returns shape {list(stock.shape)}, the loop over experts {list(ours.shape)}"
    largest = float(stock.nan_to_num().abs().max())
    gap = float((stock - ours).nan_to_num().abs().max())
    allowed = 16 * torch.finfo(weight.dtype).eps * max(largest, torch.finfo(torch.float32).tiny)
    if gap > allowed or not torch.equal(stock.isnan(), ours.isnan()):
        return f"the loop over experts differs from the stock module by {gap:.3g} where outputs reach {largest:.3g}"
    return None


class Experts(HoldsCodes):
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
                scaling.attach(module, site.recipe.delayed, slots=weight.shape[0], suffix=f"_{name}")
        return module

    def _weight_codes(self) -> Mapping[str, WeightCodes]:
        return {name: site.codes for name, site in self._sites.items() if site.codes is not None}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)
        scaling.follow(self)
        return out

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [M, H], top_k_index and top_k_weights [M, k] -> [M, H]."""
        transposed = bool(getattr(self, "is_transposed", False))
        grad = torch.is_grad_enabled()

        def project(name: str, expert: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            site = self._sites[name]
            history = None
            if site.recipe.delayed is not None:
                history = scaling.history(self, expert, x.device, suffix=f"_{name}")
            owner = self._parameters[name]
            assert owner is not None
            return three_gemms(
                x, weight, bias, Call(site, owner, Part(expert, transposed), history, self.training, grad)
            )

        now = observe.phase()
        count = self.get_parameter("gate_up_proj").shape[0]
        if observe.counting() and now == observe.Phase(counted=True, recompute=False):
            used = top_k_index[top_k_index < count].unique().numel()
            for site in self._sites.values():
                observe.idle(site.name, count - max(used, 1))
        return _loop(self, hidden_states, top_k_index, top_k_weights, project)

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}={list(self._parameters[name].shape)} "  # type: ignore[union-attr]
            + f"fp8={self._sites[name].recipe.short()}"
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
    made = _fp8_class(stock)
    return made.__new__(made)


def _matrices(module: nn.Module, name: str) -> tuple[Tensor, ...]:
    """The (N, K) weight of each expert, as views that autograd gathers into one gradient (zeros for the unused)."""
    weight = module._parameters[name]
    assert weight is not None
    parts = weight.unbind(0)
    return tuple(p.t() for p in parts) if getattr(module, "is_transposed", False) else parts


def _gate(module: nn.Module, gate_up: Tensor) -> Tensor:
    """[m, 2I] -> [m, I], by the family's own rule where it has one."""
    own = getattr(module, "_apply_gate", None)
    if own is not None:
        return own(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return module.act_fn(gate) * up  # type: ignore[operator]


def _loop(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, project: Project) -> Tensor:
    """Sort the (token, choice) pairs by expert, run each expert on its tokens, put the rows back and add a token's
    k."""
    up, down = _matrices(module, "gate_up_proj"), _matrices(module, "down_proj")
    biases = {
        name: None if module._parameters.get(f"{name}_bias") is None else module._parameters[f"{name}_bias"].unbind(0)  # type: ignore[union-attr]
        for name in PROJECTIONS
    }
    top_k = top_k_index.shape[-1]
    chosen = top_k_index.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    # An index beyond the last expert is a place that expert parallelism left empty: it sorts to the end and adds zero.
    sizes = torch.bincount(chosen, minlength=len(up))[: len(up)].tolist()
    rows_of = (order // top_k)[: sum(sizes)].split(sizes)
    outputs = []
    # With no token at all the first expert runs on zero rows: its weights then belong to the graph, as in the stock
    # module.
    for e in [e for e, size in enumerate(sizes) if size] or [0]:
        x = hidden[rows_of[e]]
        gate_up = project("gate_up_proj", e, x, up[e], _at(biases["gate_up_proj"], e))
        y = project("down_proj", e, _gate(module, gate_up), down[e], _at(biases["down_proj"], e))
        outputs.append(module.post_expert_norm(y) if getattr(module, "has_post_expert_norm", False) else y)  # type: ignore[operator]
    y = torch.cat(outputs)
    y = F.pad(y, (0, 0, 0, chosen.numel() - y.shape[0]))
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    weighted = y[back] * top_k_weights.reshape(-1, 1)
    # Gathering and adding in a fixed order is deterministic; index_add_ is not on a GPU.
    out = weighted.view(*top_k_index.shape, weighted.shape[-1]).sum(-2).to(hidden.dtype)
    return out if out.shape == hidden.shape else out.view(hidden.shape)


def _at(values: tuple[Tensor, ...] | None, i: int) -> Tensor | None:
    return None if values is None else values[i]
