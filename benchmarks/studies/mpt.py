"""MPT as LLM-Foundry trains it: does it learn text in FP8 as it does in high precision?

A tiny one with learned positions and biases, for which LLM-Foundry's FP8 (TransformerEngine's delayed scaling, hybrid,
the largest of 16 steps) is one of the recipes. For every seed high precision trains once, 1,000 steps, and keeps the
checkpoint after half of them:

    same weights    what FP8 trained, judged in FP8 and in high precision on held-out text: the mean of each seed
    forks           from high precision's checkpoint FP8 goes on with the same data to the end, half of the training;
                    the second half of that counts, and held-out text at the end
    trajectories    whole trainings from the same weights with the same data, judged by held-out loss and by the
                    training loss of all 1,000 steps
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import growth
import texts
from study import Design, Outcomes, Study, beside_high, gap, held, pooled, row, same_weights
from unit import Unit
from units import TRAINED, UNITS, bare

STEPS, DEPTH, SEEDS, WINDOW = 1000, 500, 4, 50
RECIPES = ("blockwise", "delayed")
SAME, FORK, WHOLE = 0.001, 0.0015, 0.0025  # the bars of the pretraining study
SMALL = ("train.micro_batch=4", "train.global_batch=4")  # 512 tokens a step


def units(home: Path) -> list[Unit]:
    """High precision and forks, seed by seed; then whole trainings."""
    cfg = texts.prepare(home, STEPS, "mpt")
    forks, wholes = [], []
    for seed in range(SEEDS):
        name = f"high-seed-{seed}"
        forks.append(Unit(name, bare(cfg, home, name, seed, *SMALL, f"run.milestones=[{DEPTH}]"), keeps=True))
        begin = f"run.fork={home / UNITS / name / TRAINED / 'milestones' / f'step_{DEPTH}'}"
        for recipe in RECIPES:
            label = f"fork-{recipe}-seed-{seed}"
            forks.append(Unit(label, bare(cfg, home, label, seed, *SMALL, f"fp8.recipe={recipe}", begin), DEPTH))
            label = f"whole-{recipe}-seed-{seed}"
            wholes.append(Unit(label, bare(cfg, home, label, seed, *SMALL, f"fp8.recipe={recipe}")))
    return forks + wholes


def judge(home: Path, outcomes: Outcomes) -> dict[str, Any]:
    rows, curves, half = [], {}, DEPTH + (STEPS - DEPTH) // 2
    for recipe in RECIPES:
        forks, lost = pooled(outcomes, [f"fork-{recipe}-seed-{seed}" for seed in range(SEEDS)], beside_high)
        wholes, failed = pooled(outcomes, [f"whole-{recipe}-seed-{seed}" for seed in range(SEEDS)], beside_high)
        sides = [(one, outcomes[beside_high(one.name)]) for one in forks]
        pairs = [(one, outcomes[beside_high(one.name)]) for one in wholes]
        learned = [gap(one, other, half + 1, STEPS) for one, other in sides]
        course = [gap(one, other, 1, STEPS) for one, other in pairs]
        rows += [
            row(f"forks after step {DEPTH}", recipe, learned, FORK, lost),
            row(f"forks, held-out at step {STEPS}", recipe, [held(*of) for of in sides], FORK, lost),
            row("same weights", recipe, same_weights([*forks, *wholes]), SAME, lost + failed),
            row("trajectories", recipe, [held(*of) for of in pairs], WHOLE, failed),
            row("trajectories, training loss of all steps", recipe, course, WHOLE, failed),
        ]
        at = range(DEPTH, STEPS, WINDOW)
        grown = [[gap(one, other, n + 1, n + WINDOW) for one, other in sides] for n in at]
        curves[recipe] = {"steps": [n + WINDOW - DEPTH for n in at], "gaps": grown}
    return {"rows": rows, "growth": curves}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """How the gap of forks grows with their length."""
    growth.draw(result["growth"], f"MPT, forks after step {DEPTH}: loss above high precision's", FORK, path)


TRIED = "forks of the pretraining study, which scattered by 0.01 to 0.03 % over 100 steps"
STUDY = Study(
    "mpt",
    "Does a tiny MPT with learned positions and biases learn text in FP8 as it does in high precision?",
    (
        Design("same weights, by recipe", SEEDS, 0.00013, "the pretraining study's same weights", SAME),
        Design("forks, by recipe", SEEDS, 0.0002, TRIED, FORK),
        Design("trajectories, by recipe", SEEDS, 0.003, "the pretraining study's trajectories", WHOLE),
    ),
    units, judge, draw,
)  # fmt: skip
