"""The self-check of kernels on a GPU: correct kernels pass within seconds, and a planted fault is detected."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.kernels import registry, select
from octavo.fp8.planning import collect_kernel_checks
from octavo.fp8.self_check import reference_checks

FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not FP8, reason="needs a GPU with FP8")]


@pytest.mark.parametrize("name", fp8.RECIPES)
def test_selected_kernels_pass(name: str) -> None:
    device = torch.device("cuda")
    checks = collect_kernel_checks([fp8.plan(nn.ModuleList([nn.Linear(512, 512, device=device)]), name)], device)
    recipe = fp8.recipe(name)
    for gemm in ("fwd", "dgrad", "wgrad"):
        if recipe.delayed is None:
            chosen = select(f"grouped_{gemm}", recipe_or_spec=recipe, device=device).backend.name
            checks |= reference_checks.kernel_checks(recipe, gemm, chosen, device, grouped=True)
    for op in ("rmsnorm", "swiglu", "swiglu_backward"):
        chosen = select(op, recipe_or_spec=recipe, device=device).backend.name
        checks |= reference_checks.fused_checks(recipe, op, chosen, device)
    checks |= reference_checks.adamw_checks(
        select("adamw", recipe_or_spec=fp8.CastSpec(), device=device).backend.name, device
    )
    with torch.no_grad():
        faults = {what: fault for what, check in checks.items() if (fault := check()) is not None}
    assert not faults


def test_planted_fault_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    device, recipe = torch.device("cuda"), fp8.recipe("rowwise")
    chosen = select("dgrad", recipe_or_spec=recipe, device=device).backend
    original = chosen.gemm_dgrad

    def errs(*given: torch.Tensor) -> torch.Tensor:
        out = original(*given)
        out[5, 7] += 1e4
        return out

    monkeypatch.setattr(registry.get(chosen.name), "gemm_dgrad", errs)
    (check,) = reference_checks.kernel_checks(recipe, "dgrad", chosen.name, device).values()
    with torch.no_grad():
        fault = check()
    assert fault is not None and fault.at == (5, 7)
