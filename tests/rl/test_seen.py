"""User-visible output of phases rl and preference: TensorBoard, the terminal, evaluation, and a trial with its page."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from octavo import report, rl
from octavo.config import Config
from octavo.report.evidence import rl_claims, run_reader
from octavo.report.evidence.rl_claims import PANELS
from octavo.report.trial.rl_plots import Side, learning_figure
from octavo.rl.objectives.metrics import TRL_NAMES
from octavo.train import artifacts
from octavo.train.run_dir.run_dir import read_rows

pytestmark = pytest.mark.usefixtures("bare_forward")

Make = Callable[..., Config]


def test_tensorboard_uses_trl_names_and_terminal_shows_progress(rl_config: Make, place: Path, monkeypatch) -> None:
    test = f"data.eval=[{{path: {place / 'digits' / 'test.json'}, max_samples: 4}}]"
    critic = ("rl.algorithm=ppo", "rl.eval_prompts=3")
    cfg = rl_config(*critic, "run.tensorboard=true", "train.steps=2", "train.warmup=1", test)
    phases: list[str] = []
    monkeypatch.setattr("octavo.train.callbacks.progress.Display.show_part", lambda self, what: phases.append(what))
    result = rl.run(cfg, console=Console(file=io.StringIO()), describe_plan=lambda planned: ())
    rows = read_rows(result.dir / "metrics.jsonl")
    assert all(row["training_tokens_per_s"] > 0 < row["rollout_tokens_per_s"] for row in rows)
    events = EventAccumulator(str(result.dir / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    for name, trl_name in TRL_NAMES.items():
        assert f"train/{name}" not in tags, "each figure has one name"
        assert [e.value for e in events.Scalars(f"train/{trl_name}")] == pytest.approx([row[name] for row in rows])
    assert {"train/reward", "train/entropy", "train/rewards/regex/mean", "eval/exact_match", "eval/reward"} <= tags
    assert "eval/completions/mean_length" in tags and "eval/length" not in tags, "also in eval/"
    assert list(dict.fromkeys(what.split()[0] for what in phases)) == ["rollout", "rewards", "training", "held-out"]
    assert phases.count("training") == 2 and "rollout 16/16" in phases
    again = rl.evaluate_target(artifacts.inspect_target(result.dir), answers=3)
    assert again["completions"] == 3 and {key: again[key] for key in result.eval} == pytest.approx(dict(result.eval))


@pytest.mark.parametrize(
    "overrides", [(), ("rl.algorithm=ppo", "rl.kl=0.1"), ("rl.stale=1",)], ids=["grpo", "ppo", "stale"]
)
def test_step_without_completions_has_no_reward(rl_config: Make, place: Path, tmp_path: Path, overrides: tuple) -> None:
    """One of two steps has a prompt whose image is missing; its reward is None, not 0."""
    rows = json.loads((place / "digits" / "train.json").read_text())[:2]
    rows[1]["image"] = "missing.png"
    for name, split in (("train", rows), ("held_out", rows[::-1])):
        (tmp_path / f"{name}.json").write_text(json.dumps(split))
    train, held_out = (
        f"[{{path: {tmp_path / name}.json, images: {place / 'digits'}}}]" for name in ("train", "held_out")
    )
    step = ("rl.prompts=1", "rl.eval_prompts=1", "train.micro_batch=4", "train.steps=2", "train.warmup=1")
    cfg = rl_config(f"data.train={train}", f"data.eval={held_out}", *step, *overrides, "data.on_bad_sample=skip",
                      "run.tensorboard=true", "fp8.recipe=off")  # fmt: skip
    result = rl.run(cfg)
    rows = read_rows(result.dir / "metrics.jsonl")
    (full,), (empty,) = ([row for row in rows if row.get("empty") == flag] for flag in (None, True))
    names = ("reward", "reward_std", "length", "rewards/regex/mean", "entropy", "kl", "logp_gap_max")
    assert all(full[name] is not None for name in names if name != "kl")
    assert {*empty} ^ {*full} <= {"empty", "eval", "memory"}
    assert [empty[name] for name in names] == [None] * len(names)
    assert result.eval["reward"] is None and result.eval["completions"] == 0
    record = run_reader.read(result.dir)
    assert [math.isnan(value) for value in record.figures["reward"]] == [row is empty for row in rows]
    learning_figure([Side("one", "base", [record, record])], PANELS["rl"])
    events = EventAccumulator(str(result.dir / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/reward")] == [full["step"]]


@pytest.mark.long
@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("phase", ["rl", "preference"])
def test_trial_of_each_phase(rl_config: Make, preference_config: Make, place: Path, tmp_path: Path, phase: str) -> None:
    test = f"data.eval=[{{path: {place / 'digits' / 'test.json'}, max_samples: 8}}]"
    cfg = preference_config("run.health_every=2", test)
    if phase == "rl":
        cfg = rl_config("run.health_every=2", "rl.algorithm=ppo", test)
    verdict = report.compare(cfg, None, tmp_path / "trial", seeds=2)
    assert [claim.name for claim in verdict.claims] == list(rl_claims.CLAIMS)
    data = json.loads((tmp_path / "trial" / "report" / "report.json").read_text())
    assert [run["kind"] for run in data["arms"]] == ["reference", "noise", "fp8", "seed"]
    assert all(run["eval"]["questions"] == data["before"]["questions"] for run in data["arms"])
    gap = next(claim for claim in verdict.claims if claim.name == "reward_gap")
    assert gap.low <= gap.figure <= gap.high
    assert {check.status for check in verdict.checks if check.name == "same_data"} == {"pass"}
    if phase == "rl":
        assert [step["step"] for step in data["completions"][0]["steps"]] == [1, 2, 3]
        first = data["completions"][0]["steps"][0]["rows"]
        assert len(first) == cfg.rl.show and all(row["high"] and row["fp8"] for row in first)
