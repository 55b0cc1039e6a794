"""Whether a reference model computes as the policy does that trains in FP8.

DPO and a KL penalty hold the log-probabilities of two models against each other, and mean their weights. A reference
loaded from disk computes in high precision while the policy does not: at equal weights they differ by FP8's rounding,
so KL and rewards do not begin at 0. A copy of the policy (``copy.deepcopy`` after :func:`octavo.fp8.apply`) computes in
FP8 as the policy does, which a reader may not expect either.
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
    """How a layer's forward takes its input and its weight; None: in high precision."""

    x: CastSpec | None = None
    w: CastSpec | None = None
    delayed: bool = False

    def __str__(self) -> str:
        if self.x is None:
            return "high precision" if self.w is None else f"codes, dequantized (w[{self.w}])"
        return f"FP8 (x[{self.x}] @ w[{self.w}]{', delayed' if self.delayed else ''})"


def reference_note(policy: nn.Module, reference: nn.Module) -> str | None:
    """A sentence on the precision of a reference compared with its policy, and its effect on KL and DPO; None if both
    are in high precision. Wrappers (DDP, PEFT, torch.compile) are looked through. Nothing is computed."""
    mine, theirs = _list_operands(policy), _list_operands(reference)
    names = [*mine, *(name for name in theirs if name not in mine)]
    if not names:
        return None
    high = _Operands()
    odd = [name for name in names if mine.get(name, high) != theirs.get(name, high)]
    if odd:
        return (
            f"the reference does not compute as the policy does: {len(odd)} of {len(names)} FP8 layers differ (first "
            f"{odd[0]}: policy {mine.get(odd[0], high)}, reference {theirs.get(odd[0], high)}). Equal weights give "
            "different log-probabilities, so KL and DPO's rewards do not begin at 0. Apply one plan to both before "
            "training: fp8.apply(reference, fp8.plan(reference, ...)), or copy.deepcopy(policy) after fp8.apply"
        )
    delayed = sum(one.delayed for one in theirs.values())
    if delayed:
        return (
            f"the reference computes in FP8 as the policy does, by amax histories of its own in {delayed} layers "
            "(delayed): those of the policy go on and its do not, so equal weights give different log-probabilities "
            "after a few steps. Use tensorwise, which scales by the current amax, for both"
        )
    return (
        f"the reference computes in FP8 as the policy does ({len(names)} layers): equal weights give equal "
        "log-probabilities. A reference in high precision would have to be loaded again and left out of fp8.apply"
    )


def _list_operands(model: nn.Module) -> dict[str, _Operands]:
    """Parameter, by its name in the stock model -> how its layer computes, for all that are not in high precision."""
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
