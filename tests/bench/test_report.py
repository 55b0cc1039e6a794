"""`octavo bench report`: figures find their targets, verdicts are what limits say, and a CPU's get none."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.gpu import report
from benchmarks.gpu.targets import TARGETS, Target
from octavo import bench
from octavo.bench import suites
from octavo.bench.record import Result, Row
from octavo.cli.main import main


def case(suite: str, name: str, base: str, seconds: float, ours: dict[str, float], **more: object) -> list[Row]:
    rows = [Row(suite, name, base, seconds, **more)]  # type: ignore[arg-type]
    return rows + [Row(suite, name, who, s, baseline=base, **more) for who, s in ours.items()]  # type: ignore[arg-type]


def memory(who: str, **kinds: int) -> Row:
    made = {"weights": 0, "states": 0, "activations": 0, "gradients": 0, "peak": 0, **kinds}
    base = "" if who == "PyTorch" else "PyTorch"
    return Row("memory", "qwen3_vl_8b, 4 blocks, 1 M parameters", who, 1.0, baseline=base, tokens=8192, memory=made)


CARD = [
    *case("linear", "qwen3-8b qkv sum M=16384 N=6144 K=4096", "bf16", 2.0, {"blockwise torch": 1.5, "blockwise x": 1}),
    *case("linear", "qwen3-8b down sum M=16384 N=4096 K=12288", "bf16", 4.0, {"blockwise torch": 2.0, "mxfp8": 0.1}),
    *case("linear", "qwen3-8b down sum, new weight M=16384", "bf16", 9.0, {"blockwise torch": 1.0}),
    *case("linear", "qwen3-vl fc1 sum M=16384 N=4304 K=1152", "bf16", 1.0, {"blockwise torch": 9.0}),
    *case("step", "qwen3_vl_8b, 8192 tokens", "bf16 compiled", 1.3, {"bf16": 0.1, "blockwise fused": 1.0}),
    Row("cast", "16384 x 4096", "copy", 1.0, bytes=4.0),
    Row("cast", "16384 x 4096", "blockwise both triton", 1.0, bytes=3.0, baseline="copy"),
    Row("cast", "16384 x 12288", "copy", 1.0, bytes=4.0),
    Row("cast", "16384 x 12288", "blockwise both triton", 1.0, bytes=3.6, baseline="copy"),
    memory("PyTorch", weights=4_000_000, states=8_000_000, gradients=4_000_000),
    memory("that, codes recast", weights=2_000_000, states=2_070_000),
    memory("+ FP8 activations", activations=66 * 1024 * 8192 * 4),
]


def write(folder: Path, name: str, rows: list[Row], device: str, small: bool = False, **more: object) -> None:
    folder.mkdir(exist_ok=True)
    job = {"call": "now", "rows": [asdict(row) | {"rate": "", "ratio": None} for row in rows], "lost": [], **more}
    file = {"command": "make gpu", "calls": {"now": {"device": device, "small": small}}, "jobs": {"a job": job}}
    (folder / name).write_text(json.dumps(file))


def lines(result: Result) -> dict[str, tuple[str, ...]]:
    return {line[0]: line[2:] for line in report.table(result)}


def test_figures_get_verdicts() -> None:
    found = lines(Result("NVIDIA H200", False, rows=CARD))
    assert found["linear, blockwise"] == ("2.00x", ">= 1.55x", "reached")  # (2 + 4) / (1 + 2): the fastest of each case
    assert found["training step, 8B, blockwise"] == ("1.30x", ">= 1.3x", "reached")
    assert found["cast in both layouts, of a copy"] == ("0.75x", ">= 0.85x", "missed")  # of the worst shape
    assert found["training, bytes a parameter"] == ("4.07", "<= 4.1", "reached")
    assert found["activations of a block"] == ("66.00 KiB/token", "<= 67 KiB/token", "reached")
    left = {what for what, cells in found.items() if cells[0] == "" and cells[2] == "not measured"}
    assert {"linear, tensorwise", "training step, 8B, tensorwise", "experts, 8 of 128", "no module below 1.0x"} <= left
    assert len(found) == len(TARGETS) and all(target.known or target.what.startswith("...") for target in TARGETS)


def test_host_time_is_an_upper_limit_and_missing_baseline_has_no_figure() -> None:
    rows = [
        Row("linear", "small sum M=64", "fp32", 1.0, host=1.0),
        Row("linear", "small sum M=64", "blockwise reference", 1.0, baseline="fp32", host=5.5),
    ]
    assert lines(Result("NVIDIA H200", False, rows=rows))["host time of a linear"] == ("5.50x", "<= 5x", "missed")
    assert lines(Result("NVIDIA H200", False, rows=rows[1:]))["linear, blockwise"][0] == ""
    assert Target("w", "k", 2.0).reached(2.0) and Target("w", "k", 2.0, least=False).reached(2.0)


@pytest.mark.parametrize(("device", "small"), [("cpu", True), ("NVIDIA H200", True)])
def test_noisy_and_cpu_figures_get_no_verdict(device: str, small: bool) -> None:
    result = Result(device, small, rows=CARD)
    assert {cells[2] for cells in lines(result).values()} == {"none", "not measured"}
    assert report.page(result)[-1].endswith(report.NONE)


def test_report_merges_folders_devices_and_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts that ran apart are one report, each device with a table; what octavo bench wrote is read as well."""
    write(tmp_path / "one", "suites.json", CARD[:7], "NVIDIA H200")
    tests = {"a": {"outcome": "passed"}, "b": {"outcome": "failed"}}
    write(tmp_path / "one", "tests.json", [], "NVIDIA H200", tests=tests, lost=[{"case": "c"}])
    write(tmp_path / "two", "suites.json", CARD[7:], "NVIDIA H200")
    bench.write_suites(Result("cpu", True, rows=CARD), tmp_path / "two")
    assert main(["bench", "report", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    shown = capsys.readouterr().out
    assert "GPU tests: 1 failed, 1 lost, 1 passed" in shown and "2.00x" in shown
    assert shown.index("NVIDIA H200, against") < shown.index("cpu, against") and shown.count("no verdict.") == 1
    plots = sorted(path.name for path in (tmp_path / "one").glob("*.png"))
    assert plots == ["report_cpu_small.png", "report_nvidia_h200.png"]
    assert all((tmp_path / "one" / name).stat().st_size > 5000 for name in plots)


def test_unreadable_results_are_explained(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.report([]) == 2 and "usage: python -m octavo.bench report DIR" in capsys.readouterr().out
    assert bench.report([str(tmp_path)]) == 1 and "no figures in" in capsys.readouterr().out
    write(tmp_path, "suites.json", CARD, "NVIDIA H200")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "benchmarks.plot_canvas", raising=False)
    monkeypatch.delitem(sys.modules, "matplotlib.axes", raising=False)
    assert bench.report([str(tmp_path)]) == 0 and "no plot: " in capsys.readouterr().out
    (tmp_path / "other.json").write_text('{"command": "python benchmarks/optimizer.py", "rows": [1]}')
    assert bench.report([str(tmp_path)]) == 0
    (tmp_path / "half.json").write_text('{"command": "make')
    assert bench.report([str(tmp_path)]) == 1 and "these are not figures of make gpu" in capsys.readouterr().out
    monkeypatch.setattr(suites, "__file__", str(tmp_path / "octavo" / "bench" / "suites.py"))
    with pytest.raises(bench.BenchError, match="the report needs a checkout of Octavo"):
        bench.report([str(tmp_path)])
