"""Two ranks against one, in the phases of reinforcement learning and of preferences, and what ends one of two."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo import rl
from octavo.config import Config
from octavo.rl.phases.completions_log import COMPLETIONS
from octavo.rl.phases.rl_phase import RlPhase
from octavo.rl.phases.rl_step import RlStepper
from tests import ranks
from tests.rl.forks import both
from tests.rl.test_rl_phase import LORA, rows_of
from tests.rl.test_same_weights import LAYER

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks"),
    pytest.mark.usefixtures("uncounted"),
]
Make = Callable[..., Config]
SHORT = ("train.steps=2", "train.warmup=1", "train.lr=5e-4")  # what the first update did is in the second step
NEAR = 1e-4  # sums are taken in another order, and in FP8 a code may flip


def lines(cfg: Config, step: int = 1) -> list[dict]:
    """What completions.jsonl has of a step, by row and sample."""
    found = [json.loads(line) for line in (Path(cfg.run.dir) / COMPLETIONS).read_text().splitlines()]
    return sorted((line for line in found if line["step"] == step), key=lambda line: (line["row"], line["sample"]))


def assert_near(cfg: Config, other: Config, names: tuple[str, ...]) -> None:
    for one, two in zip(rows_of(cfg), rows_of(other), strict=True):
        for name in names:
            wanted = one[name] and pytest.approx(one[name], rel=NEAR, abs=NEAR)  # None: of nothing
            assert two[name] == wanted, (name, one["step"])
        assert one.get("sampling/draws") == two.get("sampling/draws")


@pytest.mark.parametrize(
    "over",
    [
        ("rl.kl=0.1", "rl.mini_batches=2", "rl.reference=copy"),
        (*LORA, "rl.algorithm=dr_grpo", "rl.kl=0.1"),
        ("rl.algorithm=dapo", "rl.advantage=batch", "fp8.recipe=off"),
        ("rl.stale=1", "rl.mini_batches=2", "fp8.recipe=off"),
        (*LORA, "rl.algorithm=ppo", "rl.mini_batches=2"),
        ("rl.algorithm=ppo", "rl.critic_lr=1e-2"),
        ("rl.prompts=3", "rl.kl=0.1", "fp8.recipe=off"),
    ],
    ids=["full", "lora", "dapo", "stale", "ppo_lora", "ppo", "uneven"],
)
def test_two_ranks_learn_as_one(reinforcing: Make, over: tuple[str, ...]):
    """Groups of both ranks make one batch: its advantages, its updates, what is left out and what is drawn for it."""
    over = (*over, *SHORT, "rl.show=16", "train.micro_batch=4")
    one, two = reinforcing(*over, dir="one"), reinforcing(*over, dir="two")
    rl.run(one)
    assert [code for code, _ in both(two)] == [0, 0]
    for alone, shared in zip(lines(one), lines(two), strict=True):
        assert shared.pop("advantage") == pytest.approx(alone.pop("advantage"), abs=NEAR)
        assert shared == alone
    of_critic = ("value_loss", "value_mean", "explained_variance") if "rl.algorithm=ppo" in over else ()
    assert_near(one, two, ("loss", "grad_norm", "reward", "reward_std", "length", "entropy", *of_critic))


@pytest.mark.parametrize(
    "over",
    [(), LORA, ("preference={reference: disk}", "train.global_batch=3")],
    ids=["copy", "base", "uneven from disk"],
)
def test_two_ranks_prefer_as_one(preferring: Make, pairs: Path, over: tuple[str, ...]):
    held = f"data.eval=[{{path: {pairs}, max_samples: 3}}]"
    over = (*over, *SHORT, "train.micro_batch=1", held)
    one, two = preferring(*over, dir="one"), preferring(*over, dir="two")
    rl.run(one)
    assert [code for code, _ in both(two)] == [0, 0]
    assert_near(one, two, ("loss", "grad_norm", "rewards/margins", "logps/chosen"))
    assert rows_of(two)[-1]["eval"] == pytest.approx(rows_of(one)[-1]["eval"], rel=NEAR, abs=NEAR)


def test_two_ranks_judge_as_one(preferring: Make, labelled: Path):
    """KTO: answers are compared with those of the other rank too."""
    over = (
        f"data.train=[{{path: {labelled}}}]",
        "preference={loss: kto, desirable_weight: 4}",
        "train.micro_batch=1",
        "train.lr=1e-2",
    )
    one, two = preferring(*over, dir="one"), preferring(*over, dir="two")
    rl.run(one)
    assert [code for code, _ in both(two)] == [0, 0]
    assert rows_of(one)[2]["kl"] > 0
    assert_near(one, two, ("loss", "grad_norm", "kl", "rewards/margins"))


def _gone(source: Path, name: str, broken: range) -> str:
    rows = json.loads(source.read_text())[:8]
    for number in broken:
        rows[number]["image"] = "images/none.png"
    (source.parent / name).write_text(json.dumps(rows))
    return f"data.train=[{{path: {source.parent / name}}}]"


def test_rows_that_are_left_out_on_one_rank_do_not_hold_up_the_other(reinforcing: Make, preferring: Make, pairs: Path):
    """One row of eight is there: in one step one rank has none, in the other nobody has."""
    rest = ("data.on_bad_sample=skip", "run.timeout=30", "train.steps=2", "train.warmup=0")
    over = (_gone(pairs, "few.json", range(1, 8)), *rest, "rl.show=16")
    one, two = reinforcing(*over, dir="one"), reinforcing(*over, dir="two")
    rl.run(one)
    found = both(two)
    assert [code for code, _ in found] == [0, 0], found
    assert [len(lines(cfg, 1)) + len(lines(cfg, 2)) for cfg in (one, two)] == [4, 4]
    assert_near(one, two, ("loss", "grad_norm", "reward", "tokens"))
    over = (_gone(pairs, "few_pairs.json", range(1, 8)), *rest)
    one, two = preferring(*over, dir="pairs_one"), preferring(*over, dir="pairs_two")
    rl.run(one)
    found = both(two)
    assert [code for code, _ in found] == [0, 0], found
    assert_near(one, two, ("loss", "grad_norm", "logps/chosen", "tokens"))


def test_a_reward_that_raises_on_one_rank_ends_both_and_says_why(reinforcing: Make, tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "import os\n"
        "def score(completions, **columns):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise KeyError('no such digit')\n"
        "    return [1.0] * len(completions)\n"
    )
    (_, first), (_, second) = found = both(reinforcing(f"rl.rewards=['{tmp_path}/own.py:score']", "run.timeout=30"))
    assert [code for code, _ in found] == [1, 1]
    assert "reward score" in second and "KeyError: 'no such digit'" in second and "train.json, row" in second
    assert "rank 1" in first and "step 1, rewards" in second + first


def _write(rank: int) -> None:
    cut = RlStepper._make_micro_batches

    def writing(stepper, rollout):
        if rank == 1 and stepper.number == 2:
            stepper.model.get_submodule(LAYER).weight.to_local().data[0, 5] += 1e-3
        return cut(stepper, rollout)

    RlStepper._make_micro_batches = writing


def _perturb(rank: int) -> None:
    begin = RlPhase.begin

    def planted(phase, stepper, *rest):
        begin(phase, stepper, *rest)
        layer = stepper.model.get_submodule(LAYER)
        layer.register_forward_hook(lambda module, given, out: out if module.training else 1.05 * out)

    RlPhase.begin = planted


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("recipe", ["blockwise", "off"])
def test_weights_that_change_on_one_rank_are_named_there(reinforcing: Make, recipe: str):
    cfg = reinforcing(f"fp8.recipe={recipe}", "run.timeout=30")
    (_, first), (_, second) = found = both(cfg, _write)
    assert [code for code, _ in found] == [1, 1] and len(rows_of(cfg)) == 1
    assert f"step 2: weights changed between its rollout and its update: {LAYER}" in second
    assert "rank 1" in first


@pytest.mark.usefixtures("unseen")
def test_a_gap_ends_both_ranks_with_the_layer(reinforcing: Make):
    found = both(reinforcing("rl.max_gap=1e-3", "run.timeout=30"), _perturb)
    assert [code for code, _ in found] == [1, 1]
    for _, said in found:
        assert f"the first layer that differs is {LAYER}, by 0.05 of" in said
