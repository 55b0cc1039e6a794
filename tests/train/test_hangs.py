"""Ranks that hang, signals, terminals that close: a run ends within run.timeout, saved where it can be.

Ranks are forks that call `train.run` as torchrun's would. torchrun itself would end those that are left.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pty
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from octavo import checkpoint, train
from octavo.config import Config
from octavo.data import Encoder
from octavo.data.loaders.loader import _RowChunks, run_workers
from octavo.train.callbacks.signals import StopRequest
from octavo.train.step.step import Stepper
from tests import ranks

pytestmark = [
    pytest.mark.skipif(ranks.START != "fork" or not hasattr(signal, "SIGHUP"), reason="ranks are forks"),
    pytest.mark.usefixtures("uncounted", "unseen"),
]


class Rank1(train.Callback):
    """Does something in `before_step` of step 3 on rank 1. All ranks have it: what observes a run must be the same."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work

    def before_step(self, run: train.Run, number: int, batches: object) -> None:
        if number == 3 and run.world.rank == 1:
            self.work()


def _train(rank: int, size: int, port: int, cfg: Config, callback: train.Callback) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=str(size), CUDA_VISIBLE_DEVICES="")
    with Path(f"{cfg.run.dir}.rank_{rank}").open("w") as log:
        os.dup2(log.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)  # pytest's is a file of its own
    try:
        os._exit(train.run(cfg, callbacks=[callback]).exit_code)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


@pytest.fixture
def started():
    """start(cfg, callback) -> two ranks; what is left of them at the end is killed."""
    made: list[multiprocessing.Process] = []

    def start(cfg: Config, callback: train.Callback) -> list[multiprocessing.Process]:
        context, port = multiprocessing.get_context("fork"), ranks.free_port()
        made.extend(context.Process(target=_train, args=(rank, 2, port, cfg, callback)) for rank in (0, 1))
        for process in made:
            process.start()
        return made

    yield start
    for process in made:
        process.kill()
        process.join()


def said(cfg: Config, rank: int) -> str:
    return Path(f"{cfg.run.dir}.rank_{rank}").read_text()


def saved(cfg: Config) -> list[int]:
    return checkpoint.steps(Path(cfg.run.dir) / "checkpoints")


def test_a_hangup_of_one_rank_ends_both_saved(make, started) -> None:
    cfg = make("data.eval=[]", "run.timeout=60", "data.workers=1")
    both = started(cfg, Rank1(lambda: os.kill(os.getpid(), signal.SIGHUP)))
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [129, 129], said(cfg, 0) + said(cfg, 1)
    assert saved(cfg) == [3]


def test_a_rank_that_hangs_is_named_and_a_signal_ends_it(make, started) -> None:
    """No common save is possible: the last checkpoint stands."""
    cfg = make("data.eval=[]", "run.timeout=8", "run.save_every=2")
    both = started(cfg, Rank1(lambda: time.sleep(60)))
    _wait(lambda: saved(cfg) == [2])
    time.sleep(0.5)  # until the third step has begun
    for process in both:
        os.kill(process.pid, signal.SIGTERM)
    for process in both:
        process.join(30)
    assert [process.exitcode for process in both] == [1, 143], said(cfg, 0) + said(cfg, 1)
    assert "a collective failed on rank 0 of 2 at step 3, forward and backward (run.timeout: 8 s)" in said(cfg, 0)
    assert "rank 1 has not got past step 3, forward and backward (train/test_hangs.py:" in said(cfg, 0)
    assert "rank 1 hangs: SIGTERM came 8 s ago (run.timeout), and this process has not ended" in said(cfg, 1)
    assert "in before_step" in said(cfg, 1)
    assert saved(cfg) == [2]


@pytest.mark.parametrize(
    "full",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        pytest.param(MemoryError(), marks=pytest.mark.long),
    ],
)
def test_a_rank_that_runs_out_of_memory_says_so_and_is_missed(make, started, monkeypatch, full: Exception) -> None:
    cfg = make("data.eval=[]", "run.timeout=8", "run.save_every=2", "run.save=async")
    totals = Stepper.totals

    def fails(stepper: Stepper, batches: object) -> object:
        if stepper.step_number == 3 and stepper.world.rank == 1:
            raise full
        return totals(stepper, batches)

    monkeypatch.setattr(Stepper, "totals", fails)
    for process in (both := started(cfg, train.Callback())):
        process.join(60)
    assert [process.exitcode for process in both] == [1, 1], said(cfg, 0) + said(cfg, 1)
    assert "TrainError: rank 1 of 2 ran out of memory at step 3, forward and backward: " in said(cfg, 1)
    assert "; lower train.micro_batch" in said(cfg, 1)
    assert "rank 1 has died or is stopped; it was last seen at step " in said(cfg, 0)
    assert saved(cfg) == [2]


@pytest.mark.parametrize("way, code", [("closed", 129), pytest.param("group", 143, marks=pytest.mark.long)])
def test_what_reaches_workers_too_leaves_a_saved_run(way: str, code: int, make, monkeypatch) -> None:
    """A terminal that closes sends SIGHUP to the trainer and its workers alike, and what is printed from then on has no
    reader. SIGTERM to the whole group would end the workers while the trainer waits for rows, as it mostly does here.
    """
    cfg = make("data.eval=[]", "train.steps=500", "data.workers=1", "train.micro_batch=8", "train.global_batch=32")
    encode = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda *given: time.sleep(0.03) or encode(*given))
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os._exit(
                train.run(cfg, console=Console(force_terminal=True, file=os.fdopen(1, "w", closefd=False))).exit_code
            )
        finally:
            Path(f"{cfg.run.dir}.rank_0").write_text(traceback.format_exc())
            os._exit(1)
    metrics = Path(cfg.run.dir) / "metrics.jsonl"
    with contextlib.suppress(OSError):  # EIO: nobody has the other end
        while not metrics.exists() or not metrics.read_bytes():
            os.read(terminal, 1 << 16)
        time.sleep(0.4)
        if way == "closed":
            os.close(terminal)
        else:
            os.killpg(pid, signal.SIGTERM)
        while os.read(terminal, 1 << 16):
            pass
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == code, said(cfg, 0)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert saved(cfg) == [len(rows)] and len(rows) < 500


def _signal_a_worker() -> None:
    class Rows:
        def __getitem__(self, places: list[int]) -> list[int]:
            return places

    with StopRequest(0.2):
        stream = run_workers(Rows(), _RowChunks(range(99), 1), 1)
        next(stream)
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGHUP)
        time.sleep(0.5)
        next(stream)
        stream.close()


def test_a_signal_to_a_worker_is_none_to_the_trainer() -> None:
    trainer = multiprocessing.get_context("fork").Process(target=_signal_a_worker)
    trainer.start()
    trainer.join(30)
    assert trainer.exitcode == 0


def _wait(until: Callable[[], bool]) -> None:
    patience = time.monotonic() + 60
    while not until() and time.monotonic() < patience:
        time.sleep(0.05)
