"""Trials of a configuration with stages: what is reused, and what their runs train."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from octavo import bisect, rl
from octavo.cli.main import main
from octavo.config import Config, load_config, override, to_yaml
from octavo.config.stages import stage_configs
from octavo.data.builtin import digits
from octavo.models.tiny import tiny
from octavo.report import ReportError
from octavo.report.evidence.trial_spec import Run
from octavo.report.run.time_left import count_steps
from octavo.report.trial.memory_savings import without_savings
from octavo.report.trial.reuse import check_reusable, check_same_files
from octavo.train.setup.resolve_config import resolve_steps


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    tiny.write("qwen3", tmp_path / "model", size="mini")
    digits.write(tmp_path / "digits", train=8, test=2)
    stage = {"steps": 1, "data": {"train": [{"path": "digits/test_text.json"}]}}
    return load_config({
        "model": {"path": "model"},
        "fp8": {"recipe": "blockwise"},
        "data": {"train": [{"path": "digits/train_text.json", "max_samples": 8}]},
        "train": {"seq_length": 128, "global_batch": 2, "recompute": "full", "stages": [stage, {"epochs": 0.5}]},
        "run": {"dir": "arms/fp8", "threads": 1, "tensorboard": False, "hf": False},
    })  # fmt: skip


def arm(cfg: Config) -> Run:
    return Run("fp8", "FP8", "fp8", cfg)


def test_changed_stages_are_not_reused(cfg: Config, tmp_path: Path) -> None:
    cfg = resolve_steps(cfg)
    assert [stage.train.steps for stage in stage_configs(cfg)] == [1, 2] and cfg.train.steps == 2
    rl.run(cfg)
    assert arm(cfg).all_steps == 3 == count_steps(arm(cfg))
    check_reusable(arm(cfg))
    check_reusable(arm(override(cfg, [f"run.dir={tmp_path / 'arms/fp8'}"])))
    for change in ("train.stages.0.lr=0.5", "train.stages.1.lr=0.5", "train.stages=[{steps: 2}]"):
        with pytest.raises(ReportError, match="was trained with another configuration"):
            check_reusable(arm(override(cfg, [change])))


def test_data_of_every_stage_are_compared(cfg: Config, tmp_path: Path) -> None:
    check_same_files(cfg, tmp_path)
    check_same_files(cfg, tmp_path)
    file = tmp_path / "digits/test_text.json"
    file.write_text(json.dumps(json.loads(file.read_text())[:1]))
    with pytest.raises(ReportError, match=r"test_text.json.*--fresh"):
        check_same_files(cfg, tmp_path)


def test_savings_of_stages_are_removed(cfg: Config) -> None:
    staged = [override(cfg, ["train.recompute=none", f"train.stages.{number}.recompute=full"]) for number in (0, 1)]
    for one in (cfg, *staged):
        assert {stage.train.recompute.foundation for stage in stage_configs(without_savings(one))} == {"none"}


def test_commands_take_one_stage(cfg: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(bisect.BisectError, match="a search trains one stage, and the configuration has 2"):
        bisect.bisect(cfg, tmp_path / "search")
    file = tmp_path / "stages.yaml"
    file.write_text(to_yaml(cfg))
    assert main(["plan", str(file), "--stage", "1"]) == 0
    assert "this is stage" not in capsys.readouterr().err
    assert main(["plan", str(file)]) == 0
    assert "this is stage 2 of 2; --stage plans another" in capsys.readouterr().err
    assert main(["plan", str(file), "--stage", "3"]) == 2
    assert "--stage 3: the configuration has 2 stages" in capsys.readouterr().err


def test_proposal_for_a_stage_has_the_keys_of_that_stage(
    cfg: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stages.yaml"
    file.write_text(to_yaml(override(cfg, [f"train.stages.{n}.micro_batch={1 + n}" for n in (0, 1)])))
    assert main(["plan", str(file), "--stage", "1", "--fit", "24GB"]) == 0
    shown = capsys.readouterr().out
    (command,) = (line for line in shown.splitlines() if line.startswith("on the command line: "))
    pairs = [word for word in shlex.split(command) if "=" in word]
    assert any(pair.startswith("train.stages.0.micro_batch=") for pair in pairs), command
    assert "# in train.stages.0:" in shown and "train.micro_batch=" not in shown
    changed = load_config(file, pairs)
    assert changed.train.stages[0] != cfg.train.stages[0] and changed.train.stages[1].micro_batch == 2
    assert main(["plan", str(file), "--stage", "1", "--fit", "24GB", "train.stages.0.micro_batch=1"]) == 0
    shown = capsys.readouterr().out
    assert "micro_batch=" not in shown.replace("train.stages.0.micro_batch=1", "")
