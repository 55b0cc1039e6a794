"""LoRA: does blockwise train adapters as blockwise_1d does?

examples/digits_lora.yaml: a model that answers with numerals learns to answer in words. Its base is frozen FP8 codes,
and its adapters stay in high precision. So no wgrad runs in FP8, and blockwise differs from blockwise_1d in nothing
else: every difference must be exactly zero, which two seeds show. High precision is the same LoRA on a base in high
precision.

Reduced: the base is trained once, in high precision (500 steps), and all seeds adapt it; there are two seeds. Adapters
train 200 steps as in the example.
"""

from __future__ import annotations

from pathlib import Path

from study import Design, Outcomes, Study, beside_high, held, make_pairs, row
from tower import ACCURACY, LOSS
from unit import Outcome, Unit
from units import HF, ROOT, TRAINED, UNITS, bare
from wgrad import COMPARED, NEW, OLD, SAME, questions_lost, sides

from benchmarks import lora_base
from octavo.config import load_config

SEEDS, BASE_STEPS = 2, 500
BASE = "base"
STEPS_THAT_DIFFER = "steps whose losses differ"
SIDES = {
    "high": ("model.load_in_fp8=false", "fp8.recipe=off"),
    OLD: (f"fp8.recipe={OLD}",),
    NEW: (f"fp8.recipe={NEW}",),  # with the codes of blockwise_1d: weights have the same blocks in both
}


def units(home: Path) -> list[Unit]:
    """The base, then its adapters seed by seed."""
    base = lora_base.prepare(home, BASE_STEPS)
    planned = [Unit(BASE, bare(base, home, BASE, 0, "run.hf=true"), keeps=True)]
    cfg = load_config(
        ROOT / "examples" / "digits_lora.yaml",
        [
            f"model.path={home / UNITS / BASE / TRAINED / HF}",
            f"data.train=[{{path: {home}/words_train.json, images: {home}/digits}}]",
            f"data.eval=[{{path: {home}/words_test.json, images: {home}/digits}}]",
        ],
    )
    for seed in range(SEEDS):
        for side, words in SIDES.items():
            name = f"{side}-seed-{seed}" if side == "high" else f"lora-{side}-seed-{seed}"
            planned.append(Unit(name, bare(cfg, home, name, seed, *words)))
    return planned


def judge(home: Path, outcomes: Outcomes) -> dict[str, object]:
    pairs, lost = sides(outcomes, "lora", SEEDS)
    rows = [
        row(STEPS_THAT_DIFFER, COMPARED, [unequal(*of) for of in pairs], SAME, lost, both_sides=True),
        row("held-out loss", COMPARED, [held(*of) for of in pairs], SAME, lost, both_sides=True),
        row("questions lost", COMPARED, [questions_lost(*of) for of in pairs], ACCURACY, lost, both_sides=True),
    ]
    for recipe in (OLD, NEW):
        against, lost = make_pairs(outcomes, [f"lora-{recipe}-seed-{seed}" for seed in range(SEEDS)], beside_high)
        what = f"{recipe} compared with high precision"
        rows.append(row("held-out loss", what, [held(*of) for of in against], LOSS, lost))
        rows.append(row("questions lost", what, [questions_lost(*of) for of in against], ACCURACY, lost))
    return {"rows": rows}


def unequal(new: Outcome, old: Outcome) -> float:
    """The share of steps whose losses are not the same bit for bit."""
    return sum(a != b for a, b in zip(new.losses, old.losses, strict=True)) / len(new.losses)


STUDY = Study(
    "lora",
    "Does blockwise train adapters on a frozen FP8 base exactly as blockwise_1d does?",
    (Design(STEPS_THAT_DIFFER, SEEDS, 0.0, "a frozen base has no wgrad", SAME, both_sides=True),),
    units,
    judge,
)
