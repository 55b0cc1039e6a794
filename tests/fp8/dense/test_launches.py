"""The kernels that a linear layer launches on a GPU, and the absence of copies of codes.

Backends are selected as on a GPU with cuBLAS: casts in Triton, GEMMs by scaled_mm. Kernels are replaced by stand-ins
that record their names and compute nothing; operations of torch around them are logged.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import fp8
from octavo.fp8.kernels import layout, torch_backend, triton_backend
from octavo.fp8.kernels.triton_kernels import cast

_WORK = ("copy", "clone", "zero", "fill", "full", "ones", "cat", "pad", "contiguous")


class _Log(TorchDispatchMode):
    """Log operations of torch that would be launches, except autograd's sum of gradients."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in _WORK):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    pytest.importorskip("triton")
    results: list[str] = []

    def multiply(product: torch_backend.Product, dtype: torch.dtype, *more: Any) -> torch.Tensor:
        results.append("GEMM")
        return torch.empty(product.a.shape[0], product.b.shape[1], dtype=dtype)

    monkeypatch.setattr(cast, "launch", lambda kernel, *given, **options: results.append(kernel.__name__))
    monkeypatch.setattr(triton_backend, "_why_not", lambda *device: None)
    monkeypatch.setattr(triton_backend.TritonBackend, "why_not_auto", lambda self, device: None)
    monkeypatch.setattr(torch_backend, "_why_not", lambda *kind: None)
    monkeypatch.setattr(torch_backend, "multiply", multiply)
    return results


AMAX, CAST, RELAY = "amax_kernel", "cast_kernel", "relay_kernel"
EXPECTED = {  # forward; backward with one layout of w, and with both; of delayed without torch's work on histories
    "blockwise": ([CAST, "GEMM"], [CAST, RELAY, "GEMM", "GEMM"], [CAST, "GEMM", "GEMM"]),
    "delayed": ([CAST, "GEMM"], [CAST, RELAY, "GEMM", "GEMM"], [CAST, "GEMM", "GEMM"]),
    "tensorwise": ([AMAX, CAST, "GEMM"], [AMAX, CAST, RELAY, "GEMM", "GEMM"], [AMAX, CAST, "GEMM", "GEMM"]),
}


@pytest.mark.parametrize("codes", ["keep", "both"])
@pytest.mark.parametrize("recipe", EXPECTED)
def test_linear_launches_only_casts_and_gemms(seen: list[str], recipe: str, codes: str) -> None:
    model = nn.Sequential(nn.Linear(512, 384, bias=False)).bfloat16()
    fp8.apply(model, fp8.plan(model, fp8.Policy(recipe, backend="torch", weight_codes=codes)))
    forward, *backward = EXPECTED[recipe]

    def step() -> tuple[list[str], list[str]]:
        x = torch.randn(256, 512, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(256, 384, dtype=torch.bfloat16)
        halves: list[list[str]] = []
        with _Log(seen):
            y = model(x)
            halves.append(seen[:])
            seen.clear()
            y.backward(dy)
            halves.append(seen[:])
            seen.clear()
        return halves[0], halves[1]

    step()  # casts the weight, and lays its scales out
    results = [[name for name in half if recipe != "delayed" or "aten" not in name] for half in step()]
    assert results == [forward, backward[codes == "both"]]


@pytest.mark.parametrize("codes", ["keep", "both"])
def test_frozen_weight_is_transposed_per_use_or_once(seen: list[str], codes: str) -> None:
    model = nn.Sequential(nn.Linear(512, 384, bias=False)).bfloat16()
    model[0].weight = fp8.freeze_weight(model[0].weight.detach(), "block")
    fp8.apply(model, fp8.plan(model, fp8.Policy("blockwise", backend="torch", weight_codes=codes)))

    def backward() -> list[str]:
        y = model(torch.randn(256, 512, dtype=torch.bfloat16, requires_grad=True))
        seen.clear()
        with _Log(seen):
            y.backward(torch.randn_like(y))
        return seen[:]

    assert RELAY in backward()
    assert backward() == [CAST, *([RELAY] if codes == "keep" else []), "GEMM"]
    fp8.load_fp8_state_dict(model, fp8.fp8_state_dict(model))
    assert RELAY in backward(), "codes were written over those that were turned"


def test_separate_casts_launch_no_copies(seen: list[str]) -> None:
    model = nn.Sequential(nn.Linear(512, 384, bias=False)).bfloat16()
    fp8.apply(model, fp8.plan(model, fp8.Policy("rowwise", backend="torch")))
    for _ in range(2):
        seen.clear()
        with _Log(seen):
            model(torch.randn(256, 512, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert RELAY not in seen and not [name for name in seen if "copy" in name]
    assert seen.count("GEMM") == 3


@pytest.mark.parametrize(("recipe", "frozen"), [("blockwise", False), ("tensorwise", True)])
def test_both_layouts_hold_the_same_codes(recipe: str, frozen: bool) -> None:
    """In Triton's interpreter: dgrad reads weights in its layout, and all bits are as with one layout."""
    pytest.importorskip("triton")
    results = []
    for codes in ("keep", "both"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(150, 140, bias=False))
        if frozen:
            model[0].weight = fp8.freeze_weight(
                model[0].weight.detach(), "block" if recipe == "blockwise" else "tensor"
            )
        fp8.apply(model, fp8.plan(model, fp8.Policy(recipe, backend="triton", weight_codes=codes)))
        x = torch.randn(20, 150, requires_grad=True)
        y = model(x)
        y.sum().backward()
        saved = model[0]._site.codes
        (turned,) = saved._for_dgrad.values()
        assert saved.casts == (0 if frozen else 1) and layout.is_k_major(turned, 0) == (codes == "both")
        results.append((y, x.grad, model[0].weight.grad, fp8.weight_cache_bytes(model)))
    assert all(torch.equal(a, b) for a, b in zip(results[0][:3], results[1][:3], strict=True) if a is not None)
    assert results[1][3] - results[0][3] >= 150 * 140
