"""Everything on: what do all savings together cost, activations, states and weights in FP8, rounded at random?

The three designs of the pretraining study, and its trainings in high precision (fp32) as the other side:

    same weights    judged as they computed (BF16 and FP8) and in high precision of the same BF16 weights: the mean of
                    each seed
    forks           from high precision's weights after step 400, 200 steps with an optimizer of their own, which all
                    sides begin from the start: fp32; BF16 computing with fp32 weights, which tells how much of the gap
                    is BF16's; and everything
    trajectories    whole trainings with everything on, compared with fp32
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pretraining
import texts
from pretraining import FORK, FORK_SEEDS, SAME, STEPS, WHOLE
from study import Design, Outcomes, Study, beside_high, gap, held, pooled, row, same_weights
from unit import Unit
from units import bare

DEPTH, LENGTH, PAIRS = 400, 200, 3
EVERYTHING = (
    "fp8.recipe=blockwise", "fp8.activations=fp8", "fp8.param=true", "optimizer.states=fp8", "optimizer.master=bf16+sr",
)  # fmt: skip
SIDES = {"fp32": (), "bf16": ("train.precision=bf16",), "everything": EVERYTHING}
SHORT = (f"train.steps={LENGTH}", "train.lr=1e-3", "train.min_lr=3e-4", "train.warmup=10")


def units(home: Path) -> list[Unit]:
    cfg = texts.prepare(home, STEPS)
    planned = []
    for seed in range(FORK_SEEDS):
        planned.append(pretraining.high(cfg, home, seed))
        begin = f"run.start_from={pretraining.checkpoint(home, seed, DEPTH)}"
        for side, words in SIDES.items():
            name = f"anew-{side}-seed-{seed}"
            planned.append(Unit(name, bare(cfg, home, name, seed, *SHORT, *words, begin)))
    wholes = [f"whole-everything-seed-{seed}" for seed in range(PAIRS)]
    return planned + [
        Unit(name, bare(cfg, home, name, seed, *EVERYTHING), average=True) for seed, name in enumerate(wholes)
    ]


def judge(home: Path, outcomes: Outcomes) -> dict[str, Any]:
    rows = []
    for what, ours, theirs in (
        ("everything against fp32", "everything", "fp32"),
        ("everything against BF16", "everything", "bf16"),
        ("BF16 against fp32", "bf16", "fp32"),
    ):
        beside = {f"anew-{ours}-seed-{number}": f"anew-{theirs}-seed-{number}" for number in range(FORK_SEEDS)}
        present, gone = pooled(outcomes, list(beside), beside.__getitem__)
        sides = [(one, outcomes[beside[one.name]]) for one in present]
        gaps = [gap(one, other, LENGTH // 2 + 1, LENGTH) for one, other in sides]
        rows.append(row(f"forks after step {DEPTH}", what, gaps, FORK, gone))
        ends = [held(one, other) for one, other in sides]
        rows.append(row(f"forks after step {DEPTH}, held-out at the end", what, ends, FORK, gone))
    forks, lost = pooled(outcomes, [f"anew-everything-seed-{number}" for number in range(FORK_SEEDS)])
    names = [f"whole-everything-seed-{number}" for number in range(PAIRS)]
    trained, failed = pooled(outcomes, names)
    rows.append(row("same weights", "everything", same_weights([*forks, *trained]), SAME, lost + failed))
    wholes, failed = pooled(outcomes, names, beside_high)
    pairs = [(one, outcomes[beside_high(one.name)]) for one in wholes]
    whole = [held(one, other) for one, other in pairs]
    mean = [held(one, other, "averaged_own", "averaged_own") for one, other in pairs]
    rows.append(row("trajectories", "everything against fp32", whole, WHOLE, failed))
    rows.append(row("trajectories, weights averaged", "everything against fp32", mean, WHOLE, failed))
    return {"rows": rows}


ASSUMED = "assumed: three times the spread of forks without savings, since weights are rounded at random"
STUDY = Study(
    "everything",
    "What do FP8 activations, FP8 states, bf16+sr and FP8 parameters cost together, in pretraining?",
    (
        Design("same weights", FORK_SEEDS, 0.0003, ASSUMED, SAME),
        Design("forks", FORK_SEEDS, 0.00048, ASSUMED, FORK),
        Design("trajectories", PAIRS, 0.011, pretraining.TRIED, WHOLE),
    ),
    units, judge, home="pretraining",
)  # fmt: skip
