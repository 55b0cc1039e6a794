"""The vision tower: does running it in FP8 cost accuracy, with a decoder that does or does not?

A 2 x 2 factorial design, tower (with its projector) in FP8 or not x decoder in FP8 or not, every cell trained with the
same seeds: a tiny Qwen3-VL learns to read four handwritten digits by their places ("First?", "Third?"). The effect of
tower, of decoder, and how much more both cost together than the sum (their interaction) are means over pairs of one
seed, on held-out questions and on held-out loss. Cell "neither" is the control that FP8 vision towers lack elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from study import Design, Outcomes, Study, row
from unit import Outcome, Unit
from units import bare

from octavo.config import Config, load_config_text
from octavo.report.evidence.factorial import compute_contrast
from octavo.report.run.plots import PALETTE, STYLE

SEEDS, STEPS = 8, 400
ACCURACY, LOSS = 0.01, 0.05
PARTS = {"tower": ("image_encoder", "image_projector"), "decoder": ("foundation",)}
CELLS = ("neither", "tower", "decoder", "both")
CONFIG = """
model: {{path: {home}/model}}
fp8: {{recipe: "off"}}
data:
  train: [{{path: {home}/digits/train.json, images: {home}/digits}}]
  eval: [{{path: {home}/digits/test.json, images: {home}/digits}}]
train: {{steps: {steps}, seq_length: 64, micro_batch: 32, global_batch: 32, lr: 2e-3, schedule: onecycle}}
optimizer: {{betas: [0.9, 0.98], weight_decay: 0.5}}
"""


def prepare(home: Path) -> Config:
    from octavo.data.builtin import digits
    from octavo.models.tiny import tiny

    home.mkdir(parents=True, exist_ok=True)
    digits.write(home / "digits")
    if not (home / "model").exists():
        tiny.write("qwen3_vl", home / "model")
    return load_config_text(CONFIG.format(home=home, steps=STEPS), ())


def words(cell: str, recipe: str = "blockwise") -> list[str]:
    """What is in FP8 in a cell, as the configuration says it."""
    return [f"fp8.{part}.recipe={recipe}" for name in _on(cell) for part in PARTS[name]]


def _on(cell: str) -> tuple[str, ...]:
    return {"neither": (), "both": tuple(PARTS)}.get(cell, (cell,))


def units(home: Path) -> list[Unit]:
    cfg = prepare(home)
    named = [(f"{cell}-seed-{seed}", cell, seed) for seed in range(SEEDS) for cell in CELLS]
    return [Unit(name, bare(cfg, home, name, seed, *words(cell))) for name, cell, seed in named]


def effects(cells: Mapping[str, float]) -> dict[str, float]:
    """The effects of one seed's four cells, as `octavo compare --factorial` takes them
    (octavo.report.evidence.factorial)."""
    figures = {frozenset(_on(cell)): figure for cell, figure in cells.items()}
    named = {"tower": ("tower",), "decoder": ("decoder",), "interaction": tuple(PARTS)}
    return {name: compute_contrast(figures, of) for name, of in named.items()}


def judge(home: Path, outcomes: Outcomes) -> dict[str, Any]:
    whole: list[dict[str, Outcome]] = []
    for seed in range(SEEDS):
        cells = {cell: outcomes.get(f"{cell}-seed-{seed}") for cell in CELLS}
        if all(one is not None for one in cells.values()):
            whole.append({cell: one for cell, one in cells.items() if one is not None})
    lost = sorted({f"{one.name}: {one.failure}" for cells in whole for one in cells.values() if one.failure})
    sound = [cells for cells in whole if not any(one.failure for one in cells.values())]
    right = [effects({cell: one.held["own_right"] for cell, one in cells.items()}) for cells in sound]
    loss = [effects({cell: one.held["own"] for cell, one in cells.items()}) for cells in sound]
    plain = [cells["neither"].held["own"] for cells in sound]
    rows = []
    for part in ("tower", "decoder", "interaction"):
        # As a harm, like all gaps: questions lost, in shares of all; and loss, relative to the cell without FP8.
        rows.append(row("questions lost", part, [-one[part] for one in right], ACCURACY, lost))
        relative = [one[part] / base for one, base in zip(loss, plain, strict=True)]
        rows.append(row("held-out loss", part, relative, LOSS, lost))
    means = {
        cell: {
            "right": sum(cells[cell].held["own_right"] for cells in sound) / len(sound),
            "loss": sum(cells[cell].held["own"] for cells in sound) / len(sound),
        }
        for cell in CELLS
        if sound
    }
    return {"rows": rows, "cells": means, "seeds": len(sound)}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """The effects on questions right, each seed a point, with mean and 95 % interval."""
    shown = [one for one in result["rows"] if one["design"] == "questions lost" and "half" in one]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7, 3), layout="constrained")
        axes = figure.subplots()
        for at, one in enumerate(shown):
            color = PALETTE[f"fp8-{at}"]
            axes.plot([-100 * gap for gap in one["gaps"]], [at] * len(one["gaps"]), "o", color=color, alpha=0.35)
            axes.errorbar(-100 * one["estimate"], at, xerr=100 * one["half"], color=color, marker="D", capsize=3)
        axes.axvline(0, color=PALETTE["ink"], linewidth=0.8)
        axes.axvline(-100 * ACCURACY, color=PALETTE["soft"], linestyle="--", linewidth=1)
        axes.set_yticks(range(len(shown)), [one["what"] for one in shown])
        axes.set(title="What FP8 changes in questions right", xlabel="points (95 % intervals; each seed a dot)")
        axes.invert_yaxis()
        figure.savefig(path, dpi=150)


ASSUMED = "assumed: seeds of the demo lie 0.3 to 1 points apart, an effect averages two differences"
STUDY = Study(
    "tower",
    "Does a vision tower in FP8 cost accuracy, with a decoder in FP8 or in high precision?",
    (
        Design("questions, each effect", SEEDS, 0.007, ASSUMED, ACCURACY),
        Design("held-out loss, each effect", SEEDS, 0.1, "assumed: losses of seeds lie 10 % apart", LOSS),
    ),
    units, judge, draw,
)  # fmt: skip
