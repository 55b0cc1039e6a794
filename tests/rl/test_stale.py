"""`rl.stale: 1`: what a step trains on, and that pending completions survive an interruption."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo import fp8, rl
from octavo.config import Config, ConfigError, override
from octavo.data import PromptSample
from octavo.generation import Completion
from octavo.parallel import World
from octavo.rl.phases.completions_log import COMPLETIONS
from octavo.rl.phases.rl_step import RlStepper
from octavo.rl.rollout.experience import Rollout
from octavo.rl.rollout.stale_queue import VersionedRollout, restore_pending
from octavo.train import TrainError
from tests.rl.test_rl_phase import LORA, read_metrics
from tests.rl.test_same_weights import LAYER, unseen
from tests.train.conftest import at

pytestmark = pytest.mark.usefixtures("bare_forward")

Make = Callable[..., Config]
STALE = ("rl.stale=1", "train.steps=4", "rl.show=16", "train.lr=1e-2", "fp8.recipe=off")


def lines(cfg: Config) -> list[dict]:
    return [json.loads(line) for line in (Path(cfg.run.dir) / COMPLETIONS).read_text().splitlines()]


def completions(cfg: Config) -> dict[int, list[str]]:
    return {n: [line["completion"] for line in lines(cfg) if line["step"] == n] for n in range(1, 5)}


def test_step_trains_on_completions_of_previous_weights(rl_config: Make):
    """Completions equal those of the older weights, and ratios are relative to these weights."""
    cfg, frozen_cfg = (
        rl_config(*STALE),
        rl_config(*STALE, "rl.stale=0", "train.lr=1e-30", "train.steps=3", dir="frozen"),
    )
    result = rl.run(cfg)
    rl.run(frozen_cfg)
    rows, by_step, initial = read_metrics(cfg), completions(cfg), completions(frozen_cfg)
    assert [row["weights"] for row in rows] == [0, 0, 1, 2]
    assert [line["weights"] for line in lines(cfg)] == [row["weights"] for row in rows for _ in range(16)]
    assert by_step[1] == initial[1] and by_step[2] == initial[2], "the initial weights generate two steps"
    assert by_step[3] != initial[3]
    assert max(row["logp_gap_max"] for row in rows) < 1e-4, "rollout and trainer use the same weights"
    assert rows[0]["clip_ratio/region_mean"] == 0 < rows[3]["clip_ratio/region_mean"]
    proof = json.loads((result.dir / "proof.json").read_text())["rollouts"]
    assert (proof["first"], proof["last"], proof["stale"]) == (1, 4, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [(), (*LORA, "rl.algorithm=dapo", "rl.mini_batches=2", "rl.kl=0.1"), ("rl.algorithm=ppo", "rl.mini_batches=2")],
)
def test_pending_completions_are_restored_after_a_stop(rl_config: Make, overrides: tuple[str, ...]):
    uninterrupted, cfg = rl_config(*STALE[:-1], *overrides, dir="uninterrupted"), rl_config(*STALE[:-1], *overrides)
    rl.run(uninterrupted)
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    assert len(read_metrics(cfg)) < 3
    rl.run(override(cfg, ["run.resume=auto"]))
    assert lines(cfg) == lines(uninterrupted)
    for actual, expected in zip(read_metrics(cfg), read_metrics(uninterrupted), strict=True):
        assert [actual[name] for name in ("loss", "grad_norm", "reward", "logp_gap_mean", "weights", "kl")] == [
            expected[name] for name in ("loss", "grad_norm", "reward", "logp_gap_mean", "weights", "kl")
        ]


@pytest.mark.usefixtures("unseen")
@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("make_micro_batches", "between its (first rollout and a later one|rollout and its update)"),
        ("next_rollout", "the update before it"),
    ],
)
def test_external_weight_writes_are_detected(
    rl_config: Make, monkeypatch: pytest.MonkeyPatch, where: str, expected: str
):
    """Writes between a rollout and the update that follows it, and between an update and the next rollout."""
    method = getattr(RlStepper, where)

    def write_weight(stepper: RlStepper, argument):
        if stepper.step_number == 2:
            unseen(stepper.model.get_submodule(LAYER))
        return method(stepper, argument)

    monkeypatch.setattr(RlStepper, where, write_weight)
    with pytest.raises(fp8.ProofError, match=rf"step 2: weights changed .*{expected}.*{LAYER}"):
        rl.run(rl_config(*STALE))


def test_pending_completions_are_redistributed_over_ranks():
    """Each prompt appears once, in order, with all data of its completions."""

    def make_pending(numbers: list[int]) -> VersionedRollout:
        prompts = [prompt(number) for number in numbers]
        completions = [
            Completion(
                p,
                g,
                np.array([n, g, 7][: 2 + g]),
                np.full(2 + g, -n / 7, np.float32),
                np.ones(2 + g, np.float32),
                "stop",
            )
            for p, n in enumerate(numbers)
            for g in (0, 1)
        ]
        rewards = np.array([n + g / 10 for n in numbers for g in (0, 1)])
        old = [np.full(len(c.tokens), -c.tokens[0] / 3, np.float32) for c in completions]
        return VersionedRollout(
            Rollout(prompts, completions, [text(c.tokens) for c in completions], rewards, {"a": rewards}, old=old),
            {"x": 1.5},
            4,
        )

    def prompt(number: int) -> PromptSample:
        return PromptSample(np.arange(3), np.full(3, -100), None, None, None, number=number)

    def text(tokens: np.ndarray) -> str:
        return " ".join(map(str, tokens))

    extra = {
        **make_pending([8, 2, 5]).tensors(0),
        **make_pending([]).tensors(1),
        **make_pending([1]).tensors(2),
    }
    restored = restore_pending(extra, prompt, text, World(rank=0, size=3))
    assert (
        restored is not None
        and [p.number for p in restored.rollout.prompts] == [8, 2, 5]
        and restored.weights_version == 4
    )
    parts = [restore_pending(extra, prompt, text, World(rank=rank, size=2)) for rank in (0, 1)]
    assert [[p.number for p in part.rollout.prompts] for part in parts] == [[1, 2], [5, 8]]
    for number, part, row in ((2, parts[0], 3), (5, parts[1], 1), (8, restored, 1)):
        rollout = part.rollout
        assert (
            rollout.texts[row] == f"{number} 1 7" and rollout.rewards[row] == rollout.scores["a"][row] == number + 0.1
        )
        assert rollout.completions[row].logps.tolist() == [np.float32(-number / 7)] * 3
        assert rollout.old[row].tolist() == [np.float32(-number / 3)] * 3 and part.figures == {"x": 1.5}
    assert restore_pending({}, prompt, text, World()) is None
    extra["pending.0.about"] = extra["pending.0.about"][:-3]
    with pytest.raises(TrainError, match="pending completions of the checkpoint are damaged"):
        restore_pending(extra, prompt, text, World(rank=0, size=3))


def test_stale_with_invariant_is_rejected(rl_config: Make):
    with pytest.raises(ConfigError, match="have other weights, so their log-probabilities are not the same bits"):
        rl_config("rl.stale=1", "rl.invariant=true")
