"""Reinforcement learning: does blockwise learn from rewards as blockwise_1d does?

examples/digits_rl.yaml (GRPO): a tiny Qwen3-VL that reads about half of the digits learns from whether its answers are
right. For every seed high precision trains that model as examples/digits_rl_base.yaml does, in which all sides of the
seed begin. Judged are the mean reward of the last quarter of the steps, and held-out questions.

Reduced: 80 steps instead of 120, in which the learning rate falls to zero as well. The initial model is trained in high
precision, in each seed, where the example trains it once, in blockwise_1d.
"""

from __future__ import annotations

import json
from pathlib import Path

from study import Design, Outcomes, Study, beside_high, make_pairs, row
from tower import ACCURACY
from unit import Outcome, Unit
from units import HF, ROOT, TRAINED, UNITS, bare
from wgrad import COMPARED, NEW, OLD, questions_lost, sides

from octavo import train
from octavo.config import load_config
from octavo.data.builtin import digits
from octavo.models.tiny import tiny

SEEDS, STEPS = 4, 80
QUARTER = STEPS // 4
SIDES = {"high": "off", OLD: OLD, NEW: NEW}


def units(home: Path) -> list[Unit]:
    """Seed by seed: the initial model, and what begins from it."""
    digits.write(home / "digits")
    tiny.write("qwen3_vl", home / "model")
    held_out, planned = f"data.eval=[{{path: {home}/digits/test.json}}]", []
    first = load_config(
        ROOT / "examples" / "digits_rl_base.yaml",
        [f"model.path={home}/model", f"data.train=[{{path: {home}/digits/train.json}}]", held_out],
    )
    for seed in range(SEEDS):
        base = f"base-seed-{seed}"
        planned.append(Unit(base, bare(first, home, base, seed, "fp8.recipe=off", "run.hf=true"), keeps=True))
        cfg = load_config(
            ROOT / "examples" / "digits_rl.yaml",
            [
                f"model.path={home / UNITS / base / TRAINED / HF}",
                f"data.train=[{{path: {home}/digits/train_prompts.json}}]",
                held_out,
                f"train.steps={STEPS}",
                "run.eval_every=0",
            ],
        )
        for side, recipe in SIDES.items():
            name = f"{side}-seed-{seed}" if side == "high" else f"rl-{side}-seed-{seed}"
            planned.append(Unit(name, bare(cfg, home, name, seed, f"fp8.recipe={recipe}"), look=("rl", "rewards")))
    return planned


def rewards(run: train.Run) -> dict[str, object]:
    """The mean reward of each step, from 0 to 1."""
    rows = (Path(run.cfg.run.dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {"rewards": [row["reward"] for row in map(json.loads, rows) if "reward" in row]}


def reward(one: Outcome) -> float:
    """The mean over the last quarter of the steps."""
    last = one.more["rewards"][-QUARTER:]
    return float(sum(last) / len(last))


def reward_lost(new: Outcome, old: Outcome) -> float:
    return reward(old) - reward(new)


def judge(home: Path, outcomes: Outcomes) -> dict[str, object]:
    rows = []
    pairs, lost = sides(outcomes, "rl", SEEDS)
    compared = [(COMPARED, pairs, lost)]
    for recipe in (OLD, NEW):
        against, lost = make_pairs(outcomes, [f"rl-{recipe}-seed-{seed}" for seed in range(SEEDS)], beside_high)
        compared.append((f"{recipe} compared with high precision", against, lost))
    for what, against, lost in compared:
        rows.append(row("reward lost", what, [reward_lost(*of) for of in against], ACCURACY, lost))
        rows.append(row("questions lost", what, [questions_lost(*of) for of in against], ACCURACY, lost))
    return {"rows": rows}


TRIAL = "rl_cpu.json, 120 steps, FP8 and high precision in three seeds: {}"
STUDY = Study(
    "rl",
    "Does blockwise learn from rewards as blockwise_1d does?",
    (
        Design("reward lost", SEEDS, 0.0044, TRIAL.format("the reward gap of the last third"), ACCURACY),
        Design("questions lost", SEEDS, 0.0095, TRIAL.format("held-out accuracy by seed"), ACCURACY),
    ),
    units,
    judge,
)
