"""kill -9 at any moment of a save: afterwards there is always a whole checkpoint, and it loads."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo import atomic
from octavo.checkpoint import files, latest
from tests.checkpoint.models import One, fresh, load, same, save, small, train, trained

ROOT = Path(__file__).resolve().parents[2]
SAVER = """
import sys, torch
torch.set_num_threads(1)
from tests.checkpoint.models import save, trained
model, optimizer = trained()
print("ready", flush=True)
step = int(sys.argv[2])
while True:
    step += 1
    model.seen.fill_(step)
    save(sys.argv[1], step, model, optimizer, keep=2, rows=step)
    # The same step again: replacing is another thing a kill may interrupt.
    save(sys.argv[1], step, model, optimizer, keep=2, rows=step)
    print(step, flush=True)
"""


def _kill_while_saving(directory: Path, start: int, delay: float) -> int:
    """Let a process save in a loop and kill it `delay` seconds after its first save began; the last step it told."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(directory), str(start)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    told = process.stdout.read().split()
    assert process.wait() == -signal.SIGKILL
    return int(told[-1]) if told else start


def _check(directory: Path, told: int) -> int:
    path = latest(directory, One())
    if path is None:
        assert told == 0
        return 0
    model, optimizer = fresh()
    got = load(path, model, optimizer)
    assert got.step >= told, "a save that had returned is gone"
    assert got.counters == {"rows": got.step} and model.seen.tolist() == [float(got.step)] * 3
    return got.step


@pytest.mark.long
def test_after_kill_9_in_mid_save_the_latest_checkpoint_loads(tmp_path):
    generator = random.Random(0)
    step = 0
    for _ in range(2):
        step = _check(tmp_path, _kill_while_saving(tmp_path, step, 0.3 + generator.random() * 0.3))
    save(tmp_path, step + 1, *trained(), rows=step + 1)
    assert not [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")]


@pytest.mark.long
def test_many_kills(tmp_path):
    generator = random.Random(1)
    step = 0
    for _ in range(12):
        step = _check(tmp_path, _kill_while_saving(tmp_path, step, generator.random()))


TRAINER = """
import sys, torch
torch.set_num_threads(1)
from octavo import checkpoint
from tests.checkpoint.models import One, load, save, small, train
model, optimizer = small()
path = checkpoint.latest(sys.argv[1], One())
step = load(path, model, optimizer).step if path else 0
print("ready", flush=True)
while step < int(sys.argv[2]):
    loss, = train(model, optimizer, range(step, step + 1))
    step += 1
    save(sys.argv[1], step, model, optimizer, keep=2)
    print(step, loss.hex(), flush=True)
"""


@pytest.mark.long
def test_a_run_of_small_states_killed_in_mid_save_goes_on_bit_for_bit(tmp_path):
    """FP8 moments and weights in two halves: what follows a kill is what an uninterrupted run computes."""
    model, optimizer = small()
    straight = train(model, optimizer, range(12))
    seen: dict[int, float] = {}

    def go_on(until: int) -> int:
        """Let a process train and save at every step; kill it soon after it told of step `until`, in its next save."""
        command = [sys.executable, "-c", TRAINER, str(tmp_path), "12"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for line in process.stdout:
            step, loss = line.split()
            seen[int(step)] = float.fromhex(loss)
            if int(step) == until:
                time.sleep(0.01)
                process.kill()
        return process.wait()

    assert go_on(4) == -signal.SIGKILL and max(seen) < 12
    assert go_on(12) in (0, -signal.SIGKILL)
    assert seen == {step: straight[step - 1] for step in seen}
    assert len(seen) >= 11  # a kill between a save and its line leaves one untold
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
    (atomic, "sync"),
    (files, "write_state"),
    (files, "fingerprint"),
    (files, "publish"),
]


@pytest.mark.parametrize(("owner", "name"), CALLS, ids=[name for _, name in CALLS])
@pytest.mark.parametrize("after", [False, True])
def test_a_stop_at_every_single_call(tmp_path, monkeypatch, owner, name, after):
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
