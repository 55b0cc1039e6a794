"""Two ranks compared with one in phases rl and preference, and errors on one of two ranks."""

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
from tests.rl.test_rl_phase import LORA, read_metrics
from tests.rl.test_same_weights import LAYER

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks"),
    pytest.mark.usefixtures("uncounted"),
]
Make = Callable[..., Config]
SHORT = ("train.steps=2", "train.warmup=1", "train.lr=5e-4")  # the second step shows the effect of the first update
NEAR = 1e-4  # the order of summation differs, and FP8 codes may flip


def lines(cfg: Config, step: int = 1) -> list[dict]:
    """Return the lines of a step in completions.jsonl, sorted by row and sample."""
    entries = [json.loads(line) for line in (Path(cfg.run.dir) / COMPLETIONS).read_text().splitlines()]
    return sorted((line for line in entries if line["step"] == step), key=lambda line: (line["row"], line["sample"]))


def assert_near(cfg: Config, other: Config, names: tuple[str, ...]) -> None:
    for row, other_row in zip(read_metrics(cfg), read_metrics(other), strict=True):
        for name in names:
            expected = row[name] and pytest.approx(row[name], rel=NEAR, abs=NEAR)  # None stays None
            assert other_row[name] == expected, (name, row["step"])
        assert row.get("sampling/draws") == other_row.get("sampling/draws")


@pytest.mark.parametrize(
    "overrides",
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
def test_two_ranks_match_one_in_rl(rl_config: Make, overrides: tuple[str, ...]):
    """Advantages, updates and dynamic sampling use the groups of both ranks."""
    overrides = (*overrides, *SHORT, "rl.show=16", "train.micro_batch=4")
    one_rank, two_ranks = rl_config(*overrides, dir="one_rank"), rl_config(*overrides, dir="two_ranks")
    rl.run(one_rank)
    assert [code for code, _ in both(two_ranks)] == [0, 0]
    for single, distributed in zip(lines(one_rank), lines(two_ranks), strict=True):
        assert distributed.pop("advantage") == pytest.approx(single.pop("advantage"), abs=NEAR)
        assert distributed == single
    critic_metrics = ("value_loss", "value_mean", "explained_variance") if "rl.algorithm=ppo" in overrides else ()
    assert_near(
        one_rank, two_ranks, ("loss", "grad_norm", "reward", "reward_std", "length", "entropy", *critic_metrics)
    )


@pytest.mark.parametrize(
    "overrides",
    [(), LORA, ("preference={reference: disk}", "train.global_batch=3")],
    ids=["copy", "base", "uneven from disk"],
)
def test_two_ranks_match_one_in_preference(preference_config: Make, pairs: Path, overrides: tuple[str, ...]):
    held_out = f"data.eval=[{{path: {pairs}, max_samples: 3}}]"
    overrides = (*overrides, *SHORT, "train.micro_batch=1", held_out)
    one_rank, two_ranks = preference_config(*overrides, dir="one_rank"), preference_config(*overrides, dir="two_ranks")
    rl.run(one_rank)
    assert [code for code, _ in both(two_ranks)] == [0, 0]
    assert_near(one_rank, two_ranks, ("loss", "grad_norm", "rewards/margins", "logps/chosen"))
    assert read_metrics(two_ranks)[-1]["eval"] == pytest.approx(read_metrics(one_rank)[-1]["eval"], rel=NEAR, abs=NEAR)


def test_two_ranks_match_one_with_kto(preference_config: Make, labelled: Path):
    """The baseline includes the answers of the other rank."""
    overrides = (
        f"data.train=[{{path: {labelled}}}]",
        "preference={loss: kto, desirable_weight: 4}",
        "train.micro_batch=1",
        "train.lr=1e-2",
    )
    one_rank, two_ranks = preference_config(*overrides, dir="one_rank"), preference_config(*overrides, dir="two_ranks")
    rl.run(one_rank)
    assert [code for code, _ in both(two_ranks)] == [0, 0]
    assert read_metrics(one_rank)[2]["kl"] > 0
    assert_near(one_rank, two_ranks, ("loss", "grad_norm", "kl", "rewards/margins"))


def _with_missing_images(source: Path, name: str, broken: range) -> str:
    rows = json.loads(source.read_text())[:8]
    for number in broken:
        rows[number]["image"] = "images/none.png"
    (source.parent / name).write_text(json.dumps(rows))
    return f"data.train=[{{path: {source.parent / name}}}]"


def test_rows_skipped_on_one_rank_do_not_block_the_other(rl_config: Make, preference_config: Make, pairs: Path):
    """Only one of eight rows is usable: in one step one rank has no row, in the other step neither has."""
    rest = ("data.on_bad_sample=skip", "run.timeout=30", "train.steps=2", "train.warmup=0")
    overrides = (_with_missing_images(pairs, "few.json", range(1, 8)), *rest, "rl.show=16")
    one_rank, two_ranks = rl_config(*overrides, dir="one_rank"), rl_config(*overrides, dir="two_ranks")
    rl.run(one_rank)
    results = both(two_ranks)
    assert [code for code, _ in results] == [0, 0], results
    assert [len(lines(cfg, 1)) + len(lines(cfg, 2)) for cfg in (one_rank, two_ranks)] == [4, 4]
    assert_near(one_rank, two_ranks, ("loss", "grad_norm", "reward", "tokens"))
    overrides = (_with_missing_images(pairs, "few_pairs.json", range(1, 8)), *rest)
    one_rank, two_ranks = preference_config(*overrides, dir="pairs_one"), preference_config(*overrides, dir="pairs_two")
    rl.run(one_rank)
    results = both(two_ranks)
    assert [code for code, _ in results] == [0, 0], results
    assert_near(one_rank, two_ranks, ("loss", "grad_norm", "logps/chosen", "tokens"))


def test_reward_error_on_one_rank_ends_both(rl_config: Make, tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "import os\n"
        "def score(completions, **columns):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise KeyError('no such digit')\n"
        "    return [1.0] * len(completions)\n"
    )
    (_, first), (_, second) = results = both(rl_config(f"rl.rewards=['{tmp_path}/own.py:score']", "run.timeout=30"))
    assert [code for code, _ in results] == [1, 1]
    assert "reward score" in second and "KeyError: 'no such digit'" in second and "train.json, row" in second
    assert "rank 1" in first and "step 1, rewards" in second + first


def _write(rank: int) -> None:
    make_micro_batches = RlStepper.make_micro_batches

    def write_weight(stepper, rollout):
        if rank == 1 and stepper.step_number == 2:
            stepper.model.get_submodule(LAYER).weight.to_local().data[0, 5] += 1e-3
        return make_micro_batches(stepper, rollout)

    RlStepper.make_micro_batches = write_weight


def _perturb(rank: int) -> None:
    begin = RlPhase.begin

    def begin_with_fault(phase, stepper, *rest):
        begin(phase, stepper, *rest)
        layer = stepper.model.get_submodule(LAYER)
        layer.register_forward_hook(lambda module, args, out: out if module.training else 1.05 * out)

    RlPhase.begin = begin_with_fault


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("recipe", ["blockwise", "off"])
def test_weight_change_on_one_rank_is_named_on_that_rank(rl_config: Make, recipe: str):
    cfg = rl_config(f"fp8.recipe={recipe}", "run.timeout=30")
    (_, first), (_, second) = results = both(cfg, _write)
    assert [code for code, _ in results] == [1, 1] and len(read_metrics(cfg)) == 1
    assert f"step 2: weights changed between its rollout and its update: {LAYER}" in second
    assert "rank 1" in first


@pytest.mark.usefixtures("unseen")
def test_gap_error_names_the_layer_on_both_ranks(rl_config: Make):
    results = both(rl_config("rl.max_gap=1e-3", "run.timeout=30"), _perturb)
    assert [code for code, _ in results] == [1, 1]
    for _, output in results:
        assert f"the first layer that differs is {LAYER}, by 0.05 of" in output
