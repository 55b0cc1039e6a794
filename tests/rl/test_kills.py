"""SIGKILL during a step: the resumed run writes the same results, and no process stays alive."""

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

from benchmarks.fleet_kills import TIMES
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
from tests.rl.test_rl_phase import LORA, read_metrics

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(ranks.START != "fork", reason="killed processes are forks"),
    pytest.mark.usefixtures("uncounted"),
]
Make = Callable[..., Config]
STEP = 2  # the killed step; step 1 was saved

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
    """Kill while completions are generated."""
    step, run, state = Batch._step, RlStepper.run, {}

    def patched_run(stepper, *args):
        state["step"] = stepper.step_number
        return run(stepper, *args)

    def patched_step(batch, active):
        step(batch, active)
        if state["step"] == STEP and int(batch.slots.generated.max()) >= 3:
            die()

    RlStepper.run, Batch._step = patched_run, patched_step


def in_reward(folder: Path) -> None:
    """Kill while a reward worker runs; the parent process sends the signal."""
    run = RlStepper.run

    def patched_run(stepper, *args):
        if stepper.step_number == STEP:
            (folder / "hang").touch()
        return run(stepper, *args)

    RlStepper.run = patched_run


def in_update(folder: Path, kind: type = RlStepper) -> None:
    """Kill between two updates, or after the last one: weights have changed, nothing is written."""
    step, run, state = AfterBackward.step, kind.run, {}

    def patched_run(stepper, *args):
        state["step"] = stepper.step_number
        return run(stepper, *args)

    def patched_step(update):
        result = step(update)
        if state["step"] == STEP:
            die()
        return result

    kind.run, AfterBackward.step = patched_run, patched_step


def before_metrics(folder: Path) -> None:
    """Kill after completions.jsonl is written, before the metrics and the checkpoint."""
    run = RlStepper.run

    def patched_run(stepper, *args):
        result = run(stepper, *args)
        if stepper.step_number == STEP:
            with (Path(stepper.cfg.run.dir) / COMPLETIONS).open("a") as file:
                file.write(f'{{"step": {STEP}, "comp')  # an incomplete write
            die()
        return result

    RlStepper.run = patched_run


def _run(plant: Callable[[Path], None], folder: Path, cfg: Config) -> None:
    torch.set_num_threads(1)
    plant(folder)
    rl.run(cfg)
    os._exit(0)


def run_until_killed(plant: Callable[[Path], None], folder: Path, cfg: Config) -> None:
    """Run until the process is killed in step 2."""
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
    ("plant", "overrides"),
    [
        (in_rollout, LORA),
        (in_reward, ("rl.algorithm=dapo",)),
        (in_update, ("rl.mini_batches=2", "rl.epochs=2", "rl.kl=0.1")),
        # its completions were stored in the checkpoint
        (in_update, ("rl.stale=1", "rl.mini_batches=2", "rl.kl=0.1", "run.save=async")),
        (in_update, (*LORA, "rl.algorithm=ppo", "rl.mini_batches=2", "rl.critic_lr=1e-3")),
        (before_metrics, ("rl.algorithm=dapo", "data.workers=1", "run.save_every=0")),  # restarts from the beginning
    ],
)
def test_killed_rl_run_resumes_with_the_same_results(
    rl_config: Make, tmp_path: Path, plant: Callable[[Path], None], overrides: tuple[str, ...]
):
    (tmp_path / "own.py").write_text(REWARD)
    overrides = (
        "run.save_every=1",
        *overrides,
        f"rl.rewards=['{tmp_path}/own.py:score']",
        "rl.show=16",
        "train.steps=3",
    )
    uninterrupted, cfg = rl_config(*overrides, dir="uninterrupted"), rl_config(*overrides)
    rl.run(uninterrupted)
    run_until_killed(plant, tmp_path, cfg)
    workers = [int(pid) for pid in (tmp_path / "workers").read_text().split()]
    deadline = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers)), "the reward's processes end with a trainer that was run_until_killed"
    assert [row["step"] for row in read_metrics(cfg)] == [1]
    (tmp_path / "hang").unlink(missing_ok=True)
    result = rl.run(override(cfg, ["run.resume=auto"]))
    assert result.status == "finished"
    actual, expected = ((Path(c.run.dir) / COMPLETIONS).read_text() for c in (cfg, uninterrupted))
    assert actual == expected and len(actual.splitlines()) == 48
    assert without_times(read_metrics(cfg)) == without_times(read_metrics(uninterrupted))


def before_metrics_of_encrypted(folder: Path) -> None:
    """Like `before_metrics`, with an encrypted line."""
    run = RlStepper.run

    def patched_run(stepper, *args):
        result = run(stepper, *args)
        if stepper.step_number == STEP:
            with (Path(stepper.cfg.run.dir) / f"{COMPLETIONS}.aes").open("ab") as file:
                file.write(encryption.encrypt_line(b'{"step": 3, "comp')[:60])
            die()
        return result

    RlStepper.run = patched_run


def test_killed_encrypted_run_resumes_with_the_same_results(rl_config: Make, tmp_path, monkeypatch):
    monkeypatch.setenv(encryption.VALUE, bytes(range(32)).hex())
    overrides = ("run.encrypt=true", "run.save=async", "run.save_every=1", "rl.show=16", "train.steps=4")
    uninterrupted, cfg = rl_config(*overrides, dir="uninterrupted"), rl_config(*overrides)
    rl.run(uninterrupted)
    run_until_killed(before_metrics_of_encrypted, tmp_path, cfg)
    assert rl.run(override(cfg, ["run.resume=auto"])).status == "finished"
    lines = [
        [
            encryption.decrypt_line(line, "")
            for line in (Path(c.run.dir) / f"{COMPLETIONS}.aes").read_bytes().splitlines()
        ]
        for c in (cfg, uninterrupted)
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 64
    assert without_times(read_metrics(cfg)) == without_times(read_metrics(uninterrupted))


def in_update_of_pairs(folder: Path) -> None:
    in_update(folder, PreferenceStepper)


@pytest.mark.parametrize("overrides", [("run.save=async",), LORA], ids=["copy", "base"])
def test_killed_preference_run_resumes_with_the_same_results(
    preference_config: Make, tmp_path: Path, overrides: tuple[str, ...]
):
    overrides = (*overrides, "train.steps=3", "run.save_every=1")
    uninterrupted, cfg = preference_config(*overrides, dir="uninterrupted"), preference_config(*overrides)
    rl.run(uninterrupted)
    run_until_killed(in_update_of_pairs, tmp_path, cfg)
    assert [row["step"] for row in read_metrics(cfg)] == [1]
    rl.run(override(cfg, ["run.resume=auto"]))
    assert without_times(read_metrics(cfg)) == without_times(read_metrics(uninterrupted))
    assert json.loads((Path(cfg.run.dir) / "result.json").read_text())["status"] == "finished"


def in_rollout_of_one(rank: int) -> None:
    if rank == 1:
        in_rollout(Path())


def test_two_ranks_resume_bit_for_bit_after_one_was_killed(rl_config: Make):
    overrides = ("rl.mini_batches=2", "train.steps=3", "run.save_every=1", "rl.show=16", "run.timeout=30")
    uninterrupted, cfg = rl_config(*overrides, dir="uninterrupted"), rl_config(*overrides, "run.save=async")
    assert [code for code, _ in both(uninterrupted)] == [0, 0]
    (code, first), (killed_code, _) = both(cfg, in_rollout_of_one)
    assert (code, killed_code) == (1, -signal.SIGKILL) and f"step {STEP}, rollout" in first
    assert [code for code, _ in both(override(cfg, ["run.resume=auto"]))] == [0, 0]
    assert without_times(read_metrics(cfg)) == without_times(read_metrics(uninterrupted))
    actual, expected = ((Path(c.run.dir) / COMPLETIONS).read_text() for c in (cfg, uninterrupted))
    assert actual == expected
