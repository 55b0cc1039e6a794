"""The Gluon backend without a Hopper: who may use it, what it would launch, and the check that comes before. What its
kernel compiles to is in test_aot.py; that its results are right, tests/gpu shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import Recipe, recipe
from octavo.fp8.kernels import triton_backend
from octavo.fp8.kernels.layout import CONTRACTED
from octavo.fp8.kernels.registry import BackendError, get, select
from octavo.fp8.kernels.triton_kernels import gluon_check, gluon_gemm
from tests.fp8.kernels import gluon_threads, recorded
from tests.fp8.kernels.forms.gemm import operands
from tests.fp8.kernels.forms.grouped import GROUPS, grouped_operands

CUDA = torch.device("cuda:0")
OPS = (*CONTRACTED, *(f"grouped_{op}" for op in CONTRACTED))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A GPU of compute capability 9.0 by its answers, without what is remembered of this machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    triton_backend._why_not_gluon.cache_clear()
    gluon_check.wrong.cache_clear()
    yield monkeypatch
    triton_backend._why_not_gluon.cache_clear()
    gluon_check.wrong.cache_clear()


def why_not(op: str, what: Recipe | CastSpec, device: torch.device = CUDA, n: int = 128) -> str | None:
    return get("gluon").supports(op, what, device, (None, n, 256))


def test_where_it_cannot_run_it_says_why(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(gluon_check, "deviation", lambda *_: 0.5)
    block = recipe("blockwise")
    assert why_not("fwd", block) is None and why_not("grouped_wgrad", block) is None
    assert "not on cpu" in str(why_not("fwd", block, torch.device("cpu")))
    assert "it cannot multiply" in str(why_not("fwd", recipe("mxfp8")))
    assert "64 outputs of an expert at a time, these have 100" in str(why_not("grouped_wgrad", block, n=100))
    assert "no casts of its own" in str(why_not("quantize", CastSpec()))
    assert "has no swiglu" in str(why_not("swiglu", block))
    triton_backend._why_not_gluon.cache_clear()
    hopper.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert why_not("fwd", block) == "it serves compute capability 9.0 alone, this GPU has 10.0"
    triton_backend._why_not_gluon.cache_clear()
    hopper.setattr(triton_backend, "_version", lambda: "3.5.1")
    assert why_not("fwd", block) == "it is written in Gluon as Triton 3.6 has it, this is 3.5.1"


def test_automatic_choice_leaves_it_to_measurements_and_names(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(gluon_check, "deviation", lambda *_: pytest.fail("checked although nobody asked for it"))
    for op in ("fwd", "grouped_fwd"):
        assert select(op, recipe_or_spec=recipe("blockwise"), device=CUDA).backend.name != "gluon"
    assert get("gluon").auto_unsupported(CUDA) is None, "it takes part where candidates are measured"
    hopper.setattr(gluon_check, "deviation", lambda *_: 1.0)
    chosen = select("fwd", recipe_or_spec=recipe("blockwise"), device=CUDA, requested="gluon")
    assert chosen.backend.name == "gluon"


# "hybrid" is of gradients alone. Experts are found in a way of their own, and scales as without experts.
TITLES = {
    "fwd": ("blockwise", "tensorwise"),
    "dgrad": ("blockwise hybrid", "rowwise"),
    "wgrad": ("blockwise", "rowwise"),
    "grouped_fwd": ("blockwise", "rowwise"),
    "grouped_dgrad": ("blockwise hybrid", "tensorwise"),
    "grouped_wgrad": ("blockwise hybrid", "rowwise"),
}


@pytest.mark.parametrize("op", OPS)
def test_the_kernel_run_by_threads_passes_its_own_check(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    monkeypatch.setattr(gluon_gemm, "launch", gluon_threads.launch)
    for title in TITLES[op]:
        casts = recipe(*title.split()).gemm(op.removeprefix("grouped_"))
        assert casts is not None
        # Half a unit is what rounding to bf16 may do.
        assert gluon_check.deviation(op, casts.a, casts.b, torch.device("cpu")) < 0.55, title


def by_reference(a_q: Quantized, a_dim: int, b_q: Quantized, b_dim: int, dtype: torch.dtype, *more: Any) -> Tensor:
    op = next(op for op, dims in CONTRACTED.items() if dims == (a_dim, b_dim))
    bias = {"bias": more[0]} if op == "fwd" else {}
    found: Tensor = getattr(get("reference"), f"gemm_{op}")(a_q, b_q, dtype, **bias)
    return found


def rows_by_reference(
    a_q: Quantized, w_q: Quantized, dim: int, groups: Any, dtype: torch.dtype, bias: Tensor | None, *_: Any
) -> Tensor:
    op = "grouped_fwd" if dim else "grouped_dgrad"
    found: Tensor = getattr(get("reference"), op)(a_q, w_q, groups, torch.float32)
    if bias is not None:  # to every row of a tile that has an expert, as the kernel
        owners = groups.tiles.repeat_interleave(128)
        found += bias[owners.clamp(min=0)] * (owners >= 0).unsqueeze(1)
    return found.to(dtype)


def wgrad_by_reference(dy_q: Quantized, x_q: Quantized, groups: Any, dtype: torch.dtype, *_: Any) -> Tensor:
    return get("reference").grouped_wgrad(dy_q, x_q, groups, dtype)


@pytest.mark.parametrize("op", OPS)
def test_the_check_passes_what_is_right_and_sees_what_is_not(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """On the CPU, with the reference in the kernel's place, as it is and with one fault."""
    monkeypatch.setattr(gluon_gemm, "gemm", by_reference)
    monkeypatch.setattr(gluon_gemm, "grouped_rows", rows_by_reference)
    monkeypatch.setattr(gluon_gemm, "grouped_wgrad", wgrad_by_reference)
    name = {"grouped_wgrad": "grouped_wgrad"}.get(op, "grouped_rows" if "grouped" in op else "gemm")
    right = getattr(gluon_gemm, name)

    def scales_of_the_block_before(a_q: Quantized, *more: Any) -> Tensor:
        return right(a_q._replace(scale=a_q.scale.roll(1, 1 - CONTRACTED[op.removeprefix("grouped_")][0])), *more)

    def a_tile_is_missing(*args: Any) -> Tensor:
        out = right(*args).clone()
        out[..., :64, -72:] = 0
        return out

    def never_written(*args: Any) -> Tensor:
        out = right(*args).clone()
        out[..., -1, -1] = float("nan")
        return out

    for title in TITLES[op]:
        casts = recipe(*title.split()).gemm(op.removeprefix("grouped_"))
        assert casts is not None
        monkeypatch.setattr(gluon_gemm, name, right)
        assert gluon_check.deviation(op, casts.a, casts.b, torch.device("cpu")) < 1
        faults = [a_tile_is_missing, never_written]
        if title != "tensorwise":
            faults.append(scales_of_the_block_before)
        for fault in faults:
            monkeypatch.setattr(gluon_gemm, name, fault)
            found = gluon_check.deviation(op, casts.a, casts.b, torch.device("cpu"))
            assert found > 1, f"{title}: {fault.__name__}"


def test_a_check_that_fails_is_made_once_and_named(hopper: pytest.MonkeyPatch) -> None:
    tries = []
    hopper.setattr(gluon_check, "deviation", lambda *_: tries.append(1) or 7.25)
    for _ in range(2):
        with pytest.raises(BackendError, match=r"'gluon' was asked for dgrad .* tried here and is off by 7\.25 times"):
            select("dgrad", recipe_or_spec=recipe("blockwise"), device=CUDA, requested="gluon")
    assert len(tries) == 1
    gluon_check.wrong.cache_clear()

    def fails(*_: object) -> float:
        raise RuntimeError("PTXAS error\nout of registers")

    hopper.setattr(gluon_check, "deviation", fails)
    assert "does not run here: RuntimeError: out of registers" in str(why_not("fwd", recipe("tensorwise")))


def test_what_it_launches() -> None:
    """One program a multiprocessor at most, descriptors of what is real, stages within the memory of a program."""
    with recorded.launches(gluon_gemm) as seen:
        a, b = operands("blockwise", "fwd", 300, 200, 456)
        out = gluon_gemm.gemm(a, 1, b, 1, torch.bfloat16, programs=4)
        assert out.shape == (300, 200) and out.is_contiguous()
        gluon_gemm.gemm(*_with_dims(operands("tensorwise", "fwd", 16384, 4096, 4096), 1, 1), torch.bfloat16)
        gluon_gemm.grouped_wgrad(*grouped_operands("blockwise", "wgrad", 768, 2048), GROUPS, torch.float32, 132)
        none = gluon_gemm.gemm(*_with_dims(operands("blockwise", "fwd", 300, 200, 0), 1, 1), torch.bfloat16)
    assert none.shape == (300, 200) and len(seen) == 3
    (_, (x, w, y, *rest), options), (_, _, wide), (_, (*_,), experts) = seen
    assert (x.shape, w.shape, y.shape) == ([300, 456], [200, 456], [300, 200]) and y.strides[0] == 208
    assert (x.block_shape, w.block_shape, y.block_shape) == ([64, 128], [128, 128], [64, 128])
    assert rest[6:11] == [300, 200, 456, 0, 6] and options["STAGES"] == 6
    assert (wide["BN"], wide["STAGES"]) == (256, 3) and experts["STAGES"] == 5
    for launched in (options, wide, experts):
        assert launched["num_warps"] == 4 and launched["maxnreg"] == 168


def _with_dims(pair: tuple[Quantized, Quantized], a_dim: int, b_dim: int) -> tuple[Quantized, int, Quantized, int]:
    return pair[0], a_dim, pair[1], b_dim


def test_experts_of_odd_widths_are_refused() -> None:
    a, b = grouped_operands("blockwise", "wgrad", 80, 256)
    with pytest.raises(CastError, match="experts of 80 outputs.*Use the triton backend"):
        gluon_gemm.grouped_wgrad(a, b, GROUPS, torch.bfloat16)
