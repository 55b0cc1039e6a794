"""Selection of backends: reasons, rejected backends, and no silent fallback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from octavo import fp8
from octavo.fp8.arithmetic.cast import CastError, CastSpec
from octavo.fp8.arithmetic.recipe import Gemm, Recipe, recipe
from octavo.fp8.kernels import deepgemm_backend, registry, torch_backend, triton_backend
from octavo.fp8.kernels.reference import ReferenceBackend
from octavo.fp8.kernels.registry import BackendError, get, names, register, select


class Picky(ReferenceBackend):
    """Casts rows of 128 on the CPU, and nothing else."""

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


def test_order_of_preference() -> None:
    assert names() == ("deepgemm", "torch", "triton", "reference")
    assert all(get(name).name == name for name in names())


def test_cpu_selects_reference_with_reasons() -> None:
    for op in ("fwd", "dgrad", "wgrad"):
        for name in fp8.RECIPES:
            chosen = select(op, recipe_or_spec=recipe(name), device="cpu", shape=(None, 1, 3420))
            assert chosen.backend.name == "reference" and "first in order of preference" in chosen.reason
            assert [name for name, _ in chosen.rejected] == ["deepgemm", "torch", "triton"]
    reasons = dict(select("fwd", recipe_or_spec=recipe("rowwise"), device="cpu").rejected)
    assert reasons == {
        "deepgemm": "deep_gemm is not installed",
        "torch": "on the CPU it is slower than the reference; request it by name",
        "triton": "Triton's interpreter is for tests; request it by name",
    }


def test_absent_gpu_is_planned_with_triton() -> None:
    """Every GPU supports Triton; support of the other backends depends on the GPU."""
    if torch.cuda.is_available():
        pytest.skip("asks about a GPU that is not there")
    for name in fp8.RECIPES:
        chosen = select("dgrad", recipe_or_spec=recipe(name), device="cuda:3", shape=(None, 1, 3420))
        assert chosen.backend.name == "triton" and [name for name, _ in chosen.rejected] == ["deepgemm", "torch"]
        assert "this process sees no GPU" in dict(chosen.rejected)["torch"]


def test_hopper_selects_best_backend_per_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with fresh():
        for name, backend in {
            "tensorwise": "torch",
            "rowwise": "torch",
            "blockwise": "torch",
            "mxfp8": "triton",
        }.items():
            chosen = {op: select(op, recipe_or_spec=recipe(name), device="cuda") for op in ("fwd", "dgrad", "wgrad")}
            assert {selection.backend.name for selection in chosen.values()} == {backend}
        assert select("quantize", recipe_or_spec=CastSpec(), device="cuda", shape=(4, 4)).backend.name == "triton"
        assert select("grouped_fwd", recipe_or_spec=recipe("blockwise"), device="cuda").backend.name == "triton"


def test_ada_selects_triton_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with fresh():
        chosen = select("wgrad", recipe_or_spec=recipe("blockwise"), device="cuda")
        assert (
            chosen.backend.name == "triton"
            and "only on compute capability 9.0, this GPU has 8.9" in dict(chosen.rejected)["torch"]
        )
        assert select("wgrad", recipe_or_spec=recipe("rowwise"), device="cuda").backend.name == "torch"


@contextmanager
def fresh() -> Iterator[None]:
    """Clear cached properties of this machine before and after."""
    known = (deepgemm_backend._why_not, torch_backend._why_not, triton_backend._why_not)
    for remembered in known:
        remembered.cache_clear()
    try:
        yield
    finally:
        for remembered in known:
            remembered.cache_clear()


def test_auto_selects_first_supported_and_lists_rejected(backends: None) -> None:
    assert names() == ("useless", "picky", "deepgemm", "torch", "triton", "reference")
    chosen = select("quantize", recipe_or_spec=CastSpec(), device="cpu", shape=(4, 256))
    assert chosen.backend.name == "picky" and chosen.rejected == (("useless", "it can do nothing"),)
    assert "first in order of preference" in chosen.reason
    chosen = select("quantize", recipe_or_spec=CastSpec(), device="cpu", shape=(4, 3420))
    assert chosen.backend.name == "reference"
    assert dict(chosen.rejected)["picky"] == "it needs a last dimension that divides by 128, found 3420"
    assert select("quantize", recipe_or_spec=CastSpec(), device="cpu").backend.name == "picky"


def test_requested_backend_is_used_or_raises(backends: None) -> None:
    chosen = select("quantize", recipe_or_spec=CastSpec(), device="cpu", shape=(4, 256), requested="picky")
    assert chosen.backend.name == "picky" and chosen.reason == "requested by name" and chosen.rejected == ()
    message = (
        r"'picky' was requested for fwd with blockwise e4m3 on cpu for shape \(\?, 2, 3\), but does not support it: "
        "it has no GEMM"
    )
    with pytest.raises(BackendError, match=message) as caught:
        select("fwd", recipe_or_spec=recipe("blockwise"), device="cpu", shape=(None, 2, 3), requested="picky")
    assert "Use backend='auto' or " in str(caught.value) and "'reference'." in str(caught.value)
    assert "useless: it can do nothing" in str(caught.value)


def test_public_quantize_selects_backend(backends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    original = ReferenceBackend.quantize
    monkeypatch.setattr(ReferenceBackend, "quantize", lambda b, *args: used.append(b.name) or original(b, *args))
    fp8.quantize(torch.randn(2, 128), CastSpec())
    fp8.quantize(torch.randn(2, 100), CastSpec())
    fp8.quantize(torch.randn(2, 128), CastSpec(), backend="reference")
    assert used == ["picky", "reference", "reference"]
    with pytest.raises(BackendError, match="divides by 128, found 100"):
        fp8.quantize(torch.randn(2, 100), CastSpec(), backend="picky")
    with pytest.raises(
        BackendError, match="There is no backend 'cutlass'. Use 'auto' or one of: useless, picky, deepgemm, torch,"
    ):
        fp8.quantize(torch.randn(2, 128), CastSpec(), backend="cutlass")


def test_backend_without_casts_rejects_quantize() -> None:
    for name in ("torch", "deepgemm"):
        with pytest.raises(BackendError, match="it has no casts; another backend casts for it"):
            fp8.quantize(torch.randn(2, 128), CastSpec(), backend=name)


def test_requested_triton_is_used_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter it supports the CPU; otherwise the error lists its devices."""
    for value, why_not in (("1", None), ("0", "on the CPU only in Triton's interpreter, TRITON_INTERPRET=1")):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        with fresh():
            if why_not is None:
                requested = select("quantize", recipe_or_spec=CastSpec(), device="cpu", requested="triton")
                assert requested.backend.name == "triton" and requested.reason == "requested by name"
            else:
                with pytest.raises(BackendError, match=why_not):
                    fp8.quantize(torch.randn(2, 128), CastSpec(), backend="triton")


def test_triton_reports_unsupported_blocks() -> None:
    triton, cpu = get("triton"), torch.device("cpu")
    for block in ((3, 5), (1, 100), (-1, 128), (256, 256)):
        with pytest.raises(BackendError, match="it has no kernel for blocks of e4m3"):
            fp8.quantize(torch.randn(2, 128), CastSpec("e4m3", block), backend="triton")
    for block in ((1, -1), (-1, -1), (1, 64), (16, 16), (128, 1)):
        assert triton.supports("quantize", CastSpec("e4m3", block), cpu, None) is None
    line, square = CastSpec("e4m3", (1, 128)), CastSpec("e4m3", (128, 128))
    for created in map(recipe, fp8.RECIPES):
        assert all(triton.supports(op, created, cpu, None) is None for op in ("fwd", "grouped_dgrad", "wgrad"))
    unusual = Recipe("own", "e4m3", Gemm(line, square), Gemm(line, line), Gemm(line, CastSpec("e4m3", (16, 1))))
    assert triton.supports("fwd", unusual, cpu, None) is None
    assert triton.supports("dgrad", unusual, cpu, None) == (
        "its GEMMs support blocks with 32, 128 or all elements along the contraction and 1, 128 or all elements across "
        "it, not e4m3 1x128 pow2 contracted along dimension 0"
    )
    assert "e4m3 1x128 pow2 contracted along dimension 0" in triton.supports("grouped_wgrad", unusual, cpu, None)


def test_triton_support_matches_kernels() -> None:
    cast_plans, tiles = (
        pytest.importorskip(f"octavo.fp8.kernels.triton_kernels.{name}") for name in ("cast_plans", "tiles")
    )
    assert triton_backend.CAST_SIDES == cast_plans.SIDES
    for across in (-1, 1, 16, 32, 64, 128):
        for along in (-1, 1, 16, 32, 64, 128):
            spec = CastSpec("e4m3", (across, along))
            why_not = triton_backend._why_not_operand(spec, 1)
            if why_not is not None and "its GEMMs" in why_not:
                with pytest.raises(CastError):
                    tiles.scale_block(spec, 1)
            else:
                tiles.scale_block(spec, 1)


def test_reference_casts_once_for_both_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.fp8.kernels import reference

    real, requested = reference.cast._quantize, []
    monkeypatch.setattr(
        reference.cast, "_quantize", lambda x, shape, spec: requested.append(spec) or real(x, shape, spec)
    )
    backend, full, line = get("reference"), CastSpec(block=(-1, -1), scale="fp32"), CastSpec(block=(1, 128))
    first, second = backend.quantize_both(torch.ones(4, 8), full, full)
    assert first is second and requested == [full]
    backend.quantize_both(torch.ones(4, 8), line, full)
    assert requested == [full, line, full]


def test_no_supporting_backend_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_backends", {"useless": Useless()})
    with pytest.raises(
        BackendError, match="No backend supports quantize.*useless: it can do nothing.*Choose another recipe"
    ):
        select("quantize", recipe_or_spec=CastSpec(), device="cpu")
    with pytest.raises(BackendError, match="No other backend supports it"):
        select("quantize", recipe_or_spec=CastSpec(), device="cpu", requested="useless")


def test_high_precision_gemm_is_rejected() -> None:
    with pytest.raises(BackendError, match="keeps wgrad in high precision"):
        select("wgrad", recipe_or_spec=recipe("rowwise", wgrad="bf16"), device="cpu")


def test_experts_can_be_planned_for_a_gpu_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated and one by one, as its linear layers are emulated; the reason is there to be shown."""
    from octavo.fp8.dense.gemms import select_layer_backends
    from octavo.fp8.moe.grouped import why_not_grouped

    for module in (deepgemm_backend, torch_backend, triton_backend):
        monkeypatch.setattr(module, "_why_not", lambda *device: "this GPU has 8.0")
    chosen, device = recipe("blockwise"), torch.device("cuda")
    results = select_layer_backends(chosen, device, (None, 64, 32), "auto", "experts")
    assert {s.backend.name for s in results.values()} == {"reference"}
    assert why_not_grouped(chosen, results, device).startswith("reference: it reads the sizes of the experts")


def test_unknown_ops_and_duplicate_names_are_rejected(backends: None) -> None:
    with pytest.raises(BackendError, match="no op 'gemm'; use one of: quantize, dequantize, fwd"):
        select("gemm", recipe_or_spec=recipe("rowwise"), device="cpu")
    for name in ("picky", "auto"):
        taken = Picky()
        taken.name = name
        with pytest.raises(BackendError, match=f"'{name}' cannot be registered: the name is taken"):
            register(taken)


def test_cast_backend_is_cached_until_registry_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_kernels, x = get("torch"), torch.randn(3, 256)
    assert torch_kernels._cast_backend(CastSpec(), x).name == "reference"
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    register(Picky())
    assert torch_kernels._cast_backend(CastSpec(), x).name == "picky"
    assert torch_kernels._cast_backend(CastSpec(), x[:, :100]).name == "reference"  # which casts no 100 columns
