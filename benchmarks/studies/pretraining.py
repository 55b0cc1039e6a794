"""Pretraining: does a decoder learn text in FP8 as it does in high precision, by recipe?

Three designs, each with its own interval. For every seed high precision trains once (600 steps), and keeps the
checkpoints after 200 and 400:

    same weights    what FP8 trained, judged in FP8 and in high precision on held-out text: the mean of each seed
    forks           from high precision's checkpoints FP8 goes on with the same data to the end; high precision itself
                    is the other side. A third of the training long: steps 1 to 200 of both depths, of which the
                    second half counts; and from step 200 on, how the gap grows over 400 steps
    trajectories    whole trainings from the same weights with the same data, judged by held-out loss; also by the mean
                    of the weights over the last tenth, which moves less from seed to seed
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import texts
from matplotlib.figure import Figure
from study import Design, Outcomes, Study, beside_high, gap, held, pooled, row, same_weights
from units import TRAINED, UNITS, Unit, bare

from octavo.config import Config
from octavo.report.figures import PALETTE, STYLE

STEPS, DEPTHS, THIRD = 600, (200, 400), 200
FORK_SEEDS, PAIRS = 4, {"blockwise": 8, "rowwise": 4, "tensorwise": 4, "mxfp8": 4}
RECIPES = tuple(PAIRS)
SAME, FORK, WHOLE = 0.001, 0.0015, 0.0025  # the bars, as shares of the loss
WINDOW = 50
TRIED = "a trial of 300 steps, 1.1 M parameters: six forks, four pairs of seeds"


def units(home: Path) -> list[Unit]:
    """Forks first, seed by seed; then pairs of whole trainings, those of blockwise before the others'."""
    cfg = texts.prepare(home, STEPS)
    forks, wholes = [], []
    for seed in range(max(PAIRS.values())):
        forked = seed < FORK_SEEDS
        (forks if forked else wholes).append(high(cfg, home, seed))
        for depth in DEPTHS if forked else ():
            begin = f"run.fork={checkpoint(home, seed, depth)}"
            for recipe in RECIPES:
                own = f"fork-{depth}-{recipe}-seed-{seed}"
                forks.append(Unit(own, bare(cfg, home, own, seed, f"fp8.recipe={recipe}", begin), depth))
        wholes += [_whole(cfg, home, "blockwise", seed)] if seed < PAIRS["blockwise"] else []
    others = [_whole(cfg, home, r, seed) for seed in range(FORK_SEEDS) for r in RECIPES[1:] if seed < PAIRS[r]]
    return forks + wholes + others


def high(cfg: Config, home: Path, seed: int) -> Unit:
    """The training in high precision of a seed, which keeps the checkpoints that others begin from."""
    name, forked = f"high-seed-{seed}", seed < FORK_SEEDS
    milestones = f"run.milestones=[{', '.join(map(str, DEPTHS if forked else ()))}]"
    return Unit(name, bare(cfg, home, name, seed, milestones), average=True, keeps=forked)


def checkpoint(home: Path, seed: int, step: int) -> Path:
    return home / UNITS / f"high-seed-{seed}" / TRAINED / "milestones" / f"step_{step}"


def _whole(cfg: Config, home: Path, recipe: str, seed: int) -> Unit:
    name = f"whole-{recipe}-seed-{seed}"
    return Unit(name, bare(cfg, home, name, seed, f"fp8.recipe={recipe}"), average=True)


def judge(home: Path, outcomes: Outcomes) -> dict[str, Any]:
    rows, curves = [], {}
    for recipe in RECIPES:
        forks = {
            depth: pooled(outcomes, [f"fork-{depth}-{recipe}-seed-{seed}" for seed in range(FORK_SEEDS)], beside_high)
            for depth in DEPTHS
        }
        names = [f"whole-{recipe}-seed-{seed}" for seed in range(PAIRS[recipe])]
        wholes, failed = pooled(outcomes, names, beside_high)
        plain = {one.name: outcomes[beside_high(one.name)] for one in wholes}
        for depth, (there, lost) in forks.items():
            plain |= {one.name: outcomes[beside_high(one.name)] for one in there}
            gaps = [gap(one, plain[one.name], depth + THIRD // 2 + 1, depth + THIRD) for one in there]
            rows.append(row(f"forks after step {depth}", recipe, gaps, FORK, lost))
            ends = [held(one, plain[one.name]) for one in there]
            rows.append(row(f"forks after step {depth}, held-out at step {STEPS}", recipe, ends, FORK, lost))
        same = same_weights([*(one for there, _ in forks.values() for one in there), *wholes])
        lost = [text for _, texts_ in forks.values() for text in texts_]
        rows.append(row("same weights", recipe, same, SAME, lost + failed))
        rows.append(row("trajectories", recipe, [held(one, plain[one.name]) for one in wholes], WHOLE, failed))
        mean = [held(one, plain[one.name], "averaged_own", "averaged_own") for one in wholes]
        rows.append(row("trajectories, weights averaged", recipe, mean, WHOLE, failed))
        first = DEPTHS[0]
        grown = [
            [gap(one, plain[one.name], at + 1, at + WINDOW) for one in forks[first][0]]
            for at in range(first, STEPS, WINDOW)
        ]
        curves[recipe] = {"steps": [at + WINDOW - first for at in range(first, STEPS, WINDOW)], "gaps": grown}
    return {"rows": rows, "growth": curves}


def draw(found: Mapping[str, Any], path: Path) -> None:
    """How the gap of forks grows with their length: mean and 95 % interval by recipe."""
    from octavo.report.claims import mean_gap

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.subplots()
        for number, (recipe, curve) in enumerate(found["growth"].items()):
            made = [(step, mean_gap(gaps)) for step, gaps in zip(curve["steps"], curve["gaps"], strict=True)]
            known = [(step, one) for step, one in made if one is not None]
            if not known:
                continue
            at = np.array([step for step, _ in known]) + 6 * (number - 1.5)
            middle = np.array([100 * one.estimate for _, one in known])
            half = np.array([100 * one.half for _, one in known])
            color = PALETTE[f"fp8-{number}"]
            axes.errorbar(at, middle, half, color=color, marker="o", markersize=4, capsize=2, label=recipe)
        axes.axhline(100 * FORK, color=PALETTE["soft"], linestyle="--", linewidth=1)
        axes.axhline(0, color=PALETTE["ink"], linewidth=0.8)
        axes.set(title=f"Forks after step {DEPTHS[0]}: loss above high precision's", xlabel="steps after the fork",
                 ylabel="% (95 % intervals)")  # fmt: skip
        axes.legend(ncols=4)
        figure.savefig(path, dpi=150)


STUDY = Study(
    "pretraining",
    "Does a decoder of 1.09 M parameters learn text in FP8 as it does in high precision, by recipe?",
    (
        Design("same weights", FORK_SEEDS, 0.0001, TRIED, SAME),
        Design("forks, by recipe and depth", FORK_SEEDS, 0.00016, TRIED, FORK),
        Design("trajectories, blockwise", PAIRS["blockwise"], 0.011, TRIED, WHOLE),
        Design("trajectories, the other recipes", FORK_SEEDS, 0.011, TRIED, WHOLE),
    ),
    units, judge, draw,
)  # fmt: skip
