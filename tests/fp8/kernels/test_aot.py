"""Ahead-of-time compilation of every Triton kernel for every architecture, and the report of failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.fp8.kernels import aot, forms

KERNELS = {"rmsnorm_rows", "rmsnorm_tile", "rstd_of_rows", "swiglu", "swiglu_backward", "gemm_kernel", "decode_kernel"}
KERNELS |= {"product_kernel", "attend_kernel", "sums_kernel", "cast_kernel", "rows_kernel"}
MODULES = {"cast", "gemm", "decode", "grouped", "fused", "rows"}


def check(rows: list[dict[str, Any]]) -> None:
    wrong = aot.faults(rows)
    assert not wrong, "\n".join(wrong)
    assert {row["module"] for row in rows} >= MODULES and {row["kernel"] for row in rows} >= KERNELS
    for row in rows:
        assert 16 <= row["registers"] <= 255, row["name"]
        # stores may all be atomic; codes come by TMA, operands and whole rows by asynchronous copies, not by loads
        assert row["loads"] or row["kernel"] in ("decode_kernel", "product_kernel", "rows_kernel"), row["name"]
        if row["module"] in ("gemm", "grouped") or row["kernel"] == "decode_kernel":
            assert row["tensor_core"] == "wgmma" and row["steps"], f"{row['name']} leaves the tensor cores alone"


def test_first_option_compiles_one_form_per_kernel() -> None:
    results = [(aot._variants(module)[i].kernel.__name__, arch) for module, i, arch in aot._chosen(aot.ARCHS, True, "")]
    assert len(results) == len(set(results)), "a kernel twice"
    assert {kernel for kernel, _ in results} >= KERNELS and {arch for _, arch in results} == set(aot.ARCHS)
    only = {aot._variants(module)[i].name for module, i, _ in aot._chosen((90,), True, "swiglu")}
    assert only and all("swiglu" in name for name in only)


def test_digest_of_sources_ignores_descriptions() -> None:
    """Otherwise a docstring in other words would make the stored reports stale, an hour of compiling."""
    code = 'def f(x):\n    """Doubles."""\n    return x * 2  # twice\n'
    assert aot.code_of(code) == aot.code_of('"""A file."""\n\ndef f(x):\n    return (x * 2)\n')
    assert aot.code_of(code) != aot.code_of(code.replace("x * 2", "x * 3"))
    assert aot.code_of('def f():\n    "nothing"') == "def f():"  # read only as text


KEPT = Path(__file__).parents[3] / "benchmarks" / "results"


def ran(code: str, file: Path) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """A process without the interpreter, and the rows of the report that it writes into ``file``."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = os.pathsep.join([str(file.parent), str(Path(__file__).parents[3])])
    done = subprocess.run([sys.executable, "-c", code, file], env=environ, capture_output=True, text=True)
    return done, json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []


@pytest.mark.long
def test_every_form_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For Hopper, with the Triton that is installed; the reports below are made by hand and hold the rest. Where one of
    them is of this Triton and of these very sources, it tells of all forms what one of each kernel gives here again.
    Where the interpreter is on, as without a GPU, the command is handed to another process, which runs it without."""
    saved = [json.loads(file.read_text(encoding="utf-8")) for file in KEPT.glob("aot_triton_*.json")]
    messages = (metadata.version("triton"), aot.source())
    same = next((report["rows"] for report in saved if (report["triton"], report.get("source")) == messages), None)
    file, many = tmp_path / "report.json", ["--jobs", "2"] if same is None else ["--first"]
    code, (lines, _) = aot.main(["--arch", "sm_90", "--json", str(file), *many]), capsys.readouterr()
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert code == 0 and ", 0 at fault" in lines and all(row["name"] in lines for row in rows), lines
    if same is not None:
        assert rows and all(row in same for row in rows)
        rows = [row for row in same if row["arch"] == 90]
    check(rows)
    assert {row["name"] for row in rows} == {
        v.name for module in aot._modules() for v in aot._variants(module) if 90 in v.architectures
    }
    fused = [row for row in rows if row["module"] == "fused" and "tile" in row["kernel"]]
    assert fused and all(row["loads"]["16"] >= 4 and row["stores"]["16"] >= 4 for row in fused), "narrow accesses"


@pytest.mark.parametrize("version", ["3.6", "3.7"])
def test_stored_reports_are_valid(version: str) -> None:
    """Every form for every architecture; none serialised, and no GEMM that Qwen3 runs spills but on sm_120."""
    name = f"aot_triton_{version.replace('.', '_')}.json"
    report = json.loads((KEPT / name).read_text(encoding="utf-8"))
    rows = report["rows"]
    assert all("bytes_after_nan" in row for row in rows), f"{name} is older than the key; make it again"
    assert report["triton"].startswith(version) and not aot.faults(rows)
    products = [row for row in rows if row["module"] in ("gemm", "decode", "grouped")]
    spilling = [(row["name"], row["arch"]) for row in products if row["spill"]]
    assert not [form for form in spilling if form[1] != 120], "on sm_120 each keeps 8 to 16 bytes"
    messages = {(row["module"], row["name"], row["arch"]) for row in rows}
    expected = {
        (module.rpartition(".")[2], v.name, arch)
        for module in aot._modules()
        for v in aot._variants(module)
        for arch in v.architectures
    }
    assert messages == expected, f"python -m tests.fp8.kernels.aot --jobs 2 --json benchmarks/results/{name}"


BROKEN = """
import triton
import triton.language as tl
from tests.fp8.kernels.forms import Variant

@triton.jit
def no_such(x, N: tl.constexpr):
    tl.store(x, tl.nothing(x))

@triton.jit
def greedy(x, y, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, N))
    b = tl.load(y + tl.arange(0, N))
    tl.store(x + tl.arange(0, N), a * tl.sum(b) + b * tl.sum(a * b))

@triton.jit
def fine(x, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at, mask=at < n), mask=at < n)

@triton.jit
def fusing(x, N: tl.constexpr):
    at = x + tl.arange(0, N)
    tl.store(at, tl.fma(tl.load(at), tl.load(at), 1.0))

def variants():
    types = {"x": "*fp32", "y": "*fp32"}
    return [
        Variant("fine", fine, {"x": "*fp32", "n": "i32:16"}, {"N": 1024}),
        Variant("old only", fine, {"x": "*fp32", "n": "i32"}, {"N": 1024}, architectures=(89,)),
        Variant("no such", no_such, {"x": "*fp32"}, {"N": 16}),
        Variant("greedy", greedy, types, {"N": 8192}, num_warps=1),
        Variant("may fuse", fusing, {"x": "*fp32"}, {"N": 128}),
        Variant("fuses", fusing, {"x": "*fp32"}, {"N": 128}, fused=False),
        Variant("unsaid", fine, {"x": "*fp32"}, {"N": 1024}),
        Variant("stray", fine, {"x": "*fp32", "n": "i32", "m": "i32"}, {"N": 1024}),
    ]
"""


@pytest.mark.long
def test_failures_are_listed_and_set_exit_code(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    code = (
        "import sys; from tests.fp8.kernels import aot; aot._modules = lambda: ['broken']; "
        "sys.exit(aot.main(['--arch', '90', '--arch', 'sm_89', '--json', sys.argv[1]]))"
    )
    done, written = ran(code, tmp_path / "report.json")
    assert done.returncode == 1, done.stderr
    rows = {(row["name"], row["arch"]): row for row in written}
    assert rows["fine", 90]["error"] is None and rows["fine", 90]["spill"] == 0
    assert rows["fine", 90]["loads"] == {"16": 2} and rows["old only", 89]["loads"] == {"4": 8}, "alignment is not used"
    assert ("old only", 90) not in rows
    assert rows["greedy", 90]["spill"] > forms.SPILL_BOUND
    for text in (
        "broken: no such for sm_90 does not compile: ",
        f"broken: greedy for sm_90 spills {rows['greedy', 90]['spill']} bytes a thread, more than {forms.SPILL_BOUND}",
        "broken: unsaid for sm_89 does not compile: ValueError: variant 'unsaid' says nothing of the argument 'n'",
        "broken: stray for sm_89 does not compile: ValueError: variant 'stray' describes 'm', which is no argument",
        "broken: fuses for sm_90 does not compile: ValueError: it must round products and sums apart",
        "15 compiled, 10 at fault",
    ):
        assert text in done.stdout, done.stdout
    assert "nothing" in rows["no such", 90]["error"]


def test_shared_memory_and_serialized_products_are_faults() -> None:
    row = {"name": "big", "kernel": "k", "module": "m", "arch": 90, "error": None, "registers": 64, "spill": 0}
    row |= {"allowed": 0, "shared": 200 * 1024, "tensor_core": None, "loads": {16: 2}, "stores": {}}
    row |= {"executed": 99, "steps": [40], "serialised": False, "bytes_after_nan": False}
    assert aot.faults([row]) == []
    assert aot.faults([{**row, "arch": 120}]) == [
        "m: big for sm_120 needs 204800 bytes of shared memory, there are 101376"
    ]
    (serialised,) = aot.faults([{**row, "serialised": True}])
    assert serialised == "m: big for sm_90 is serialised: each of its products waits for the one before it"
    (bytewise,) = aot.faults([{**row, "bytes_after_nan": True}])
    assert bytewise == "m: big for sm_90 stores single bytes to shared memory and has max.NaN: issue 11111 of Triton"
    assert "2x16B" in aot.table([row]) and "FAILED" in aot.table([{**row, "error": "no"}])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("max.NaN.f32 %f1, %f2, %f3;", "st.shared.b8 [%r1], %rs1;"), True),
        (("min.ftz.NaN.f32 %f1, %f2, %f3;", "@%p1 st.shared.v4.b8 [%r1], {%rs1, %rs2, %rs3, %rs4};"), True),
        (("max.NaN.f32 %f1, %f2, %f3;", "st.shared::cta.u8 [%r1], %rs1;"), True),
        (("max.NaN.f32 %f1, %f2, %f3;", "st.shared.b32 [%r1], %r2;", "st.global.b8 [%rd1], %rs1;"), False),
        (("max.f32 %f1, %f2, %f3;", "st.shared.b8 [%r1], %rs1;"), False),
    ],
)
def test_byte_stores_after_nan_are_seen(lines: tuple[str, ...], expected: bool) -> None:
    assert aot.bytes_after_nan("\n".join(lines)) is expected


def test_unknown_arguments_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no architecture 75 to compile for; use 89, 90, 100, 120"):
        aot.report([75])
    assert aot.main(["--frist"]) == 2 and aot.main(["--json"]) == 2 and aot.main(["--arch", "70"]) == 2
    assert "does not know '--frist'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="No kernel has a form whose name contains 'nonsense'"):
        aot.report([90], only="nonsense")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "foo"], "--arch takes a number such as 90 or sm_90, not 'foo'; there are 89, 90, 100, 120."),
        (["--arch", "sm_9x"], "--arch takes a number such as 90 or sm_90, not 'sm_9x'; there are 89, 90, 100, 120."),
        (["--arch", "-90"], "--arch takes a number such as 90 or sm_90, not '-90'; there are 89, 90, 100, 120."),
        (["--arch", "sm_75"], "There is no architecture 75 to compile for; use 89, 90, 100, 120."),
        (["--jobs", "x"], "--jobs takes a number of processes from 1 on, not 'x'."),
        (["--jobs", "0"], "0 jobs compile nothing; --jobs takes a number of processes from 1 on."),
        (["--jobs"], "aot does not know '--jobs', or it lacks its value; --help says what there is."),
        (
            ["--json", "/nowhere/at/all.json"],
            "--json takes a file in a folder that exists, not '/nowhere/at/all.json'.",
        ),
    ],
)
def test_errors_are_reported_in_a_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert aot.main(words) == 2
    assert capsys.readouterr().err == message + "\n"


def test_help_shows_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["--arch", "90", "-h"]):
        assert aot.main(words) == 0
        out = capsys.readouterr().out
        assert "python -m tests.fp8.kernels.aot [--arch 90 ...]" in out and "--only" in out and "exit code" in out


def test_missing_triton_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert aot.main(["--first"]) == 2
    assert capsys.readouterr().err == (
        "Compiling Triton kernels needs triton, which is not installed; pip install triton.\n"
    )
