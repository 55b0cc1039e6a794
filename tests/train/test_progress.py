"""What a terminal, lines and TensorBoard show of steps in each phase."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from octavo.cli.train import print_result
from octavo.train.callbacks.checkpointing import save_interval
from octavo.train.callbacks.metrics import MetricsLog
from octavo.train.callbacks.progress import Display

SFT = {"step": 1, "loss": 0.5, "lr": 1e-3, "tokens_per_s": 1500.0}
RL = SFT | {"loss": 1e-9, "reward": 0.25, "length": 7.5, "rollout_tokens_per_s": 900.0, "training_tokens_per_s": 4000.0}
PAIRS = SFT | {"rewards/accuracies": 0.75, "rewards/margins": 0.125}
TOLD = {
    "sft": (SFT, "loss 0.5000  lr 1.00e-03  1500 tokens/s"),
    "rl": (RL, "reward 0.250  length 7.5  tokens/s 900 rollout, 4000 training"),
    "preference": (PAIRS, "preference loss 0.5000  accuracy 75.0%  margin 0.125  lr 1.00e-03  1500 tokens/s"),
    "nothing": (
        {
            **RL,
            "reward": None,
            "length": None,
            "eval": {"answer_loss": 0.5, "exact_match": 0, "questions": 1, "reward": None},
        },
        "reward -  length -  tokens/s 900 rollout, 4000 training  held-out answer loss 0.5000  held-out reward -",
    ),
    "exact match as a reward": (
        {
            **RL,
            "eval": {
                "answer_loss": 0.5,
                "exact_match": 0.25,
                "questions": 4,
                "reward": 1,
                "rewards/exact_match/mean": 1,
            },
        },
        "reward 0.250  length 7.5  tokens/s 900 rollout, 4000 training  held-out answer loss 0.5000, "
        "exact match 25.0% of 4  held-out reward 1.000",
    ),
    "evaluation of sft": (
        SFT | {"eval": {"loss": 0.5, "exact_match": 0.25, "questions": 4}},
        "loss 0.5000  lr 1.00e-03  1500 tokens/s  eval loss 0.5000, exact match 25.0% of 4",
    ),
    "evaluation of preferences": (
        PAIRS | {"eval": {"answer_loss": 2.5, "questions": 4, "preference_loss": 0.25, "rewards/accuracies": 1.0}},
        "preference loss 0.5000  accuracy 75.0%  margin 0.125  lr 1.00e-03  1500 tokens/s  "
        "held-out preference loss 0.2500  held-out answer loss 2.5000  held-out accuracy 100.0%",
    ),
    "no pairs": (
        SFT | dict.fromkeys(("rewards/accuracies", "rewards/margins")),
        "preference loss 0.5000  accuracy -  margin -  lr 1.00e-03  1500 tokens/s",
    ),
    "kto": (SFT | {"rewards/margins": 0.125}, "preference loss 0.5000  margin 0.125  lr 1.00e-03  1500 tokens/s"),
}


@pytest.mark.parametrize("phase", TOLD)
def test_progress_lines_show_the_figures_of_a_phase(phase: str) -> None:
    row, text = TOLD[phase]
    console = Console(record=True, width=200, force_terminal=False, file=io.StringIO())
    display = Display(console, "")
    display.begin(0, 3)
    display.show_part("rollout 1/2")  # is for bars alone
    display.step(row)
    assert console.export_text().strip() == f"step 1/3  {text}"


def test_progress_bar_shows_the_current_part_of_a_step() -> None:
    console = Console(width=200, force_terminal=True, file=io.StringIO())
    display = Display(console, "")
    display.begin(0, 3)
    try:
        task = display._bar.tasks[0]
        display.show_part("rollout 3/8")
        assert task.fields["figures"].strip() == "rollout 3/8"
        display.step(RL)
        assert task.fields["figures"] == TOLD["rl"][1] and task.completed == 1
        display.show_part("training")
        assert task.fields["figures"] == f"training  {TOLD['rl'][1]}"
    finally:
        display.end()


def test_tensorboard_has_a_figure_under_one_name(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, True, 1, {"length": "completions/mean_length"})
    log.write(RL)
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = {f"train/{key}" for key in RL if key not in ("step", "length")} | {"train/completions/mean_length"}
    assert set(events.Tags()["scalars"]) == tags
    assert events.Scalars("train/completions/mean_length")[0].value == 7.5
    assert '"length": 7.5' in (tmp_path / "metrics.jsonl").read_text()


def test_the_closing_lines_say_the_reward_and_not_the_loss_of_rl(capsys) -> None:
    def closing(final: dict, phase: str, held_out: dict | None = None, ended_early: bool = False) -> str:
        ended = {"status": "finished", "steps": 3, "dir": "run", "eval": held_out, "gain": None, "skipped": 0}
        ended |= {"overflowed": 2, "eval_step": 2 if ended_early else 3}
        print_result(SimpleNamespace(final=final, **ended), phase)
        return capsys.readouterr().out

    assert "reward " in (said := closing(RL, "rl")) and "loss" not in said and "rollout_tokens_per_s" in said
    assert "rewards/accuracies  0.75" in (said := closing(PAIRS, "preference")) and "rewards/margins" in said
    assert "  preference loss " in said and "\n  loss" not in said
    old = {"loss": 3.25, "questions": 5, "preferences": 5}  # as an earlier version wrote it
    now = {"preference_loss": 0.5, "rewards/margins": 0.1, "rewards/accuracies": 0.6, **old}
    lines = closing(PAIRS, "preference", now).splitlines()
    assert [line.split()[:3] for line in lines if "held-out" in line] == [
        ["held-out", "preference", "loss"], ["held-out", "answer", "loss"], ["held-out", "preferences", "60.0"]
    ]  # fmt: skip
    # The other figures of a stopped run are of its last step.
    lines = closing(SFT, "sft", old, ended_early=True).splitlines()
    assert [line.split()[:2] for line in lines if line.endswith("(after step 2)")] == [["held-out", "loss"]]
    assert "after step 2" not in closing(SFT, "sft", old)
    assert "held-out loss" in closing(SFT, "sft", old) and "held-out answer loss" in closing(RL, "rl", old)
    assert "reward" not in (said := closing(SFT, "sft")) and "FP16 overflows  2 steps skipped" in said


@pytest.mark.parametrize(
    ("steps", "asked", "every"), [(40, "null", 50), (500, "null", 50), (501, "null", 51), (9, "0", 0), (9, "3", 3)]
)
def test_steps_between_checkpoints(make, steps: int, asked: str, every: int) -> None:
    cfg = make(f"train.steps={steps}", f"run.save_every={asked}")
    assert save_interval(cfg) == every
