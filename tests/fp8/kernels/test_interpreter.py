"""Tests of the comparisons in Triton's interpreter: the compared kernel ran, and a fault in it is detected.

A comparison with the reference could pass without testing anything if no kernel was launched, if the output already had
the correct values, or if the comparison ignores differences. Each case is tested here.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.adamw import Hyper, Piece
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.moments import LAYOUT
from octavo.fp8.kernels import layout, registry
from octavo.fp8.kernels.groups import group_rows
from octavo.fp8.kernels.registry import Backend
from octavo.fp8.kernels.triton_kernels import fused, fused_kernels, fused_tiles, launch
from octavo.fp8.kernels.triton_kernels.bits import widen

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="on a GPU the kernels are compiled, not interpreted"),
]

ROW, COL, LOW = CastSpec(block=(1, 128)), CastSpec(block=(128, 1)), torch.bfloat16


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds what no result is."""
    empty = torch.empty

    def make(*size, **options):
        out = empty(*size, **options)
        out.view(torch.uint8).fill_(0xA5)
        return out

    monkeypatch.setattr(torch, "empty", make)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(1)
    x = torch.randn(20, 200, generator=make) * torch.exp2(torch.arange(20).float() - 10).view(-1, 1)
    x[3] = 0.0
    x[4, 150] = float("nan")  # in blocks that reach into the padding
    return x.bfloat16(), torch.randn(200, generator=make).bfloat16()


def differs(q: Quantized, y: torch.Tensor, contract: int) -> bool:
    """Whether q is not the cast of y, bit for bit and padding included."""
    expected = cast.quantize(y, q.spec)
    results, requested = layout.k_major(q, contract), layout.k_major(expected, contract)
    same_codes = torch.equal(results.codes.view(torch.uint8), requested.codes.view(torch.uint8))
    return not (same_codes and torch.equal(q.scale.view(torch.int32), expected.scale.view(torch.int32)))


def swiglu_differs() -> bool:
    x, _ = inputs()
    h, row, col = fused.swiglu_quantize(x, x.flip(0), ROW, COL)
    exact = registry.get("reference").swiglu_quantize(x, x.flip(0), None, None)[0]
    values = (h.float() - exact.float()).abs() > 2**-7 * exact.float().abs()  # false for NaN
    return bool(values.any()) or not torch.equal(h.isnan(), exact.isnan()) or differs(row, h, 1) or differs(col, h, 0)


def rmsnorm_differs(col: CastSpec | None) -> bool:
    x, w = inputs()
    y, rstd, row_q, col_q = fused.rmsnorm_quantize(x, w, 1e-3, ROW, col)
    exact, exact_rstd, *_ = registry.get("reference").rmsnorm_quantize(x, w, 1e-3, None, None)
    values = (y.float() - exact.float()).abs() > 2**-7 * exact.float().abs()
    wrong = bool(values.any()) or not torch.equal(y.isnan(), exact.isnan()) or differs(row_q, y, 1)
    return wrong or (col_q is not None and differs(col_q, y, 0)) or not torch.allclose(rstd, exact_rstd, equal_nan=True)


LAYERS: dict[str, Callable[[], bool]] = {
    "swiglu": swiglu_differs,
    "rmsnorm_rows": lambda: rmsnorm_differs(None),
    "rmsnorm_tile": lambda: rmsnorm_differs(COL),
}


OPERATIONS = sorted(
    name
    for name, method in vars(Backend).items()
    if inspect.isfunction(method)
    and not name.startswith("_")
    and name not in ("version", "why_not_auto", "supports", "reorder_scales")
)


def operations(backend: Backend) -> dict[str, Callable[[], object]]:
    """One call of everything a backend computes, by the name of its method; operands are cast by the reference."""
    x, w = inputs()
    one = x[:16, :128].contiguous().nan_to_num()
    across, down = CastSpec(block=(1, -1)), CastSpec(block=(-1, 1))
    q, full = cast.quantize(one, across), CastSpec(block=(-1, -1), scale="fp32")
    groups = group_rows(torch.tensor([0, 1, 1, 0, 2]), 2).groups
    saved, weights = torch.ones(groups.rows, 32), torch.ones(2, 16, 32)
    first = registry.get("reference")
    rows, experts = first.quantize_rows(saved, ROW, groups), first.quantize_experts(weights, CastSpec(block=(128, 128)))
    arguments, columns = first.quantize_rows(saved[:, :16], ROW, groups), first.quantize_rows(saved, COL, groups)
    state = {k.name: torch.zeros((130,) if k.row is None else (2, *k.row), dtype=k.dtype) for k in LAYOUT["fp8"]}
    step = Piece(torch.ones(130), torch.ones(130), state, start=0, index=0, step=1)
    return {
        "quantize": lambda: backend.quantize(one, ROW),
        "quantize_both": lambda: backend.quantize_both(one, ROW, COL),
        "quantize_with_scale": lambda: backend.quantize_with_scale(one, torch.tensor(0.5), full),
        "quantize_both_with_scale": lambda: backend.quantize_both_with_scale(one, torch.tensor(0.5), full),
        "dequantize": lambda: backend.dequantize(q),
        "copy_for_gemm": lambda: backend.copy_for_gemm(cast.quantize(one, CastSpec(block=(128, 128))), 0),
        "copy_to_layout": lambda: backend.copy_to_layout(cast.quantize(one, CastSpec(block=(128, 128))), 0),
        "gemm_fwd": lambda: backend.gemm_fwd(q, q, torch.float32),
        "gemm_decode": lambda: backend.gemm_decode(q, q, torch.float32),
        "gemm_dgrad": lambda: backend.gemm_dgrad(cast.quantize(one[:, :16], across), cast.quantize(one, down), LOW),
        "gemm_wgrad": lambda: backend.gemm_wgrad(cast.quantize(one, down), cast.quantize(one, down), LOW),
        "quantize_rows": lambda: backend.quantize_rows(saved, ROW, groups),
        "quantize_rows_both": lambda: backend.quantize_rows_both(saved, ROW, COL, groups),
        "quantize_experts": lambda: backend.quantize_experts(weights, CastSpec(block=(128, 128))),
        "grouped_fwd": lambda: backend.grouped_fwd(rows, experts, groups, LOW),
        "grouped_dgrad": lambda: backend.grouped_dgrad(arguments, experts, groups, LOW),
        "grouped_wgrad": lambda: backend.grouped_wgrad(columns, columns, groups, LOW),
        "rmsnorm_backward": lambda: backend.rmsnorm_backward(x, x, w, x[:, 0].float(), True, True),
        "rmsnorm_codes": lambda: backend.rmsnorm_codes(x, w, 1e-6, ROW, None),
        "rmsnorm_quantize": lambda: backend.rmsnorm_quantize(x, w, 1e-6, ROW, None),
        "swiglu_quantize": lambda: backend.swiglu_quantize(x, x, ROW, COL),
        "swiglu_codes": lambda: backend.swiglu_codes(x, x, ROW, COL),
        "swiglu_backward_quantize": lambda: backend.swiglu_backward_quantize(x, x, x, ROW, COL),
        "adamw": lambda: backend.adamw([step], Hyper(1e-3), None, None),
    }


CORE = {
    "gemm_decode": "decode_kernel",
    "gemm_": "gemm_kernel",
    "grouped_wgrad": "grouped_wgrad_kernel",
    "grouped_": "grouped_rows_kernel",
}


def test_all_operations_are_covered() -> None:
    assert sorted(operations(registry.get("triton"))) == OPERATIONS


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_launches_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing of it to the reference, which as much as being called ends the test."""
    call, reference = operations(registry.get("triton"))[name], registry.get("reference")
    for each in OPERATIONS:
        monkeypatch.setattr(type(reference), each, delegated)
    with launch.launches() as recorded:
        call()
    assert sum(recorded.values()) >= 1, f"{name} ran no kernel"
    product = next((kernel for prefix, kernel in CORE.items() if name.startswith(prefix)), None)
    assert product is None or recorded[product] == 1, f"{name} multiplied elsewhere: {dict(recorded)}"
    with launch.launches() as none:
        pass
    assert not none, "launches outside are not counted"


def delegated(*args: object, **options: object) -> None:
    pytest.fail("an operation of Triton's was handed to the reference")


@pytest.mark.parametrize("name", OPERATIONS)
def test_reference_operation_is_detected(name: str) -> None:
    """What plain torch computes starts no kernel, so that the count above tells the two apart."""
    with launch.launches() as recorded:
        operations(registry.get("reference"))[name]()
    assert not recorded


def test_kernels_are_interpreted() -> None:
    created = {n: type(f).__name__ for n, f in vars(fused_kernels).items() if "Function" in type(f).__name__}
    created = {n: kind for n, kind in created.items() if kind in ("InterpretedFunction", "JITFunction")}
    assert len(created) >= 5 and set(created.values()) == {"InterpretedFunction"}, created


@pytest.mark.parametrize("layer", LAYERS)
def test_correct_kernels_pass(layer: str, poisoned: None) -> None:
    with launch.launches() as recorded:
        assert not LAYERS[layer]()
    assert recorded[layer] == 1


@pytest.mark.parametrize("layer", LAYERS)
def test_kernel_that_did_not_run_fails(layer: str, poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "launch", lambda kernel, grid, *args, **options: None)
    assert LAYERS[layer]()


FAULTS = {
    "a scale twice too large": (
        "scale_of(tops(tl.abs(blocks), 2, E8M0)",
        "scale_of(0x800000 + tops(tl.abs(blocks), 2, E8M0)",
    ),
    "the reciprocal off by one exponent": ("encode(blocks, scale, bad", "encode(blocks, 2 * scale, bad"),
    "codes of the unrounded result": ("g * sigmoid(g) * u, gate.dtype.element_ty", "g * sigmoid(g) * u, tl.float32"),
    "no sign": ("encode(blocks, scale, bad", "encode(tl.abs(blocks), scale, bad"),
    "padding not written": ("(M + 15) // 16 * 16, width, BK", "M, width, BK"),
    "padding of columns not written": ("(K + 15) // 16 * 16, BK, WHOLE)", "K, BK, WHOLE)"),
    "padding of a bad block": ("inside(row, col, r, M, K, BK, False)", "inside(row, col, r, M, K + 128, BK, False)"),
    "padding of a bad block of columns": ("words & keep[:, None]", "words"),
    "two rows of a word exchanged": ("_in_units(q[2], scale", "_in_units(q[3], scale"),
    "the last column left out": (
        "inside(row, col, r, M, K, BK, WHOLE), other",
        "inside(row, col, r, M, K - 1, BK, WHOLE), other",
    ),
}


def with_fault(tmp_path: Path, good: str, bad: str) -> ModuleType:
    """The kernels and their tiles with one piece of their source exchanged, as modules of their own."""
    sources = [Path(module.__file__ or "").read_text(encoding="utf-8") for module in (fused_tiles, fused_kernels)]
    assert any(good in source for source in sources), "the planted fault has nothing to replace"
    for name, source in zip(("faulty_tiles", "faulty_kernels"), sources, strict=True):
        file = tmp_path / f"{name}.py"
        file.write_text(source.replace(good, bad).replace(fused_tiles.__name__, "faulty_tiles"), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def forget_faults() -> None:
    for name in ("faulty_tiles", "faulty_kernels"):
        sys.modules.pop(name)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_detected(fault: str, tmp_path: Path, poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "kernels", with_fault(tmp_path, *FAULTS[fault]))
    with launch.launches() as recorded:
        assert swiglu_differs(), f"nobody noticed: {fault}"
    assert recorded["swiglu"] == 1
    forget_faults()


def test_unchanged_copy_passes(tmp_path: Path, poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "kernels", with_fault(tmp_path, "import triton", "import triton"))
    assert not swiglu_differs()
    forget_faults()


def test_faulty_helper_is_detected(poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = widen

    def halves(x):
        return right(x) * 0.5

    monkeypatch.setattr(fused_kernels, "widen", halves)
    assert swiglu_differs()
