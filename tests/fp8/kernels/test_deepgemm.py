"""The DeepGEMM backend with a stand-in for the library that checks its arguments and computes in fp32.

The stand-in asserts the conditions of csrc/apis/gemm.hpp and layout.hpp of DeepGEMM for compute capability 9.0, and
multiplies on the CPU. The library itself is tested in tests/gpu if it is installed.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.kernels import deepgemm_backend, registry
from octavo.fp8.kernels.groups import TILE, Routing, group_rows
from octavo.fp8.kernels.layout import CONTRACTED
from octavo.fp8.metrics import calc_diff

BACKEND, REFERENCE = registry.get("deepgemm"), registry.get("reference")
CUDA = torch.device("cuda")


def major(codes: Tensor) -> None:
    """K-major E4M3, rows 16 bytes apart or a multiple of them."""
    assert codes.dtype is torch.float8_e4m3fn
    assert codes.stride(-1) == 1 and codes.stride(-2) % 16 == 0 and codes.data_ptr() % 16 == 0


def line_scales(scale: Tensor, rows: int, k: int) -> Tensor:
    """MN-major, TMA aligned: what the library uses without a copy."""
    assert scale.dtype is torch.float32 and scale.shape == (rows, -(-k // 128))
    assert scale.stride() == (1, -(-rows // 4) * 4)
    return scale.repeat_interleave(128, 1)[:, :k]


def square_scales(scale: Tensor, n: int, k: int) -> Tensor:
    assert scale.dtype is torch.float32 and scale.shape == (-(-n // 128), -(-k // 128)) and scale.is_contiguous()
    return scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def fp8_gemm_nt(a, b, d, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):  # type: ignore[no-untyped-def]
    (m, k), (n, k_) = a[0].shape, b[0].shape
    major(a[0]), major(b[0])
    assert k == k_ and d.shape == (m, n) and d.stride() == (n, 1)
    calls.append((recipe, compiled_dims))
    if recipe == (1, 128, 128):
        assert d.dtype is torch.bfloat16 and c is None
        out = (a[0].float() * line_scales(a[1], m, k)) @ (b[0].float() * square_scales(b[1], n, k)).t()
        d.copy_(out)
    else:
        assert recipe == (1, 1, 128) and d.dtype is torch.float32
        assert c is not None and c.data_ptr() == d.data_ptr() and c.stride() == d.stride()
        d += (a[0].float() * line_scales(a[1], m, k)) @ (b[0].float() * line_scales(b[1], n, k)).t()


def m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):  # type: ignore[no-untyped-def]
    (m, k), (_, n, k_) = a[0].shape, b[0].shape
    major(a[0]), major(b[0])
    assert b[0].is_contiguous() and k == k_ and d.shape == (m, n) and d.dtype is torch.bfloat16
    assert m_indices.shape == (m,) and m_indices.dtype is torch.int32 and m_indices.is_contiguous()
    assert recipe == (1, 128, 128) and b[1].is_contiguous()
    calls.append(recipe)
    rows = a[0].float() * line_scales(a[1], m, k)
    for tile in range(0, m, TILE):
        experts = m_indices[tile : tile + TILE].unique().tolist()
        assert len(experts) == 1
        if experts[0] >= 0:
            weight = b[0][experts[0]].float() * square_scales(b[1][experts[0]], n, k)
            d[tile : tile + TILE] = rows[tile : tile + TILE] @ weight.t()


calls: list[object] = []


def stand_in(**more: object) -> types.ModuleType:
    module = types.ModuleType("deep_gemm")
    module.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None)
    module.__dict__.update(more)
    return module


WHOLE = {
    "fp8_gemm_nt": fp8_gemm_nt,
    "m_grouped_fp8_gemm_nt_contiguous": m_grouped_fp8_gemm_nt_contiguous,
    "get_mk_alignment_for_contiguous_layout": lambda: 128,
}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What the backend remembers of the machine, before and after."""
    deepgemm_backend._why_not.cache_clear()
    yield
    deepgemm_backend._why_not.cache_clear()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    monkeypatch.setitem(sys.modules, "deep_gemm", stand_in(**WHOLE))
    calls.clear()
    yield calls


def operands(op: str, m: int, n: int, k: int, name: str = "blockwise") -> tuple[Quantized, Quantized]:
    generator = torch.Generator().manual_seed(m + n + k)

    def spread(rows: int, cols: int) -> Tensor:
        steps = [torch.randint(-6, 7, (size,), generator=generator).float() for size in (rows, cols)]
        return torch.randn(rows, cols, generator=generator) * torch.exp2(steps[0])[:, None] * torch.exp2(steps[1])

    sides = {"fwd": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[op]
    gemm = recipe(name).gemm(op)
    return cast.quantize(spread(*sides[0]), gemm.a), cast.quantize(spread(*sides[1]), gemm.b)


@pytest.mark.parametrize("m, n, k", ((1, 12, 20), (33, 171, 150), (130, 256, 384), (17, 300, 640)))
@pytest.mark.parametrize("op, name", [*((op, "blockwise") for op in CONTRACTED), ("wgrad", "blockwise_1d")])
def test_gemms_equal_the_reference(library: list[object], op: str, name: str, m: int, n: int, k: int) -> None:
    a_q, b_q = operands(op, m, n, k, name)
    right = getattr(REFERENCE, f"gemm_{op}")(a_q, b_q, torch.float32)
    for dtype, bound in ((torch.float32, 1e-10), (torch.bfloat16, 3e-6)):
        y = getattr(BACKEND, f"gemm_{op}")(a_q, b_q, dtype)
        assert y.shape == right.shape and y.dtype is dtype and y.is_contiguous()
        assert calc_diff(y, right) < bound
    # The number of tokens is compiled into no kernel.
    fixed = "mn" if op == "wgrad" else "nk"
    assert library == [((1, 1, 128), fixed), ((1, 128, 128), fixed)][: 1 + (name == "blockwise")]


def test_wgrad_of_vectors_in_16_bits_uses_other_backend(library: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    dy_q, x_q = operands("wgrad", 33, 48, 64, "blockwise_1d")
    requested: list[str] = []
    for name in ("torch", "triton"):
        monkeypatch.setattr(
            registry.get(name), "gemm_wgrad", lambda *_, name=name: requested.append(name) or torch.zeros(48, 64)
        )
    for why_not in ("not on this GPU", None):
        monkeypatch.setattr(registry.get("torch"), "supports", lambda *_, why_not=why_not: why_not)
        BACKEND.gemm_wgrad(dy_q, x_q, torch.bfloat16)
    assert requested == ["triton", "torch"] and not library
    BACKEND.gemm_wgrad(dy_q, x_q, torch.float32)
    assert len(requested) == 2 and library == [((1, 1, 128), "mn")]


def test_a_bias_is_added_in_fp32(library: list[object]) -> None:
    x_q, w_q = operands("fwd", 33, 171, 150)
    bias = torch.randn(171) * 100
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(
            BACKEND.gemm_fwd(x_q, w_q, dtype, bias),
            (BACKEND.gemm_fwd(x_q, w_q, torch.float32) + bias).to(dtype),
        )


def test_empty_matrices_launch_nothing(library: list[object]) -> None:
    for m, n, k in ((0, 8, 16), (8, 0, 16), (8, 16, 0)):
        for op, shape in (("fwd", (m, n)), ("dgrad", (m, k)), ("wgrad", (n, k))):
            y = getattr(BACKEND, f"gemm_{op}")(*operands(op, m, n, k), torch.bfloat16)
            assert y.shape == shape and not y.any()
    assert not library


def rows_of(routing: Routing, x: Tensor) -> Tensor:
    """Rows [R, K] of tokens x [pairs, K], zero in padding."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])])[routing.pair_of]


@pytest.mark.parametrize("op", ("fwd", "dgrad"))
def test_groups_equal_the_loop_over_experts(library: list[object], op: str) -> None:
    generator = torch.Generator().manual_seed(1)
    n, k = (200, 144) if op == "fwd" else (144, 200)
    w = torch.randn(4, n, k, generator=generator)
    chosen = torch.cat([torch.zeros(130), torch.full((5,), 3), torch.tensor([7.0, 1.0])]).long()  # expert 2 has none
    routing = group_rows(chosen, 4)
    x = rows_of(routing, torch.randn(len(chosen), k if op == "fwd" else n, generator=generator))
    casts = recipe("blockwise").gemm(op)
    x_q = cast.quantize(x, casts.a)
    each = [cast.quantize(w[e], casts.b) for e in range(4)]
    data = torch.stack([q.data.view(torch.uint8) for q in each]).view(torch.float8_e4m3fn)
    w_q = Quantized(data, torch.stack([q.scale for q in each]), casts.b)
    y = getattr(BACKEND, f"grouped_{op}")(x_q, w_q, routing.groups, torch.bfloat16)
    assert y.shape == (routing.groups.rows, n if op == "fwd" else k) and y.is_contiguous() and len(library) == 1
    starts, sizes = routing.groups.starts.tolist(), routing.groups.sizes.tolist()
    expected = torch.zeros(y.shape, dtype=torch.bfloat16)
    for e in range(4):
        rows = slice(starts[e], starts[e] + sizes[e])
        if sizes[e]:
            part = Quantized(x_q.data[rows], x_q.scale[rows], x_q.spec)
            expected[rows] = getattr(REFERENCE, f"gemm_{op}")(part, each[e], torch.bfloat16)
    assert calc_diff(y, expected) < 1e-6 and not y[expected.abs().sum(1) == 0].any()


def test_grouped_gemms_that_round_twice_use_triton(library: list[object]) -> None:
    """A run with fp32 experts, or with biases, must not end in the middle of its first step."""
    pytest.importorskip("triton")
    routing, generator = group_rows(torch.tensor([0, 1, 1]), 2), torch.Generator().manual_seed(1)
    groups, casts = routing.groups, recipe("blockwise").fwd
    x = rows_of(routing, torch.randn(3, 128, generator=generator))
    x_q = REFERENCE.quantize_rows(x, casts.a, groups)
    w_q = REFERENCE.quantize_experts(torch.randn(2, 128, 128, generator=generator), casts.b)
    bias = torch.randn(2, 128, generator=generator)
    real = routing.pair_of < 3
    for requested in ((torch.float32, None), (torch.bfloat16, bias), (torch.float32, bias)):
        results, want = (b.grouped_fwd(x_q, w_q, groups, *requested)[real] for b in (BACKEND, REFERENCE))
        assert results.dtype is requested[0] and calc_diff(results, want) < (
            1e-10 if requested[0] is torch.float32 else 1e-5
        )
    results, want = (b.grouped_dgrad(x_q, w_q, groups, torch.float32)[real] for b in (BACKEND, REFERENCE))
    assert calc_diff(results, want) < 1e-10 and not library
    with pytest.raises(CastError, match="grouped_fwd: operands of"):
        BACKEND.grouped_fwd(x_q._replace(data=x_q.data[:64]), w_q, groups, torch.bfloat16)


def test_unsupported_casts_are_rejected(library: list[object]) -> None:
    x_q, w_q = operands("fwd", 8, 16, 32)
    other = cast.quantize(torch.randn(8, 32), CastSpec("e5m2", (1, 128)))
    with pytest.raises(CastError, match="supports E4M3 with pow2 scales.*e5m2 1x128 pow2"):
        BACKEND.gemm_fwd(other, w_q, torch.bfloat16)
    with pytest.raises(CastError, match="do not match"):
        BACKEND.gemm_dgrad(x_q, w_q, torch.bfloat16)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a Hopper, as far as the questions go."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def test_supported_gemms(library: list[object], hopper: None) -> None:
    created = recipe("blockwise")
    for op in ("fwd", "dgrad", "wgrad", "grouped_fwd", "grouped_dgrad"):
        assert BACKEND.supports(op, created, CUDA, (None, 3420, 1280)) is None
    why_not = {op: BACKEND.supports(op, created, CUDA, None) for op in ("grouped_wgrad", "rmsnorm", "quantize")}
    assert "every step would wait" in why_not["grouped_wgrad"] and why_not["rmsnorm"] == "it has no rmsnorm"
    assert "it has no casts" in why_not["quantize"]
    for other in ("rowwise", "tensorwise", "mxfp8"):
        assert "it supports E4M3 with pow2 scales" in BACKEND.supports("fwd", recipe(other), CUDA, None)
    assert "e5m2" in BACKEND.supports("dgrad", recipe("blockwise", "hybrid"), CUDA, None)
    assert "high precision" in BACKEND.supports("wgrad", recipe("blockwise", wgrad="bf16"), CUDA, None)


def test_unsupported_devices_give_reason(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    created = recipe("blockwise")
    monkeypatch.setitem(sys.modules, "deep_gemm", stand_in())
    assert BACKEND.supports("fwd", created, CUDA, None) == (
        "the installed deep_gemm has no fp8_gemm_nt: it is not github.com/deepseek-ai/DeepGEMM 2.0 or later "
        "(PyPI's deep-gemm is not)"
    )
    deepgemm_backend._why_not.cache_clear()
    monkeypatch.setitem(
        sys.modules, "deep_gemm", stand_in(**(WHOLE | {"get_mk_alignment_for_contiguous_layout": lambda: 240}))
    )
    assert "multiples of 240 rows, not 128" in BACKEND.supports("fwd", created, CUDA, None)

    deepgemm_backend._why_not.cache_clear()

    def broken() -> None:
        raise OSError("libnvrtc.so: cannot open\nmore")

    monkeypatch.setattr(deepgemm_backend, "_import_deep_gemm", broken)
    assert BACKEND.supports("fwd", created, CUDA, None) == (
        "importing deep_gemm failed: OSError: libnvrtc.so: cannot open"
    )
    assert "not on cpu" in BACKEND.supports("fwd", created, torch.device("cpu"), None)
    assert deepgemm_backend.why_not_on_gpu((10, 3)) is None
    assert "but this GPU has 12.0" in deepgemm_backend.why_not_on_gpu((12, 0))


def test_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepgemm_backend.importlib.util, "find_spec", lambda name: None)
    for device in ("cpu", "cuda"):
        assert BACKEND.supports("fwd", recipe("blockwise"), torch.device(device), None) == "deep_gemm is not installed"


def test_preferred_if_supported(library: list[object], hopper: None) -> None:
    chosen = registry.select("fwd", recipe_or_spec=recipe("blockwise"), device="cuda")
    assert chosen.backend is BACKEND
    assert registry.names()[0] == "deepgemm"
