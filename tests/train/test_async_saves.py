"""`run.save: async` in a run: losses, checkpoints and ends are the same as where a save is waited for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from octavo import checkpoint, train
from octavo.checkpoint.run_state import background
from octavo.checkpoint.run_state.files import read_state
from octavo.checkpoint.run_state.staging import Staging
from octavo.checkpoint.run_state.tensor_names import local_tensors
from octavo.config import override
from octavo.train.estimate.memory import states
from octavo.train.run_dir.run_dir import read_rows
from tests import ranks

from .conftest import Rows, at

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

ASYNC = "run.save=async"
OFTEN = ("run.save_every=2", "run.keep=9", "data.eval=[]", "train.steps=4")
LORA = (
    "lora={rank: 4}", "model.load_in_fp8=blockwise", "optimizer.states=fp8", "run.milestones=[2]",
)  # fmt: skip
WEIGHTS = ("fp8.param=true", "optimizer.states=fp8", "optimizer.master=bf16+16")


def sums(folder: Path) -> dict[str, dict]:
    """step -> checksums of the files with its tensors."""
    return {p.name: read_state(p)["files"] for p in sorted(folder.iterdir()) if p.name.startswith("step_")}


def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the bytes of model and optimizer in each copy that is made."""
    found: list[int] = []
    copy = Staging.copy

    def counted(self: Staging, moment: checkpoint.Snapshot) -> checkpoint.Snapshot:
        found.append(sum(tensor.nbytes for _, tensor in local_tensors(moment.tensors)))
        return copy(self, moment)

    monkeypatch.setattr(Staging, "copy", counted)
    return found


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.3) -> None:
    """A disk that takes its time with the first tensor of each checkpoint."""
    write = background.write

    def late(*given):
        time.sleep(seconds)
        return write(*given)

    monkeypatch.setattr(background, "write", late)


@pytest.mark.parametrize(
    "over", [WEIGHTS, pytest.param(LORA, marks=pytest.mark.long)], ids=["fp8 weights and states", "lora"]
)
def test_async_checkpoints_equal_synchronous_ones(make, monkeypatch, over) -> None:
    awaited = train.run(make(*OFTEN, *over, dir="awaited"))
    slow(monkeypatch)
    sizes = copied(monkeypatch)
    heard: list[tuple[int, str]] = []

    class Listener(train.Callback):
        def begin(self, run: train.Run) -> None:
            of = states.list_parameters(run.model, run.job.stepper.family)
            self.predicted = states.checkpoint_bytes(run.cfg, of)

        def saved(self, run: train.Run, path: Path) -> None:
            heard.append((run.step, path.name))

    beside = train.run(make(*OFTEN, *over, ASYNC, dir="beside"), callbacks=[listener := Listener()])
    assert beside.losses() == awaited.losses()
    assert sums(beside.dir / "checkpoints") == sums(awaited.dir / "checkpoints")
    assert [name for _, name in heard] == ["step_2", "step_4"] and heard[0][0] > 2  # the next step did not wait
    assert set(sizes) == {listener.predicted}
    rows = read_rows(beside.dir / "metrics.jsonl")
    assert all(row["save_seconds"] > 0 for row in rows if row["step"] == 3)
    if over is LORA:
        assert sums(beside.dir / "milestones") == sums(awaited.dir / "milestones") != {}
    again = make(*OFTEN, *over, f"run.resume={beside.dir / 'checkpoints' / 'step_2'}", dir="again")
    assert list(train.run(again).losses().values()) == list(awaited.losses().values())[2:]


def test_signal_waits_for_the_write_and_saves_again(make, monkeypatch) -> None:
    cfg = make("run.save_every=2", "data.eval=[]", ASYNC)
    slow(monkeypatch)
    first = train.run(cfg, callbacks=[at(2, signal.SIGTERM)])
    assert (first.status, first.exit_code) == ("stopped", 143)
    assert checkpoint.steps(first.dir / "checkpoints") == [2, 3]
    assert train.run(override(cfg, ["run.resume=auto"])).status == "finished"
    assert checkpoint.steps(first.dir / "checkpoints") == [4, 6]  # run.keep


def test_a_save_that_fails_ends_the_run_at_the_next_step_with_its_cause(make, monkeypatch) -> None:
    cfg = make(*OFTEN, "train.steps=40", "train.warmup=1", ASYNC)
    real = torch.save

    def full(*given, **more):
        if (Path(cfg.run.dir) / "checkpoints" / "step_2").is_dir():  # however far the trainer is by then
            raise OSError(28, "No space left on device")
        return real(*given, **more)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(checkpoint.CheckpointError, match=r"step_4.tmp: the disk is full .* run.resume=auto"):
        train.run(cfg)
    steps = [row["step"] for row in read_rows(Path(cfg.run.dir) / "metrics.jsonl")]
    assert sorted(p.name for p in (Path(cfg.run.dir) / "checkpoints").iterdir()) == ["step_2"] and steps[-1] < 12


def test_checkpoint_completes_after_another_error(make, monkeypatch) -> None:
    cfg = make(*OFTEN, ASYNC)
    slow(monkeypatch)

    def stop(row: dict) -> None:
        if row["step"] == 3:
            raise ValueError("of a callback")

    with pytest.raises(train.TrainError, match="of a callback"):
        train.run(cfg, callbacks=[Rows(stop)])
    assert checkpoint.steps(Path(cfg.run.dir) / "checkpoints") == [2]


def _killed_while_it_writes(cfg) -> None:
    real = torch.save

    def hang(*given, **more):
        if (Path(cfg.run.dir) / "checkpoints" / "step_2").exists():
            time.sleep(60)
        return real(*given, **more)

    torch.save = hang
    train.run(cfg, callbacks=[at(5, signal.SIGKILL)])


@pytest.mark.skipif(ranks.START != "fork", reason="what is killed is a fork")
def test_kill_9_while_a_checkpoint_is_written_leaves_the_one_before(make) -> None:
    whole = train.run(make("data.eval=[]", dir="whole"))
    cfg = make("run.save_every=2", "data.eval=[]", ASYNC)
    killed = multiprocessing.get_context("fork").Process(target=_killed_while_it_writes, args=(cfg,))
    killed.start()
    killed.join(60)
    folder = Path(cfg.run.dir) / "checkpoints"
    assert killed.exitcode == -signal.SIGKILL
    assert sorted(os.listdir(folder)) == [".step_4.tmp", "step_2"]
    assert train.run(override(cfg, ["run.resume=auto"])).losses() == whole.losses()
    assert sorted(os.listdir(folder)) == ["step_4", "step_6"]
