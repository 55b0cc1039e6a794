"""The choice of a backend: reason, rejected, and no silent fall back."""

from __future__ import annotations

import pytest
import torch

from octavo import fp8
from octavo.fp8.cast import CastSpec
from octavo.fp8.kernels import registry
from octavo.fp8.kernels.reference import ReferenceBackend
from octavo.fp8.kernels.registry import BackendError, get, names, register, select
from octavo.fp8.recipe import recipe


class Picky(ReferenceBackend):
    """Casts rows of 128 on the CPU, nothing else."""

    name = "picky"

    def supports(self, op, what, device, shape):
        if op != "quantize":
            return "it has no GEMM"
        if shape is not None and shape[-1] % 128:
            return f"it needs a last dimension that divides by 128, found {shape[-1]}"
        return None if device.type == "cpu" else f"it knows the CPU only, not {device}"


class Useless(Picky):
    name = "useless"

    def supports(self, op, what, device, shape):
        return "it can do nothing"


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    register(Picky())
    register(Useless())


def test_the_reference_is_there_and_takes_everything() -> None:
    assert names() == ("reference",) and get("reference").name == "reference"
    for op in ("fwd", "dgrad", "wgrad"):
        for name in fp8.RECIPES:
            chosen = select(op, recipe_or_spec=recipe(name), device="cuda:3", shape=(0, 1, 3420))
            assert chosen.backend.name == "reference" and chosen.rejected == () and "only one" in chosen.reason


def test_auto_takes_the_first_that_can_and_says_what_it_passed_over(backends: None) -> None:
    assert names() == ("useless", "picky", "reference")
    chosen = select("quantize", recipe_or_spec=CastSpec(), device="cpu", shape=(4, 256))
    assert chosen.backend.name == "picky" and chosen.rejected == (("useless", "it can do nothing"),)
    assert "first in order of preference" in chosen.reason
    chosen = select("quantize", recipe_or_spec=CastSpec(), device="cpu", shape=(4, 3420))
    assert chosen.backend.name == "reference"
    assert dict(chosen.rejected)["picky"] == "it needs a last dimension that divides by 128, found 3420"
    assert select("quantize", recipe_or_spec=CastSpec(), device="cpu").backend.name == "picky"


def test_a_request_by_name_is_met_or_raises(backends: None) -> None:
    chosen = select("quantize", recipe_or_spec=CastSpec(), device="cpu", shape=(4, 256), requested="picky")
    assert chosen.backend.name == "picky" and chosen.reason == "requested by name" and chosen.rejected == ()
    message = (
        r"'picky' was asked for fwd with blockwise e4m3 on cpu for shape \(1, 2, 3\) and cannot do it: it has no GEMM"
    )
    with pytest.raises(BackendError, match=message) as caught:
        select("fwd", recipe_or_spec=recipe("blockwise"), device="cpu", shape=(1, 2, 3), requested="picky")
    assert "Use backend='auto' or 'reference'." in str(caught.value)
    assert "useless: it can do nothing" in str(caught.value)


def test_public_quantize_selects_and_obeys(backends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    original = ReferenceBackend.quantize
    monkeypatch.setattr(ReferenceBackend, "quantize", lambda b, x, s: used.append(b.name) or original(b, x, s))
    fp8.quantize(torch.randn(2, 128), CastSpec())
    fp8.quantize(torch.randn(2, 100), CastSpec())
    fp8.quantize(torch.randn(2, 128), CastSpec(), backend="reference")
    assert used == ["picky", "reference", "reference"]
    with pytest.raises(BackendError, match="divides by 128, found 100"):
        fp8.quantize(torch.randn(2, 100), CastSpec(), backend="picky")
    with pytest.raises(
        BackendError, match="There is no backend 'triton'; use 'auto' or one of: useless, picky, reference"
    ):
        fp8.quantize(torch.randn(2, 128), CastSpec(), backend="triton")


def test_nothing_can_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_backends", {"useless": Useless()})
    with pytest.raises(
        BackendError, match="No backend can do quantize.*useless: it can do nothing.*Choose another recipe"
    ):
        select("quantize", recipe_or_spec=CastSpec(), device="cpu")
    with pytest.raises(BackendError, match="No other backend can either"):
        select("quantize", recipe_or_spec=CastSpec(), device="cpu", requested="useless")


def test_a_gemm_that_the_recipe_keeps_in_high_precision_is_no_fp8_gemm() -> None:
    with pytest.raises(BackendError, match="keeps wgrad in high precision"):
        select("wgrad", recipe_or_spec=recipe("rowwise", wgrad="bf16"), device="cpu")


def test_unknown_ops_and_taken_names(backends: None) -> None:
    with pytest.raises(BackendError, match="no op 'gemm'; a backend can be asked for: quantize, dequantize, fwd"):
        select("gemm", recipe_or_spec=recipe("rowwise"), device="cpu")
    for name in ("picky", "auto"):
        taken = Picky()
        taken.name = name
        with pytest.raises(BackendError, match=f"'{name}' cannot be registered: the name is taken"):
            register(taken)
