"""Untested versions: kernels are compared with the reference once, and a planted fault stops the start.

The tests run on the CPU in Triton's interpreter; a version counts as newer if it is not in the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from octavo import fp8
from octavo.doctor import fp8_backends
from octavo.fp8.dense import compiled_check
from octavo.fp8.kernels import registry
from octavo.fp8.optim import engine
from octavo.fp8.planning import collect_kernel_checks
from octavo.fp8.self_check import reference_checks
from octavo.fp8.self_check import untested as self_check
from octavo.fp8.self_check.untested import Mismatch, SelfCheckError

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
CPU = torch.device("cpu")
TRITON, RECIPE = registry.get("triton"), fp8.recipe("rowwise")


def test_tested_versions_match_ci() -> None:
    pinned = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    assert {name: tuple(map(int, number.split(".")[:2])) for name, number in pinned.items()} == self_check.TESTED


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A machine without passed checks, with a torch and a Triton that are newer than the table."""
    monkeypatch.setattr(self_check, "TESTED", {"torch": (2, 0), "triton": (3, 0)})
    monkeypatch.setattr(self_check, "_passed_here", set())
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    yield monkeypatch


@pytest.fixture
def no_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the compiled layer, which takes seconds and has a separate test."""
    monkeypatch.setattr(compiled_check.torch, "compile", lambda function, **_: function)


def ran(checks: dict[str, Any], **more: Any) -> tuple[str, ...]:
    return self_check.run_checks(checks, CPU, **more)


def counting(*names: str) -> tuple[dict[str, Callable[[], None]], list[str]]:
    calls: list[str] = []
    return {name: lambda name=name: calls.append(name) for name in names}, calls


def network(backend: str = "triton") -> tuple[nn.Module, fp8.Plan]:
    model = nn.Sequential(nn.Linear(64, 64))
    return model, fp8.plan(model, fp8.Policy("rowwise", backend=backend))


def test_versions_are_compared_by_major_and_minor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "TESTED", {"torch": (2, 13), "triton": (3, 7)})
    for torch_version, triton, expected in (
        ("2.13.1+cu130", "3.7.1", ()),
        ("2.9.0", "3.7", ()),
        ("2.14.0.dev20261101", "3.7.1", ("torch 2.14.0.dev20261101 (tested up to 2.13)",)),
        ("3.0", "3.10.0", ("torch 3.0 (tested up to 2.13)", "triton 3.10.0 (tested up to 3.7)")),
        ("of my own", "3.7.1", ("torch of my own (tested up to 2.13)",)),
    ):
        monkeypatch.setattr(
            self_check, "installed_versions", lambda a=torch_version, b=triton: {"torch": a, "triton": b}
        )
        assert self_check.find_untested() == expected


def test_tested_versions_run_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "TESTED", {"torch": (99, 0), "triton": (99, 0)})
    monkeypatch.setattr(self_check, "_run_check", lambda *_: pytest.fail("checked although the version was tested"))
    fp8.apply(*network())
    assert fp8_backends.versions_tested("cpu").status == "ok"


def test_plan_is_checked_once_per_machine(newer: pytest.MonkeyPatch) -> None:
    model, plan = network()
    names = list(collect_kernel_checks([plan], CPU))
    assert names == [
        *(f"{gemm} of rowwise e4m3 on triton" for gemm in ("fwd", "dgrad", "wgrad")),
        "a compiled layer of rowwise e4m3 on triton",
    ]
    random = torch.get_rng_state()
    assert ran(collect_kernel_checks([plan], CPU), limit=float("inf")) == tuple(names)
    assert torch.equal(torch.get_rng_state(), random)
    (entry,) = json.loads(self_check.record_file().read_text())["machines"]
    assert entry["passed"] == sorted(names) and "triton 3" in entry["machine"]["versions"]
    newer.setattr(self_check, "_run_check", lambda *_: pytest.fail("checked twice"))
    fp8.apply(model, plan)
    newer.setattr(self_check, "_passed_here", set())  # another process
    fp8.apply(*network())
    here = self_check.Machine.here(CPU)
    for part in vars(here):  # another device, driver, version or kernel source is another machine
        other = type(here)(**{**vars(here), part: "another"})
        assert self_check.load_passed(here) == set(names) and not self_check.load_passed(other)
        with newer.context() as changed:
            changed.setattr(self_check, "_passed_here", set())
            changed.setattr(self_check.Machine, "here", lambda device, other=other: other)
            with pytest.raises(pytest.fail.Exception, match="checked twice"):
                fp8.apply(*network())


def with_fault(method: str, spoil: Callable[[Any], Any]) -> Callable[..., Any]:
    original = getattr(TRITON, method)
    return lambda *given, **more: spoil(original(*given, **more))


def add(out: Tensor, at: tuple[int, int] = (2, 3), by: float = 1e4) -> Tensor:
    out[at] += by
    return out


def flip(q: fp8.Quantized) -> fp8.Quantized:
    q.data.view(torch.uint8)[1, 5] ^= 1
    return q


def double_scale(q: fp8.Quantized) -> fp8.Quantized:
    return q._replace(scale=q.scale * 2)


def no_kernel(_: Any) -> None:
    raise ValueError("PTX has no such instruction")


FAULTS = {
    "one value": (
        "gemm_dgrad",
        add,
        r"dgrad of rowwise e4m3 on triton computes wrong results: result in bf16 at \[2, 3\] is",
    ),
    "a NaN": (
        "gemm_wgrad",
        lambda out: add(out, (0, 1), float("nan")),
        r"wgrad of .* at \[0, 1\] is nan, the reference",
    ),
    "a bias": ("gemm_fwd", lambda out: out * 1.05, r"fwd of .* result in bf16 at"),
    "few rows": ("gemm_decode", lambda out: -out, r"fwd of .* result of three rows at \[\d, \d+\] is"),
    "a code": ("quantize", flip, r"fwd of .* cast of x at \[1, 5\] is .* \(the same bits\)"),
    "a scale": ("quantize", double_scale, r"fwd of .* scale in the cast of x at \[0, 0\] is"),
    "two casts": (
        "quantize_both",
        lambda pair: (pair[0], flip(pair[1])),
        r"wgrad of .* cast of x for two GEMMs at \[1, 5\]",
    ),
    "a shape": ("gemm_fwd", lambda out: out[:-1], r"fwd of .* does not run here \(TypeError: result in bf16 has shape"),
    "no kernel": ("gemm_fwd", no_kernel, r"fwd of .* does not run here \(ValueError: PTX has no such instruction\)"),
}


@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_reported_before_apply(newer: pytest.MonkeyPatch, fault: str) -> None:
    method, spoil, text = FAULTS[fault]
    newer.setattr(TRITON, method, with_fault(method, spoil))
    model, plan = network()
    with pytest.raises(SelfCheckError, match=rf"(?s)^torch \S+ \(tested up to 2.0\) and triton .*: {text}") as raised:
        fp8.apply(model, plan)
    assert "Use fp8.backend: reference" in str(raised.value) and "torch 2.0, triton 3.0" in str(raised.value)
    assert type(model[0]) is nn.Linear
    assert (
        not any("fwd" in name for name in self_check.load_passed(self_check.Machine.here(CPU))) or "fwd of" not in text
    )
    fp8.apply(*network("reference"))  # the way out
    newer.setattr(self_check, "_run_check", lambda *_: pytest.fail("the reference was checked against itself"))
    fp8.apply(*network("reference"))


@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize(
    ("method", "spoil", "checks"),
    [
        (
            "grouped_dgrad",
            lambda out: out * 0.9,
            reference_checks.kernel_checks(RECIPE, "dgrad", "triton", CPU, grouped=True),
        ),
        ("quantize_with_scale", flip, reference_checks.kernel_checks(fp8.recipe("delayed"), "fwd", "triton", CPU)),
        (
            "rmsnorm_quantize",
            lambda out: (out[0] * 1.1, *out[1:]),
            reference_checks.fused_checks(RECIPE, "rmsnorm", "triton", CPU),
        ),
        (
            "swiglu_quantize",
            lambda out: (out[0], flip(out[1]), out[2]),
            reference_checks.fused_checks(RECIPE, "swiglu", "triton", CPU),
        ),
        (
            "swiglu_codes",
            lambda out: (double_scale(out[0]), out[1]),
            reference_checks.fused_checks(RECIPE, "swiglu", "triton", CPU),
        ),
        (
            "rmsnorm_backward",
            lambda out: (out[0], out[1] * 1.1),
            reference_checks.fused_checks(RECIPE, "rmsnorm", "triton", CPU),
        ),
        (
            "rmsnorm_codes",
            lambda out: (out[0], double_scale(out[1]), out[2]),
            reference_checks.fused_checks(RECIPE, "rmsnorm", "triton", CPU),
        ),
        (
            "quantize_both",
            lambda pair: (pair[0], flip(pair[1]) if pair[1].data.shape == reference_checks.WHOLE_TILES else pair[1]),
            reference_checks.kernel_checks(fp8.recipe("blockwise"), "wgrad", "triton", CPU),
        ),
        (
            "swiglu_backward_quantize",
            lambda out: (out[2], *out[1:]),
            reference_checks.fused_checks(RECIPE, "swiglu_backward", "triton", CPU),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_experts_fused_blocks_and_delayed_scaling_are_checked(
    monkeypatch: pytest.MonkeyPatch, method: str, spoil: Callable[[Any], Any], checks: dict[str, self_check.Check]
) -> None:
    (check,) = checks.values()
    with torch.no_grad():
        assert check() is None
        monkeypatch.setattr(TRITON, method, with_fault(method, spoil))
        assert isinstance(check(), Mismatch)


@pytest.mark.usefixtures("no_compile")
def test_failed_kernel_is_named_by_the_plan_and_refused_with_tested_versions(newer: pytest.MonkeyPatch) -> None:
    name = "wgrad of rowwise e4m3 on triton"
    with newer.context() as broken:
        broken.setattr(TRITON, "gemm_wgrad", with_fault("gemm_wgrad", add))
        with pytest.raises(SelfCheckError, match=name):
            fp8.apply(*network())
        newer.setattr(self_check, "TESTED", {"torch": (99, 0), "triton": (99, 0)})
        newer.setattr(self_check, "_passed_here", set())
        (note,) = [note for note in network()[1].notes if "wrong results" in note]
        assert note.startswith(f"{name} computes wrong results here (result in bf16 at [2, 3] is ")
        with pytest.raises(SelfCheckError, match=rf"^torch \S+, triton \S+: {name} computes wrong results"):
            fp8.apply(*network())
        assert not any("wrong results" in note for note in network("reference")[1].notes)
        fp8.apply(*network("reference"))
    fp8.apply(*network())  # the kernel is right again
    assert not self_check.failed_checks(CPU) and not any("wrong results" in note for note in network()[1].notes)


def test_optimizer_kernel_is_checked_when_selected(newer: pytest.MonkeyPatch) -> None:
    """The engine is made to run on another device, whose kernel has a fault."""
    original = TRITON.adamw

    def errs(pieces: Any, *more: Any) -> None:
        original(pieces, *more)
        pieces[0].weight[7] += 1e-3

    newer.setattr(engine, "run_checks", lambda checks, device: self_check.run_checks(checks, CPU))
    newer.setattr(engine, "adamw_checks", lambda name, device: reference_checks.adamw_checks(name, CPU))
    newer.setattr(engine, "select", lambda op, **_: registry.Selection(TRITON, "", ()))
    assert engine.select_engine(torch.device("meta")) == TRITON.adamw
    newer.setattr(self_check, "_passed_here", set())
    newer.setenv("OCTAVO_CACHE", str(self_check.record_file().parent / "other"))
    newer.setattr(TRITON, "adamw", errs)
    with pytest.raises(
        SelfCheckError, match=r"adamw on triton computes wrong results: weight with states in fp8 at \[7\]"
    ):
        engine.select_engine(torch.device("meta"))


def test_wrong_compiled_layer_is_detected(newer: pytest.MonkeyPatch) -> None:
    chosen = {gemm: registry.Selection(TRITON, "", ()) for gemm in ("fwd", "dgrad", "wgrad")}
    newer.setattr(compiled_check.torch, "compile", lambda function, **_: lambda x: function(x * 1.25))
    fault = compiled_check.check_compiled_layer(RECIPE, chosen, CPU)
    assert fault is not None and fault.what in ("y", "dx", "dw")
    newer.setattr(compiled_check.torch, "compile", lambda function, **_: function)
    assert compiled_check.check_compiled_layer(RECIPE, chosen, CPU) is None


def test_remaining_checks_run_at_next_start(newer: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 1000, 3))
    checks, calls = counting("a", "b", "c", "d")
    with pytest.warns(UserWarning, match=r"2 of 4 kernels are not checked yet \(5 s are over; first c\) and are used"):
        assert ran(checks, clock=lambda: next(seconds)) == ("a", "b")
    newer.setattr(self_check, "_passed_here", set())
    assert ran(checks, clock=lambda: next(seconds)) == ("c", "d") and calls == ["a", "b", "c", "d"]
    assert ran(checks) == ()


@pytest.mark.parametrize(
    "where", ["another rank", "a compile", "a capture", "the meta device", "a device that is absent"]
)
def test_checks_are_skipped(newer: pytest.MonkeyPatch, where: str) -> None:
    checks, calls = counting("a")
    device = CPU
    with newer.context() as here:
        if where == "another rank":
            here.setenv("LOCAL_RANK", "1")
        elif where == "a compile":
            here.setattr(torch.compiler, "is_compiling", lambda: True)
        elif where == "a capture":
            here.setattr(self_check, "is_capturing", lambda device: True)
        else:
            device = torch.device("meta" if "meta" in where else "cuda")
            if device.type == "cuda" and torch.cuda.is_available():
                pytest.skip("this machine has one")
        assert self_check.run_checks(checks, device) == () and not calls
    assert ran(checks) == ("a",), "it is checked where it may be"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"octavo_self_check": 1, "machines": [3, {}]}', "[" * 100000, "\udcff"]
)
def test_damaged_record_is_ignored(newer: pytest.MonkeyPatch, text: str) -> None:
    self_check.record_file().parent.mkdir()
    self_check.record_file().write_bytes(text.encode(errors="surrogateescape"))
    checks, _ = counting("a")
    assert ran(checks) == ("a",)
    newer.setattr(self_check, "_passed_here", set())
    assert ran(checks) == ()


def test_unwritable_record_warns(newer: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    checks, _ = counting("a")
    with pytest.warns(
        UserWarning, match="the result of the kernel self-check cannot be saved .* it will run at each start"
    ):
        assert ran(checks) == ("a",)


@pytest.mark.usefixtures("no_compile")
def test_doctor_reports_checks(newer: pytest.MonkeyPatch) -> None:
    check = fp8_backends.versions_tested("cpu")
    assert check.status == "ok" and "tested up to 2.0" in check.found
    assert "the reference is chosen for all GEMMs on cpu" in check.found
    newer.setattr(type(TRITON), "why_not_auto", lambda self, device: None)
    newer.setattr(fp8, "RECIPES", ("rowwise",))
    check = fp8_backends.versions_tested("cpu")
    assert "11 checks of kernels and a compiled layer agree with the reference on cpu" in check.found
    newer.setattr(self_check, "_passed_here", set())
    newer.setenv("OCTAVO_CACHE", str(self_check.record_file().parent / "other"))
    newer.setattr(TRITON, "gemm_wgrad", with_fault("gemm_wgrad", add))
    check = fp8_backends.versions_tested("cpu")
    assert check.status == "fail" and "wgrad of rowwise e4m3 on triton computes wrong results" in check.found
    assert "fp8.backend: reference" in check.fix
