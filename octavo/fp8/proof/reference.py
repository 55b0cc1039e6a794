"""Compare the precision of a reference model and of a policy that trains in FP8.

DPO and KL penalties compare the log-probabilities of two models. A reference loaded from disk computes in high
precision, and a policy in FP8 does not: with equal weights they differ by the rounding of FP8, so KL and rewards do not
start at 0. A copy of the policy (``copy.deepcopy`` after :func:`octavo.fp8.apply`) computes in FP8 as well.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.planning.exchange import get_sites
from octavo.fp8.weights.cache import CachesWeights
from octavo.fp8.weights.frozen import codes_cast

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}


class _Operands(NamedTuple):
    """Casts of a layer's input and weight in the forward, or None for high precision."""

    x: CastSpec | None = None
    w: CastSpec | None = None
    delayed: bool = False

    def __str__(self) -> str:
        if self.x is None:
            return "high precision" if self.w is None else f"codes, dequantized (w[{self.w}])"
        return f"FP8 (x[{self.x}] @ w[{self.w}]{', delayed' if self.delayed else ''})"


def reference_note(policy: nn.Module, reference: nn.Module) -> str | None:
    """Return a note on the precision of a reference and its effect on KL and DPO, or None if neither model uses FP8.
    Wrappers (DDP, PEFT, torch.compile) are ignored. Nothing is computed."""
    policy_operands, reference_operands = _list_operands(policy), _list_operands(reference)
    names = [*policy_operands, *(name for name in reference_operands if name not in policy_operands)]
    if not names:
        return None
    high = _Operands()
    differing = [name for name in names if policy_operands.get(name, high) != reference_operands.get(name, high)]
    if differing:
        return (
            f"the reference does not compute as the policy does: {len(differing)} of {len(names)} FP8 layers differ "
            f"(first {differing[0]}: policy {policy_operands.get(differing[0], high)}, reference "
            f"{reference_operands.get(differing[0], high)}). Equal weights give different log-probabilities, so KL and "
            "DPO's rewards do not begin at 0. Apply one plan to both before training: fp8.apply(reference, "
            "fp8.plan(reference, ...)), or copy.deepcopy(policy) after fp8.apply"
        )
    delayed = sum(operands.delayed for operands in reference_operands.values())
    if delayed:
        return (
            f"the reference computes in FP8 as the policy does, by amax histories of its own in {delayed} layers "
            "(delayed). Only the policy's histories are updated, so equal weights give different log-probabilities "
            "after a few steps. Use tensorwise, which scales by the current amax, for both"
        )
    return (
        f"the reference computes in FP8 as the policy does ({len(names)} layers): equal weights give equal "
        "log-probabilities. A reference in high precision would have to be loaded again and left out of fp8.apply"
    )


def _list_operands(model: nn.Module) -> dict[str, _Operands]:
    """Return parameter name in the stock model -> operands of its layer, without layers in high precision."""
    operands = {}
    for path, module in model.named_modules():
        sites = get_sites(module) if isinstance(module, CachesWeights) else {}
        for name, weight in module.named_parameters(recurse=False):
            codes, fwd = codes_cast(weight), None if name not in sites else sites[name].recipe.fwd
            if codes is not None or fwd is not None:
                delayed = name in sites and sites[name].recipe.delayed is not None
                parts = [part for part in f"{path}.{name}".split(".") if part not in _WRAPPERS]
                stock = ".".join(parts).removeprefix("base_model.model.")
                operands[stock] = _Operands() if fwd is None else _Operands(fwd.a, fwd.b, delayed)
                if codes is not None:
                    operands[stock] = operands[stock]._replace(w=codes)
    return operands
