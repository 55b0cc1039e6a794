"""Does training change where x of wgrad has 128x128 blocks (blockwise) instead of 1x128 (blockwise_1d)?

When this was asked, blockwise_1d was named blockwise. The rule: the new casts take that name if the 95 % interval of
the difference of forks is inside +-0.05 %, and no other study says otherwise. Two designs, in eight seeds each:

    forks     the texts and the decoder of the study pretraining. For every seed high precision trains 400 steps and
              keeps the checkpoint after 200, from which blockwise_1d and blockwise go on with the same data to the end.
              The second half of that counts, and held-out text at the end
    tower     cell "both" of the study tower in both recipes: held-out loss, and questions lost

One cast of x in 128x128 blocks could serve fwd as well, which would save instructions of the cast. Its forks ("one
cast") round as the reference backend does, and are compared with blockwise_1d by the same rule.

Reduced: the cosine schedule of forks ends after 400 steps, not 600, they have one depth, and there are no whole
trainings. Of tower the cells that have a part in high precision are left out.
"""

from __future__ import annotations

from pathlib import Path

import pretraining
import texts
import tower
from smollm2_operands import apply, one_cast
from study import Design, Outcomes, Study, beside_high, gap, held, make_pairs, row, seed_of
from unit import Outcome, Unit
from units import bare

from octavo import train

OLD, NEW = "blockwise_1d", "blockwise"
STEPS, DEPTH, SEEDS = 400, 200, 8
SAME = 0.0005  # the bar of equality, as a share of the loss
COMPARED = f"{NEW} compared with {OLD}"
ONE = "one_cast"  # of x in 128x128, for fwd and wgrad


def units(home: Path) -> list[Unit]:
    """Forks, seed by seed; then towers; then forks with one cast of x."""
    text, digits = texts.prepare(home, STEPS), tower.prepare(home)
    forks, towers, others = [], [], []
    for seed in range(SEEDS):
        name = f"high-seed-{seed}"
        forks.append(Unit(name, bare(text, home, name, seed, f"run.milestones=[{DEPTH}]"), keeps=True))
        begin = f"run.fork={pretraining.checkpoint(home, seed, DEPTH)}"
        for recipe in (OLD, NEW):
            name = f"fork-{recipe}-seed-{seed}"
            forks.append(Unit(name, bare(text, home, name, seed, f"fp8.recipe={recipe}", begin), DEPTH))
            name = f"both-{recipe}-seed-{seed}"
            towers.append(Unit(name, bare(digits, home, name, seed, *tower.words("both", recipe))))
        name = f"fork-{ONE}-seed-{seed}"
        others.append(Unit(name, bare(text, home, name, seed, begin), DEPTH, plant=("wgrad", "plant_one_cast")))
    return forks + towers + others


def plant_one_cast(run: train.Run) -> None:
    """Cast x once, in 128x128 blocks, for fwd and for wgrad."""
    apply(run.model, one_cast(), "everything")


def judge(home: Path, outcomes: Outcomes) -> dict[str, object]:
    middle, rows = (DEPTH + STEPS) // 2, []
    learned, ended = f"forks after step {DEPTH}", f"forks, held-out at step {STEPS}"
    for new, what in ((NEW, COMPARED), (ONE, f"one cast of x in 128x128 compared with {OLD}")):
        pairs, lost = sides(outcomes, "fork", SEEDS, new)
        gaps = [gap(*of, middle + 1, STEPS) for of in pairs]
        rows.append(row(learned, what, gaps, SAME, lost, both_sides=True))
        rows.append(row(ended, what, [held(*of) for of in pairs], SAME, lost, both_sides=True))
    for recipe in (OLD, NEW):
        against, lost = make_pairs(outcomes, [f"fork-{recipe}-seed-{seed}" for seed in range(SEEDS)], beside_high)
        gaps = [gap(*of, middle + 1, STEPS) for of in against]
        rows.append(row(learned, f"{recipe} compared with high precision", gaps, pretraining.FORK, lost))
    pairs, lost = sides(outcomes, "both", SEEDS)
    rows.append(row("tower, held-out loss", COMPARED, [held(*of) for of in pairs], tower.LOSS, lost))
    rows.append(row("tower, questions lost", COMPARED, [questions_lost(*of) for of in pairs], tower.ACCURACY, lost))
    return {"rows": rows}


def sides(outcomes: Outcomes, kind: str, seeds: int, new: str = NEW) -> tuple[list[tuple[Outcome, Outcome]], list[str]]:
    """(blockwise or another side, blockwise_1d) of each seed of which both are trained, and the sentences of those that
    failed."""

    def old(name: str) -> str:
        return f"{kind}-{OLD}-seed-{seed_of(name)}"

    return make_pairs(outcomes, [f"{kind}-{new}-seed-{seed}" for seed in range(seeds)], old)


def questions_lost(new: Outcome, old: Outcome) -> float:
    """The share of held-out questions that the new side answers wrong, less the share of the old side."""
    return old.held["own_right"] - new.held["own_right"]


DIFFERENCES = (
    "study_pretraining.json: the gaps of rowwise, tensorwise and mxfp8 less the gap of blockwise in a seed, forks "
    "after step 200, root mean square of the three: {}"
)
EFFECTS = "study_tower.json: its effects average two differences and scatter by {} %, root mean square; times sqrt(2)"
STUDY = Study(
    "wgrad",
    "Does training change where x of wgrad has 128x128 blocks (blockwise) instead of 1x128 (blockwise_1d)?",
    (
        Design("forks", SEEDS, 0.00017, DIFFERENCES.format("steps 301 to 400"), SAME, both_sides=True),
        Design("forks, held-out", SEEDS, 0.00032, DIFFERENCES.format("held-out at step 600"), SAME, both_sides=True),
        Design("tower, held-out loss", SEEDS, 0.3, EFFECTS.format(21), tower.LOSS),
        Design("tower, questions lost", SEEDS, 0.0042, EFFECTS.format(0.29), tower.ACCURACY),
    ),
    units,
    judge,
)
