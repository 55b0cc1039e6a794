"""kill -9 in the midst of a step: what follows is what an unbroken run writes, and nothing is left running."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo import rl
from octavo.base import encryption
from octavo.config import Config, override
from octavo.generation.batch import Batch
from octavo.rl.phases.completions_log import COMPLETIONS
from octavo.rl.phases.preference_phase import PreferenceStepper
from octavo.rl.phases.rl_step import RlStepper
from octavo.train.step.update import AfterBackward
from tests import ranks
from tests.rl.forks import both
from tests.rl.test_rl_phase import LORA, rows_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(ranks.START != "fork", reason="what is killed is a fork"),
    pytest.mark.usefixtures("uncounted"),
]
Make = Callable[..., Config]
TIMES = (
    "tokens_per_s",
    "rollout_tokens_per_s",
    "training_tokens_per_s",
    "seconds",
    "save_seconds",
    "time",
    "memory",
    "base",
)  # and what is measured in the first step of a start
STEP = 2  # which is killed; 1 was saved

REWARD = """
import os, pathlib, random, time
HERE = pathlib.Path(__file__).parent
def score(completions, **columns):
    HERE.joinpath("workers").write_text(f"{os.getpid()} {os.getppid()}")
    if HERE.joinpath("hang").exists():
        HERE.joinpath("hanging").touch()
        time.sleep(60)
    return [len(set(c)) / 10 for c in completions]
"""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_rollout(folder: Path) -> None:
    """In the midst of completions, of which some are written."""
    step, run, state = Batch._step, RlStepper.run, {}

    def running(stepper, *given):
        state["step"] = stepper.number
        return run(stepper, *given)

    def stepping(batch, active):
        step(batch, active)
        if state["step"] == STEP and int(batch.slots.generated.max()) >= 3:
            die()

    RlStepper.run, Batch._step = running, stepping


def in_reward(folder: Path) -> None:
    """While a worker judges; the parent kills."""
    run = RlStepper.run

    def running(stepper, *given):
        if stepper.number == STEP:
            (folder / "hang").touch()
        return run(stepper, *given)

    RlStepper.run = running


def in_update(folder: Path, kind: type = RlStepper) -> None:
    """Between the two updates of a step, or just behind its last one: weights have moved, nothing is written."""
    step, run, state = AfterBackward.step, kind.run, {}

    def running(stepper, *given):
        state["step"] = stepper.number
        return run(stepper, *given)

    def stepping(update):
        done = step(update)
        if state["step"] == STEP:
            die()
        return done

    kind.run, AfterBackward.step = running, stepping


def before_metrics(folder: Path) -> None:
    """Behind completions.jsonl, before the step's row and checkpoint."""
    run = RlStepper.run

    def running(stepper, *given):
        found = run(stepper, *given)
        if stepper.number == STEP:
            with (Path(stepper.cfg.run.dir) / COMPLETIONS).open("a") as file:
                file.write(f'{{"step": {STEP}, "comp')  # as a write that was cut off
            die()
        return found

    RlStepper.run = running


def _run(plant: Callable[[Path], None], folder: Path, cfg: Config) -> None:
    torch.set_num_threads(1)
    plant(folder)
    rl.run(cfg)
    os._exit(0)


def killed(plant: Callable[[Path], None], folder: Path, cfg: Config) -> None:
    """Run until the kill in step 2."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(plant, folder, cfg))
    process.start()
    while plant is in_reward and not (folder / "hanging").exists() and process.is_alive():
        time.sleep(0.02)
    if plant is in_reward:
        process.kill()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def without_times(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


@pytest.mark.parametrize(
    ("plant", "over"),
    [
        (in_rollout, LORA),
        (in_reward, ("rl.algorithm=dapo",)),
        (in_update, ("rl.mini_batches=2", "rl.epochs=2", "rl.kl=0.1")),
        # what it learnt from lay in the checkpoint
        (in_update, ("rl.stale=1", "rl.mini_batches=2", "rl.kl=0.1", "run.save=async")),
        (in_update, (*LORA, "rl.algorithm=ppo", "rl.mini_batches=2", "rl.critic_lr=1e-3")),
        (before_metrics, ("rl.algorithm=dapo", "data.workers=1", "run.save_every=0")),  # from the beginning, then
    ],
)
def test_a_run_of_rl_that_was_killed_goes_on_as_if_nothing_had_been(
    reinforcing: Make, tmp_path: Path, plant: Callable[[Path], None], over: tuple[str, ...]
):
    (tmp_path / "own.py").write_text(REWARD)
    over = ("run.save_every=1", *over, f"rl.rewards=['{tmp_path}/own.py:score']", "rl.show=16", "train.steps=3")
    whole, cfg = reinforcing(*over, dir="whole"), reinforcing(*over)
    rl.run(whole)
    killed(plant, tmp_path, cfg)
    workers = [int(pid) for pid in (tmp_path / "workers").read_text().split()]
    patience = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not any(map(alive, workers)), "the reward's processes end with a trainer that was killed"
    assert [row["step"] for row in rows_of(cfg)] == [1]
    (tmp_path / "hang").unlink(missing_ok=True)
    result = rl.run(override(cfg, ["run.resume=auto"]))
    assert result.status == "finished"
    there, expected = ((Path(c.run.dir) / COMPLETIONS).read_text() for c in (cfg, whole))
    assert there == expected and len(there.splitlines()) == 48
    assert without_times(rows_of(cfg)) == without_times(rows_of(whole))


def before_metrics_of_encrypted(folder: Path) -> None:
    """The same, of a line that was encrypted."""
    run = RlStepper.run

    def running(stepper, *given):
        found = run(stepper, *given)
        if stepper.number == STEP:
            with (Path(stepper.cfg.run.dir) / f"{COMPLETIONS}.aes").open("ab") as file:
                file.write(encryption.encrypt_line(b'{"step": 3, "comp')[:60])
            die()
        return found

    RlStepper.run = running


def test_an_encrypted_run_that_was_killed_goes_on_as_if_nothing_had_been(reinforcing: Make, tmp_path, monkeypatch):
    monkeypatch.setenv(encryption.VALUE, bytes(range(32)).hex())
    over = ("run.encrypt=true", "run.save=async", "run.save_every=1", "rl.show=16", "train.steps=4")
    whole, cfg = reinforcing(*over, dir="whole"), reinforcing(*over)
    rl.run(whole)
    killed(before_metrics_of_encrypted, tmp_path, cfg)
    assert rl.run(override(cfg, ["run.resume=auto"])).status == "finished"
    lines = [
        [
            encryption.decrypt_line(line, "")
            for line in (Path(c.run.dir) / f"{COMPLETIONS}.aes").read_bytes().splitlines()
        ]
        for c in (cfg, whole)
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 64
    assert without_times(rows_of(cfg)) == without_times(rows_of(whole))


def in_update_of_pairs(folder: Path) -> None:
    in_update(folder, PreferenceStepper)


@pytest.mark.parametrize("over", [("run.save=async",), LORA], ids=["copy", "base"])
def test_a_run_of_preferences_that_was_killed_goes_on_as_if_nothing_had_been(
    preferring: Make, tmp_path: Path, over: tuple[str, ...]
):
    over = (*over, "train.steps=3", "run.save_every=1")
    whole, cfg = preferring(*over, dir="whole"), preferring(*over)
    rl.run(whole)
    killed(in_update_of_pairs, tmp_path, cfg)
    assert [row["step"] for row in rows_of(cfg)] == [1]
    rl.run(override(cfg, ["run.resume=auto"]))
    assert without_times(rows_of(cfg)) == without_times(rows_of(whole))
    assert json.loads((Path(cfg.run.dir) / "result.json").read_text())["status"] == "finished"


def in_rollout_of_one(rank: int) -> None:
    if rank == 1:
        in_rollout(Path())


def test_two_ranks_of_which_one_was_killed_go_on_bit_for_bit(reinforcing: Make):
    over = ("rl.mini_batches=2", "train.steps=3", "run.save_every=1", "rl.show=16", "run.timeout=30")
    whole, cfg = reinforcing(*over, dir="whole"), reinforcing(*over, "run.save=async")
    assert [code for code, _ in both(whole)] == [0, 0]
    (code, first), (killed, _) = both(cfg, in_rollout_of_one)
    assert (code, killed) == (1, -signal.SIGKILL) and f"step {STEP}, rollout" in first
    assert [code for code, _ in both(override(cfg, ["run.resume=auto"]))] == [0, 0]
    assert without_times(rows_of(cfg)) == without_times(rows_of(whole))
    there, expected = ((Path(c.run.dir) / COMPLETIONS).read_text() for c in (cfg, whole))
    assert there == expected
