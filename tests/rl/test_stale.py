"""`rl.stale: 1`: completions that wait a step, what is learnt from them, and that they outlive a kill."""

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
from tests.rl.test_rl_phase import LORA, rows_of
from tests.rl.test_same_weights import LAYER, unseen
from tests.train.conftest import at

pytestmark = pytest.mark.usefixtures("bare_forward")

Make = Callable[..., Config]
STALE = ("rl.stale=1", "train.steps=4", "rl.show=16", "train.lr=1e-2", "fp8.recipe=off")


def lines(cfg: Config) -> list[dict]:
    return [json.loads(line) for line in (Path(cfg.run.dir) / COMPLETIONS).read_text().splitlines()]


def completions(cfg: Config) -> dict[int, list[str]]:
    return {n: [line["completion"] for line in lines(cfg) if line["step"] == n] for n in range(1, 5)}


def test_a_step_learns_from_what_the_weights_before_the_last_update_wrote(reinforcing: Make):
    """What they write is what those weights write at that step; ratios are against them."""
    cfg, own = reinforcing(*STALE), reinforcing(*STALE, "rl.stale=0", "train.lr=1e-30", "train.steps=3", dir="own")
    result = rl.run(cfg)
    rl.run(own)
    rows, said, first = rows_of(cfg), completions(cfg), completions(own)
    assert [row["weights"] for row in rows] == [0, 0, 1, 2]
    assert [line["weights"] for line in lines(cfg)] == [row["weights"] for row in rows for _ in range(16)]
    assert said[1] == first[1] and said[2] == first[2] and said[3] != first[3], "the first weights wrote those of two"
    assert max(row["logp_gap_max"] for row in rows) < 1e-4, "rollout and trainer by the same weights"
    assert rows[0]["clip_ratio/region_mean"] == 0 < rows[3]["clip_ratio/region_mean"]
    proof = json.loads((result.dir / "proof.json").read_text())["rollouts"]
    assert (proof["first"], proof["last"], proof["stale"]) == (1, 4, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "over",
    [(), (*LORA, "rl.algorithm=dapo", "rl.mini_batches=2", "rl.kl=0.1"), ("rl.algorithm=ppo", "rl.mini_batches=2")],
)
def test_what_waits_is_there_again_after_a_stop(reinforcing: Make, over: tuple[str, ...]):
    whole, cfg = reinforcing(*STALE[:-1], *over, dir="whole"), reinforcing(*STALE[:-1], *over)
    rl.run(whole)
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    assert len(rows_of(cfg)) < 3
    rl.run(override(cfg, ["run.resume=auto"]))
    assert lines(cfg) == lines(whole)
    for one, two in zip(rows_of(cfg), rows_of(whole), strict=True):
        assert [one[name] for name in ("loss", "grad_norm", "reward", "logp_gap_mean", "weights", "kl")] == [
            two[name] for name in ("loss", "grad_norm", "reward", "logp_gap_mean", "weights", "kl")
        ]


@pytest.mark.usefixtures("unseen")
@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("_make_micro_batches", "between its (first rollout and a later one|rollout and its update)"),
        ("next_rollout", "the update before it"),
    ],
)
def test_weights_that_somebody_else_writes_to_are_seen(
    reinforcing: Make, monkeypatch: pytest.MonkeyPatch, where: str, found: str
):
    """Between a rollout and the update beside it, and between an update and the next rollout."""
    own = getattr(RlStepper, where)

    def writing(stepper: RlStepper, given):
        if stepper.number == 2:
            unseen(stepper.model.get_submodule(LAYER))
        return own(stepper, given)

    monkeypatch.setattr(RlStepper, where, writing)
    with pytest.raises(fp8.ProofError, match=rf"step 2: weights changed .*{found}.*{LAYER}"):
        rl.run(reinforcing(*STALE))


def test_other_ranks_than_wrote_it_deal_out_what_waits_anew():
    """Each prompt once, in their order, with all that is known of its completions."""

    def written(numbers: list[int]) -> VersionedRollout:
        prompts = [prompt(number) for number in numbers]
        said = [
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
        old = [np.full(len(c.tokens), -c.tokens[0] / 3, np.float32) for c in said]
        return VersionedRollout(
            Rollout(prompts, said, [text(c.tokens) for c in said], rewards, {"a": rewards}, old=old), {"x": 1.5}, 4
        )

    def prompt(number: int) -> PromptSample:
        return PromptSample(np.arange(3), np.full(3, -100), None, None, None, number=number)

    def text(tokens: np.ndarray) -> str:
        return " ".join(map(str, tokens))

    extra = {
        **written([8, 2, 5]).tensors(0),
        **written([]).tensors(1),
        **written([1]).tensors(2),
    }
    again = restore_pending(extra, prompt, text, World(rank=0, size=3))
    assert again is not None and [p.number for p in again.rollout.prompts] == [8, 2, 5] and again.weights == 4
    dealt = [restore_pending(extra, prompt, text, World(rank=rank, size=2)) for rank in (0, 1)]
    assert [[p.number for p in part.rollout.prompts] for part in dealt] == [[1, 2], [5, 8]]
    for number, part, row in ((2, dealt[0], 3), (5, dealt[1], 1), (8, again, 1)):
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


def test_beside_invariant_it_is_refused(reinforcing: Make):
    with pytest.raises(ConfigError, match="have other weights, so their log-probabilities are not the same bits"):
        reinforcing("rl.stale=1", "rl.invariant=true")
