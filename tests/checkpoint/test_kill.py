"""kill -9 at any point of a save leaves a complete checkpoint that loads."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.base import atomic_write
from octavo.checkpoint import latest
from octavo.checkpoint.run_state import files
from tests import ranks
from tests.checkpoint.models import One, fresh, load, same, save, small, train, trained

# A fork has torch imported, so that there is a save to kill at once; ranks.START says where forks are not to be had.
CONTEXT = multiprocessing.get_context(ranks.START)


def _save_on(directory: Path, step: int, pipe: Connection) -> None:
    """Save for ever, reporting each step."""
    torch.set_num_threads(1)
    model, optimizer = trained()
    pipe.send("ready")
    while True:
        step += 1
        model.seen.fill_(step)
        save(directory, step, model, optimizer, keep=2, rows=step)
        # The same step again: replacing is another thing a kill may interrupt.
        save(directory, step, model, optimizer, keep=2, rows=step)
        pipe.send(step)


def _started(work: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """A process at work that has said that it is ready, and the end of the pipe that it reports by."""
    read, write = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=work, args=(*args, write))
    process.start()
    write.close()  # so that reading ends with the process
    assert read.recv() == "ready"
    return process, read


def _received(read: Connection) -> Iterator[Any]:
    with contextlib.suppress(EOFError):
        while True:
            yield read.recv()


def _kill_while_saving(directory: Path, start: int, delay: float) -> int:
    """Let a process save in a loop and kill it `delay` seconds after its first save began; the last step reported."""
    process, read = _started(_save_on, directory, start)
    time.sleep(delay)
    process.kill()
    reported = [start, *_received(read)]
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return reported[-1]


def _check(directory: Path, reported: int) -> int:
    path = latest(directory, One())
    if path is None:
        assert reported == 0
        return 0
    model, optimizer = fresh()
    got = load(path, model, optimizer)
    assert got.step >= reported, "a save that had returned is gone"
    assert got.counters == {"rows": got.step} and model.seen.tolist() == [float(got.step)] * 3
    return got.step


@pytest.mark.long
def test_latest_checkpoint_loads_after_kill_during_save(tmp_path):
    generator = random.Random(0)
    step = 0
    for _ in range(2):
        step = _check(tmp_path, _kill_while_saving(tmp_path, step, 0.3 + generator.random() * 0.3))
    save(tmp_path, step + 1, *trained(), rows=step + 1)
    assert not [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")]


@pytest.mark.long
def test_latest_checkpoint_loads_after_many_kills(tmp_path):
    generator = random.Random(1)
    step = 0
    for _ in range(12):
        step = _check(tmp_path, _kill_while_saving(tmp_path, step, generator.random()))


def _train_on(directory: Path, until: int, pipe: Connection) -> None:
    """Go on from the latest checkpoint, saving at each step and telling of its loss."""
    torch.set_num_threads(1)
    model, optimizer = small()
    path = latest(directory, One())
    step = load(path, model, optimizer).step if path else 0
    pipe.send("ready")
    while step < until:
        (loss,) = train(model, optimizer, range(step, step + 1))
        step += 1
        save(directory, step, model, optimizer, keep=2)
        pipe.send((step, loss))


@pytest.mark.long
def test_run_with_fp8_states_resumes_exactly_after_kill(tmp_path):
    """FP8 moments and weights in two halves: what follows a kill is what an uninterrupted run computes."""
    model, optimizer = small()
    straight = train(model, optimizer, range(12))
    seen: dict[int, float] = {}

    def go_on(until: int) -> int | None:
        """Let a process train and save at every step; kill it soon after it reported step `until`, in its next save."""
        process, read = _started(_train_on, tmp_path, 12)
        for step, loss in _received(read):
            seen[step] = loss
            if step == until:
                time.sleep(0.01)
                process.kill()
        process.join()
        return process.exitcode

    assert go_on(4) == -signal.SIGKILL and max(seen) < 12
    assert go_on(12) in (0, -signal.SIGKILL)
    assert seen == {step: straight[step - 1] for step in seen}
    assert len(seen) >= 11  # a kill between a save and its line leaves one unreported
    other, other_optimizer = small(seed=3)
    load(latest(tmp_path, One()), other, other_optimizer)
    assert same(other.state_dict(), model.state_dict())
    assert same(other_optimizer.state_dict(), optimizer.state_dict())


class Killed(BaseException):
    """Stands for the kill: nothing of ours catches it, so nothing tidies up."""


CALLS = [
    (files.os, "rename"),
    (files.os, "fsync"),
    (files.shutil, "rmtree"),
    (files.os, "replace"),
    (atomic_write, "sync"),
    (files, "write_state"),
    (files, "fingerprint"),
    (files, "publish"),
]


@pytest.mark.parametrize(("owner", "name"), CALLS, ids=[name for _, name in CALLS])
@pytest.mark.parametrize("after", [False, True])
def test_save_survives_a_stop_at_every_call(tmp_path, monkeypatch, owner, name, after):
    """Not by chance but one by one: stop before, and after, the n-th call of everything that touches the disk."""
    model, optimizer = trained()
    for step in (1, 2, 3):  # 3 is replaced, 1 is pruned, 2 survives
        save(tmp_path, step, model, optimizer, keep=3, rows=step)
    real, calls = getattr(owner, name), 0
    for stop in range(1, 40):
        calls = 0

        def once(*args, real=real, stop=stop, **kwargs):
            nonlocal calls
            calls += 1
            if calls == stop and not after:
                raise Killed
            result = real(*args, **kwargs)
            if calls == stop:
                raise Killed
            return result

        monkeypatch.setattr(owner, name, once)
        try:
            save(tmp_path, 3, model, optimizer, keep=2, rows=3)
        except BaseException as stopped:  # DCP wraps even a BaseException, and ours reports what DCP wrapped
            assert calls >= stop, stopped
        monkeypatch.setattr(owner, name, real)
        found = latest(tmp_path, One())
        assert load(found, *fresh()).counters == {"rows": 3}
        if calls < stop:
            return
    raise AssertionError("the save never ran to its end")
