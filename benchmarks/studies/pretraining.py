"""Pretraining: does a decoder learn text in FP8 as it does in high precision, by recipe?

Three designs, each with its own interval. For every seed high precision trains once (600 steps), and keeps the
checkpoints after 200 and 400:

    same weights    what FP8 trained, judged in FP8 and in high precision on held-out text: the mean of each seed
    forks           from high precision's checkpoints FP8 goes on with the same data to the end; high precision itself
                    is the other side. A third of the training long: steps 1 to 200 of both depths, of which the
                    second half counts; and from step 200 on, how the gap grows over 400 steps
    trajectories    in blockwise, whole trainings from the same weights with the same data, judged by held-out loss;
                    also by the mean of the weights over the last tenth, which moves less from seed to seed
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import growth
import texts
from study import Design, Outcomes, Study, beside_high, gap, held, pooled, row, same_weights, seed_of
from unit import Unit
from units import TRAINED, UNITS, bare

from octavo.config import Config

STEPS, DEPTHS, THIRD = 600, (200, 400), 200
FORK_SEEDS, PAIRS = 4, 4
RECIPES = ("blockwise", "rowwise", "tensorwise", "mxfp8")
SAME, FORK, WHOLE = 0.001, 0.0015, 0.0025  # the bars, as shares of the loss
WINDOW = 50
WHOLE_RECIPE = "blockwise"
TRIED = "a trial of 300 steps, 1.1 M parameters: six forks, four pairs of seeds"


def units(home: Path) -> list[Unit]:
    """Forks first, seed by seed; then pairs of whole trainings."""
    cfg = texts.prepare(home, STEPS)
    forks, wholes = [], []
    for seed in range(max(PAIRS, FORK_SEEDS)):
        forked = seed < FORK_SEEDS
        (forks if forked else wholes).append(high(cfg, home, seed))
        for depth in DEPTHS if forked else ():
            begin = f"run.fork={checkpoint(home, seed, depth)}"
            for recipe in RECIPES:
                name = f"fork-{depth}-{recipe}-seed-{seed}"
                forks.append(Unit(name, bare(cfg, home, name, seed, f"fp8.recipe={recipe}", begin), depth))
        if seed < PAIRS:
            name = f"whole-{WHOLE_RECIPE}-seed-{seed}"
            wholes.append(Unit(name, bare(cfg, home, name, seed, f"fp8.recipe={WHOLE_RECIPE}"), average=True))
    return forks + wholes


def high(cfg: Config, home: Path, seed: int) -> Unit:
    """The training in high precision of a seed, which keeps the checkpoints that others begin from."""
    name, forked = f"high-seed-{seed}", seed < FORK_SEEDS
    milestones = f"run.milestones=[{', '.join(map(str, DEPTHS if forked else ()))}]"
    return Unit(name, bare(cfg, home, name, seed, milestones), average=True, keeps=forked)


def checkpoint(home: Path, seed: int, step: int) -> Path:
    return home / UNITS / f"high-seed-{seed}" / TRAINED / "milestones" / f"step_{step}"


def judge(home: Path, outcomes: Outcomes) -> dict[str, Any]:
    rows, curves = [], {}
    wholes, failed = pooled(outcomes, [f"whole-{WHOLE_RECIPE}-seed-{seed}" for seed in range(PAIRS)])
    beside, _ = pooled(outcomes, [one.name for one in wholes], beside_high)
    pairs = [(one, outcomes[beside_high(one.name)]) for one in beside]
    for recipe in RECIPES:
        same, gone = [], []
        by_seed: dict[str, list[float]] = {}
        for depth in DEPTHS:
            names = [f"fork-{depth}-{recipe}-seed-{seed}" for seed in range(FORK_SEEDS)]
            present, lost = pooled(outcomes, names, beside_high)
            sides = [(one, outcomes[beside_high(one.name)]) for one in present]
            gaps = [gap(one, other, depth + THIRD // 2 + 1, depth + THIRD) for one, other in sides]
            rows.append(row(f"forks after step {depth}", recipe, gaps, FORK, lost))
            ends = [held(one, other) for one, other in sides]
            rows.append(row(f"forks after step {depth}, held-out at step {STEPS}", recipe, ends, FORK, lost))
            same += present
            gone += lost
            for one, of_seed in zip(present, gaps, strict=True):
                by_seed.setdefault(seed_of(one.name), []).append(of_seed)
            if depth == DEPTHS[0]:
                at = range(depth, STEPS, WINDOW)
                grown = [[gap(one, other, n + 1, n + WINDOW) for one, other in sides] for n in at]
                curves[recipe] = {"steps": [n + WINDOW - depth for n in at], "gaps": grown}
        both = [sum(of_seed) / len(DEPTHS) for of_seed in by_seed.values() if len(of_seed) == len(DEPTHS)]
        rows.append(row("forks, mean of both depths", recipe, both, FORK, gone))
        same += wholes if recipe == WHOLE_RECIPE else []
        rows.append(
            row("same weights", recipe, same_weights(same), SAME, gone + (failed if recipe == WHOLE_RECIPE else []))
        )
    whole = [held(one, other) for one, other in pairs]
    rows.append(row("trajectories", WHOLE_RECIPE, whole, WHOLE, failed))
    course = [gap(one, other, 1, STEPS) for one, other in pairs]
    rows.append(row("trajectories, training loss of all steps", WHOLE_RECIPE, course, WHOLE, failed))
    mean = [held(one, other, "averaged_own", "averaged_own") for one, other in pairs]
    rows.append(row("trajectories, weights averaged", WHOLE_RECIPE, mean, WHOLE, failed))
    return {"rows": rows, "growth": curves}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """How the gap of forks grows with their length."""
    growth.draw(result["growth"], f"Forks after step {DEPTHS[0]}: loss above high precision's", FORK, path)


STUDY = Study(
    "pretraining",
    "Does a decoder of 1.09 M parameters learn text in FP8 as it does in high precision, by recipe?",
    (
        Design("same weights, by recipe", FORK_SEEDS, 0.0001, TRIED, SAME),
        Design("forks, by recipe and depth", FORK_SEEDS, 0.00016, TRIED, FORK),
        Design("trajectories, blockwise", PAIRS, 0.011, TRIED, WHOLE),
    ),
    units, judge, draw,
)  # fmt: skip
