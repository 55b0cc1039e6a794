"""The gain window: it says what FP8 gained, and leaves no trace in the run."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import numpy
import pytest
import torch
from rich.console import Console

from octavo import fp8, train
from octavo.checkpoint.run_state.files import read_state
from octavo.cli.train import print_result
from octavo.config import override
from octavo.train.callbacks import fp8_gain
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.step.step import Stepper
from tests.train.conftest import at
from tests.train.test_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")
SIX = ("train.steps=6", "data.eval=[]")


@pytest.fixture(scope="module")
def kept() -> dict[str, train.RunResult]:
    return {}


@pytest.fixture
def plain(make, recipe: str, kept: dict[str, train.RunResult]) -> train.RunResult:
    """Six steps in this recipe without a window; trained once."""
    if recipe not in kept:
        kept[recipe] = train.run(make(f"fp8.recipe={recipe}", *SIX, dir="plain"))
    return kept[recipe]


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize("recipe", ["blockwise", pytest.param("delayed", marks=pytest.mark.long)])
def test_gain_window_does_not_change_losses(make, recipe: str, plain, monkeypatch):
    real = fp8_gain._run_step

    def run(stepper, batches):  # a model with dropout would draw as much
        torch.rand(3), random.random(), numpy.random.rand()
        real(stepper, batches)

    monkeypatch.setattr(fp8_gain, "_run_step", run)
    assert plain.gain is None and not (plain.dir / "gain.json").exists(), "nobody asked for it"
    cfg = make(f"fp8.recipe={recipe}", *SIX, "run.gain_steps=2")
    first = train.run(cfg, callbacks=[at(4, signal.SIGTERM)])
    assert first.steps == 5 and first.gain["step"] == 3
    second = train.run(override(cfg, ["run.resume=auto"]))
    assert second.losses() == plain.losses() and second.gain == first.gain
    rows, theirs = (read_rows(r.dir / "metrics.jsonl") for r in (second, plain))
    assert [row["step"] for row in rows if "gain" in row] == [3]
    assert [r["grad_norm"] for r in rows] == [r["grad_norm"] for r in theirs]
    ours, plain_state = (read_state(r.dir / "checkpoints" / "step_6") for r in (second, plain))
    assert ours["counters"]["rows"] == plain_state["counters"]["rows"]


def test_the_random_generators_are_put_back(make, monkeypatch):
    real = fp8_gain._run_step
    monkeypatch.setattr(
        fp8_gain, "_run_step", lambda *args: (torch.rand(3), random.random(), numpy.random.rand(), real(*args))
    )
    cfg = make("run.gain_steps=1", "train.steps=1", "train.warmup=0", "data.eval=[]")
    drawn = []
    for asked in (cfg, override(cfg, ["run.gain_steps=0", f"run.dir={cfg.run.dir}-plain"])):
        train.run(asked)
        drawn.append((torch.rand(1).item(), random.random(), numpy.random.rand()))
    assert drawn[0] == drawn[1]


def test_gain_is_reported_and_saved(make):
    console = Console(record=True, width=200, force_terminal=False)
    result = train.run(make("run.gain_steps=3", "train.steps=2", "train.warmup=0", "data.eval=[]"), console=console)
    kept = json.loads((result.dir / "gain.json").read_text())
    assert kept == dict(result.gain) and kept["steps"] == 3 and kept["step"] == 2  # the run ends before it is warm
    assert kept["gain"] == pytest.approx(kept["high_s"] / kept["fp8_s"] - 1) and kept["tokens"] > 0
    text = console.export_text()
    assert "warning: FP8 is slower here" in text and "Without a GPU it is emulated" in text and "--measure" not in text
    assert json.loads((result.dir / "result.json").read_text())["gain"] == kept


def test_a_stop_inside_the_window_is_obeyed_and_the_step_is_kept(make, monkeypatch):
    """SIGTERM in the third of ten passes: step 3 has its row and its checkpoint already, no fourth pass is made."""
    real, passes = fp8_gain._run_step, []
    over = ("train.steps=4", "data.eval=[]", "run.log_every=50", "run.save_every=3", "run.keep=9")
    cfg = make(*over, "run.gain_steps=4", "run.tensorboard=true")

    def run(stepper, batches):
        passes.append((Path(cfg.run.dir) / "checkpoints" / "step_3").is_dir())
        if len(passes) == 3:
            assert [row["step"] for row in read_rows(Path(cfg.run.dir) / "metrics.jsonl")][-1] == 3
            os.kill(os.getpid(), signal.SIGTERM)
        real(stepper, batches)

    plain = train.run(make(*over, dir="plain"))
    monkeypatch.setattr(fp8_gain, "_run_step", run)
    console = Console(record=True, width=300, force_terminal=False)
    first = train.run(cfg, console=console)
    assert passes == [True] * 3 and first.status == "stopped" and first.steps == 3 and first.gain is None
    assert "gain window: running the micro-batches of step 3 again, 4 times in FP8" in console.export_text()
    second = train.run(override(cfg, ["run.resume=auto"]))
    assert second.gain["step"] == 4 and second.final["loss"] == plain.final["loss"]
    assert [row["step"] for row in read_rows(second.dir / "metrics.jsonl") if "gain" in row] == [4]


@pytest.mark.long
def test_gain_window_is_repeated_with_its_steps(make):
    cfg = make("run.gain_steps=1", "run.save_every=2", "run.keep=9", "train.steps=5", "data.eval=[]")
    first = train.run(cfg, callbacks=[at(4, signal.SIGTERM)])
    assert first.gain["step"] == 3
    again = train.run(override(cfg, [f"run.resume={first.dir}/checkpoints/step_2"]))
    assert again.gain["step"] == 5
    assert [row["step"] for row in read_rows(again.dir / "metrics.jsonl") if "gain" in row] == [5]


def test_gain_window_alternates_the_order_of_precisions(make, monkeypatch):
    seen, real = [], fp8_gain._run_step

    def run(stepper, batches):
        layer = next(m for n, m in stepper.model.named_modules() if n.endswith("layers.0.mlp.up_proj"))
        seen.append("8" if isinstance(layer, fp8.Linear) else "h")
        real(stepper, batches)

    monkeypatch.setattr(fp8_gain, "_run_step", run)
    ticks = iter(range(1000))
    monkeypatch.setattr(fp8_gain.measure, "__defaults__", (lambda: False, lambda: float(next(ticks))))
    result = train.run(make("run.gain_steps=3", "train.steps=1", "train.warmup=0", "data.eval=[]"))
    assert "".join(seen) == "8h" + "h8" + "8h" + "h8"
    assert result.gain["gain"] == 0.0


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize("recipe", ["blockwise", pytest.param("delayed", marks=pytest.mark.long)])
def test_a_window_without_the_memory_is_noted_and_changes_nothing(make, monkeypatch, plain, recipe):
    real, passes = fp8_gain._run_step, []

    def run(stepper, batches):
        passes.append(len(batches))
        if len(passes) > 1:
            stepper.backward(batches[0], 1.0)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        real(stepper, batches)

    monkeypatch.setattr(fp8_gain, "_run_step", run)
    console = Console(record=True, width=300, force_terminal=False)
    cfg = make(f"fp8.recipe={recipe}", *SIX, "run.gain_steps=2", "run.tensorboard=true")
    result = train.run(cfg, console=console, callbacks=[at(4, signal.SIGTERM)])
    result = train.run(override(cfg, ["run.resume=auto"]), console=console)
    assert result.losses() == plain.losses() and len(passes) == 2
    why = "the gain window ran out of memory in high precision (CUDA out of memory. Tried to allocate 2 GiB)"
    assert json.loads((result.dir / "gain.json").read_text()) == {"failed": why, "step": 3} == dict(result.gain)
    assert why in console.export_text() and not any("gain" in r for r in read_rows(result.dir / "metrics.jsonl"))
    print_result(result, "sft")  # as octavo train says it


def test_another_error_in_the_window_is_not_hidden(make, monkeypatch):
    def run(stepper, batches):
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(fp8_gain, "_run_step", run)
    with pytest.raises(RuntimeError, match="device-side assert"):
        train.run(make("run.gain_steps=1", "train.steps=1", "train.warmup=0", "data.eval=[]"))


def test_micro_batches_have_the_shares_of_the_step(make, monkeypatch):
    """The load-balancing loss is added once, not once a micro-batch."""
    shares, real, inside = [], Stepper.compute_loss, []

    def loss(self, batch, denominator, share=1.0, memory=None):
        (inside if memory is None and denominator == 1.0 else shares).append(share)
        return real(self, batch, denominator, share, memory)

    monkeypatch.setattr(Stepper, "compute_loss", loss)
    train.run(make("run.gain_steps=1", "train.steps=1", "train.warmup=0", "train.micro_batch=1", "data.eval=[]"))
    assert len(shares) == 4 and inside == shares * 4


def test_gain_window_is_off_without_fp8_layers(make):
    console = Console(record=True, width=200, force_terminal=False)
    over = ("run.gain_steps=2", "fp8.recipe=off", "train.steps=1", "train.warmup=0", "data.eval=[]")
    result = train.run(make(*over), console=console)
    assert result.gain is None and not (result.dir / "gain.json").exists()
    assert "nothing of this run is in FP8, so there is no gain to measure" in console.export_text()


@pytest.mark.long
def test_two_ranks_measure_together_and_train_on_as_before(make):
    """Sharded weights, gathered in both precisions; a rank without an image runs its dummy in both."""
    over = ("train.steps=4", "data.eval=[]", "train.micro_batch=1")
    plain, asked = make(*over, dir="plain"), make(*over, "run.gain_steps=2", dir="asked")
    for cfg in (plain, asked):
        on_ranks(cfg)
    rows, theirs = (read_rows(Path(cfg.run.dir) / "metrics.jsonl") for cfg in (asked, plain))
    assert [r["loss"] for r in rows] == [r["loss"] for r in theirs]
    assert [r["step"] for r in rows if "gain" in r] == [3] and rows[2]["gain"]["gain"] < 0  # a CPU emulates FP8
