"""What people see of runs in these phases: TensorBoard, the terminal, evaluation, and a whole trial with its page."""

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


def test_a_run_under_trl_names_and_its_parts_on_the_terminal(reinforcing: Make, place: Path, monkeypatch) -> None:
    test = f"data.eval=[{{path: {place / 'digits' / 'test.json'}, max_samples: 4}}]"
    critic = ("rl.algorithm=ppo", "rl.eval_prompts=3")
    cfg = reinforcing(*critic, "run.tensorboard=true", "train.steps=2", "train.warmup=1", test)
    heard: list[str] = []
    monkeypatch.setattr("octavo.train.callbacks.progress.Display.doing", lambda self, what: heard.append(what))
    result = rl.run(cfg, console=Console(file=io.StringIO()), describe_plan=lambda planned: ())
    rows = read_rows(result.dir / "metrics.jsonl")
    assert all(row["training_tokens_per_s"] > 0 < row["rollout_tokens_per_s"] for row in rows)
    events = EventAccumulator(str(result.dir / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    for ours, theirs in TRL_NAMES.items():
        assert f"train/{ours}" not in tags, "a figure has one name"
        assert [e.value for e in events.Scalars(f"train/{theirs}")] == pytest.approx([row[ours] for row in rows])
    assert {"train/reward", "train/entropy", "train/rewards/regex/mean", "eval/exact_match", "eval/reward"} <= tags
    assert "eval/completions/mean_length" in tags and "eval/length" not in tags, "nor two in two places"
    assert list(dict.fromkeys(what.split()[0] for what in heard)) == ["rollout", "rewards", "training", "held-out"]
    assert heard.count("training") == 2 and "rollout 16/16" in heard
    again = rl.evaluate_target(artifacts.inspect_target(result.dir), answers=3)
    assert again["completions"] == 3 and {key: again[key] for key in result.eval} == pytest.approx(dict(result.eval))


@pytest.mark.parametrize("over", [(), ("rl.algorithm=ppo", "rl.kl=0.1"), ("rl.stale=1",)], ids=["grpo", "ppo", "stale"])
def test_a_step_without_completions_has_no_reward(reinforcing: Make, place: Path, tmp_path: Path, over: tuple) -> None:
    """Not one of 0: of two steps of a prompt each, the image of one is not there."""
    rows = json.loads((place / "digits" / "train.json").read_text())[:2]
    rows[1]["image"] = "gone.png"
    for name, own in (("train", rows), ("held_out", rows[::-1])):
        (tmp_path / f"{name}.json").write_text(json.dumps(own))
    train, held_out = (
        f"[{{path: {tmp_path / name}.json, images: {place / 'digits'}}}]" for name in ("train", "held_out")
    )
    step = ("rl.prompts=1", "rl.eval_prompts=1", "train.micro_batch=4", "train.steps=2", "train.warmup=1")
    cfg = reinforcing(f"data.train={train}", f"data.eval={held_out}", *step, *over, "data.on_bad_sample=skip",
                      "run.tensorboard=true", "fp8.recipe=off")  # fmt: skip
    result = rl.run(cfg)
    rows = read_rows(result.dir / "metrics.jsonl")
    (there,), (empty,) = ([row for row in rows if row.get("empty") == of] for of in (None, True))
    of_tokens = ("reward", "reward_std", "length", "rewards/regex/mean", "entropy", "kl", "logp_gap_max")
    assert all(there[name] is not None for name in of_tokens if name != "kl")
    assert {*empty} ^ {*there} <= {"empty", "eval", "memory"}
    assert [empty[name] for name in of_tokens] == [None] * len(of_tokens)
    assert result.eval["reward"] is None and result.eval["completions"] == 0
    record = run_reader.read(result.dir)
    assert [math.isnan(value) for value in record.figures["reward"]] == [row is empty for row in rows]
    learning_figure([Side("one", "base", [record, record])], PANELS["rl"])
    events = EventAccumulator(str(result.dir / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/reward")] == [there["step"]]


@pytest.mark.long
@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("phase", ["rl", "preference"])
def test_a_whole_trial(reinforcing: Make, preferring: Make, place: Path, tmp_path: Path, phase: str) -> None:
    test = f"data.eval=[{{path: {place / 'digits' / 'test.json'}, max_samples: 8}}]"
    cfg = preferring("run.health_every=2", test)
    if phase == "rl":
        cfg = reinforcing("run.health_every=2", "rl.algorithm=ppo", test)
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
