"""The model of a training step (benchmarks/step_model.py), which needs no GPU, compared with stored measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step_model
from benchmarks.hot_path import ROOT
from octavo.config.config import PRESETS

RESULTS = ROOT.parent / "benchmarks/results"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return step_model.model()


def test_model_predicts_the_fp8_step_that_was_measured(result: dict[str, Any]) -> None:
    assert abs(result["error"]) < 0.02, "eager blockwise, 866 ms"
    parts = step_model.predict(step_model.Setting())
    assert sum(parts.values()) == pytest.approx(step_model.step_parts("bf16 compiled")["step"]), "by definition"
    assert 0.03 < parts["generated"] < 0.1, "more than a copy of their bytes takes, less than half of attention"


def test_stored_table_is_current(result: dict[str, Any]) -> None:
    stored = json.loads((RESULTS / "step_model.json").read_text())
    assert stored == json.loads(json.dumps(result)), "python benchmarks/step_model.py --json FILE"


def test_results_page_has_the_table(result: dict[str, Any]) -> None:
    page = (ROOT.parent / "docs/results.md").read_text()
    for r in (*result["rows"], *result["further"]):
        cells = (f"`{r['recipe']}`", r["lever"], f"{r['ms']:.0f}", f"{r['over_first']:.2f}", f"{r['over_third']:.2f}")
        assert f"| {' | '.join(cells)} |" in page
    assert f"it is {100 * result['error']:+.1f} % off" in page
    last = {
        key: {r["recipe"]: r["over_first"] for r in result[key] if "attention" not in r["lever"]}
        for key in ("rows", "further")
    }
    preset, built = last["rows"], last["further"]
    reached, missed = (f"{preset[recipe]:.2f}" for recipe in ("blockwise", "tensorwise"))
    assert f"the preset reaches the first ({reached}) and misses the second ({missed})" in page
    assert f"`blockwise` reaches {built['blockwise']:.2f} and `tensorwise` {built['tensorwise']:.3f}" in page
    assert f"predicts {min(preset.values()):.2f} to {max(preset.values()):.2f} times" in page


def test_rows_are_cumulative_and_end_with_what_stands(result: dict[str, Any]) -> None:
    for recipe in step_model.RECIPES:
        standing, further = ([r for r in result[key] if r["recipe"] == recipe] for key in ("rows", "further"))
        assert [r["lever"] for r in standing] == [lever.name for lever in step_model.LEVERS]
        assert all(r["gain_ms"] > 0 for r in (*standing[1:], *further)), "a lever that slows the step down is none"
        for r in (*standing, *further):
            assert sum(r["parts_ms"].values()) == pytest.approx(r["ms"], abs=0.5)
            assert r["over_bf16_compiled"] == r["over_first"] > r["over_third"] > 1


def test_levers_are_the_keys_of_the_preset_and_have_their_operators(result: dict[str, Any]) -> None:
    """A lever stands only if a block that `preset: fast` builds has its operators; test_compile.py finds them there."""
    changed = {key for lever in step_model.LEVERS for key in lever.change}
    keys = {"fuse": "fused", "lm_head": "fp8_head", "states": "fp8_moments"}
    assert {keys[str(key)] for _, key in PRESETS["fast"] if key != "compile"} == changed
    stored = json.loads((RESULTS / "block_bytes.json").read_text())["rows"]
    calls = {row["candidate"]: row["calls"].keys() for row in stored}
    for recipe in step_model.RECIPES:
        wanted = {call for lever in step_model.LEVERS for call in lever.calls} - step_model.OUTSIDE_BLOCKS
        assert wanted == calls[f"{recipe} fused"], recipe


def test_no_fused_layer_is_slower_than_its_parts(result: dict[str, Any]) -> None:
    """So that a plan needs no rule for it: if this fails, the plan must not fuse those layers."""
    for recipe in step_model.RECIPES:
        plain, fused = (step_model.block(name) for name in (recipe, f"{recipe} fused"))
        parts = step_model.PARTS.values()
        assert sum(p.generated - p.left for p in parts) == pytest.approx(
            plain["generated"] - fused["generated"], abs=1.1
        )
        assert sum(p.cast for p in parts) == pytest.approx(plain["cast"] - fused["cast"], abs=0.5)
    assert len(result["fusion"]) == 2 * len(step_model.RECIPES) * len(step_model.PARTS)
    ties = 1.005  # rowwise writes results and casts them apart, as its parts do: with fast generated kernels, a tie
    assert not [row for row in result["fusion"] if row["fused_us"] > row["parts_us"] * (ties if row["fast"] else 1)]


def test_fraction_of_a_copy_falls_with_instructions() -> None:
    points = step_model.timed_kernels()
    offset, slope = step_model.fit_fraction()
    assert slope < 0 and len(points) == len(step_model.TIMED)
    misses = [abs(offset + slope * float(p["share"]) - float(p["fraction"])) for p in points]
    assert max(misses) < 0.1, "a line describes the kernels that were timed"
    for kernel in step_model.NOW.values():
        assert 0.4 < step_model.fraction(kernel) < 1


def test_command_prints_the_table_and_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    words = [sys.executable, "benchmarks/step_model.py", "--json", file]
    done = subprocess.run(words, cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert "BF16 compiled 796.7 ms (measured)" in done.stdout and "moments in FP8" in done.stdout
    last = json.loads(file.read_text())["rows"][-1]
    assert last["recipe"] == step_model.RECIPES[-1] and f"{last['over_first']:.3f}" in done.stdout


def test_json_is_printed_or_refused_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["step_model.py", "--json"])
    step_model.main()
    assert json.loads(capsys.readouterr().out)["rows"]
    monkeypatch.setattr(sys, "argv", ["step_model.py", "--json", str(tmp_path / "none" / "x.json")])
    with pytest.raises(SystemExit):
        step_model.main()
    assert "No such file or directory" in capsys.readouterr().err
