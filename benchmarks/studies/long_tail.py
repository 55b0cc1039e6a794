"""The long tail: which recipe survives outliers, and up to which magnitude?

Outliers are planted into the decoders that the pretraining study trained in high precision, without changing what they
compute: a channel is made m times larger and what reads it divides by m, a power of two, so that high precision gives
the same losses.

    residual   two channels of every norm's output, the input of q, k, v and of gate and up: the outlier features of the
               residual stream that FOG (Hernandez-Cano et al. 2025, arXiv 2505.20524) counts by kurtosis
    product    two channels of the input of every down projection, as SwiGLU grows them late in training (Fishman et al.
               2024, arXiv 2409.12517, whose remedy, Smooth-SwiGLU, divides by just that m)

First each recipe judges held-out text by the planted weights, untrained, for all magnitudes. Then it trains 100 steps
from them, compared with high precision from the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pretraining
import texts
from matplotlib.figure import Figure
from pretraining import RECIPES, STEPS
from study import Design, Outcomes, Study, gap, pooled, row
from unit import Unit
from units import bare

from octavo.report.run.plots import PALETTE, STYLE

SEEDS, DEPTH, LENGTH = 3, 400, 100
KINDS = ("residual", "product")
SWEEP = tuple(2**n for n in range(0, 19, 3))
TRAINED = (64, 4096)
CHANNELS = (5, 77)
MARGIN = 0.0025
SHORT = ("train.lr=1e-3", "train.min_lr=3e-4", "train.warmup=10")


def units(home: Path) -> list[Unit]:
    cfg = texts.prepare(home, STEPS)
    planned = []
    for seed in range(SEEDS):
        planned.append(pretraining.high(cfg, home, seed))
        begin = f"run.start_from={pretraining.checkpoint(home, seed, DEPTH)}"
        for recipe in RECIPES:
            name = f"sweep-{recipe}-seed-{seed}"
            # One step at a rate that moves nothing: what is judged is the checkpoint.
            swept = bare(cfg, home, name, seed, "train.steps=1", "train.lr=1e-12", "train.min_lr=0", "train.warmup=0",
                       f"fp8.recipe={recipe}", begin)  # fmt: skip
            planned.append(Unit(name, swept, look=("long_tail", "sweep")))
        for kind in KINDS:
            for times in TRAINED:
                for recipe in ("off", *RECIPES):
                    name = f"train-{kind}-{times}-{recipe}-seed-{seed}"
                    swept = bare(cfg, home, name, seed, f"train.steps={LENGTH}", *SHORT, f"fp8.recipe={recipe}", begin)
                    planned.append(Unit(name, swept, plant=("long_tail", "plant", kind, times)))
    return planned


def plant(run: Any, kind: str, times: float) -> None:
    """Make two channels ``times`` larger, and what reads them as much smaller, in every block."""
    import torch

    with torch.no_grad():
        for block in run.model.model.layers:
            attention, mlp = block.self_attn, block.mlp
            if kind == "residual":
                pairs = [(block.input_layernorm.weight, (attention.q_proj, attention.k_proj, attention.v_proj)),
                         (block.post_attention_layernorm.weight, (mlp.gate_proj, mlp.up_proj))]  # fmt: skip
            else:
                pairs = [(mlp.up_proj.weight, (mlp.down_proj,))]
            for grown, readers in pairs:
                grown[list(CHANNELS)] *= times
                for reader in readers:
                    reader.weight[:, list(CHANNELS)] /= times


def sweep(run: Any) -> dict[str, Any]:
    """Held-out loss in FP8 and in high precision by kind and magnitude: {kind: {times: [own, high]}}; infinite where
    there is none, which is a finding about that magnitude only."""
    from octavo import fp8, train

    def judged() -> float:
        try:
            return train.evaluate(run.model, run.job.evalset, run.job.stepper.forward, run.world)["loss"]
        except train.TrainError:
            return math.inf

    losses: dict[str, Any] = {}
    for kind in KINDS:
        losses[kind] = {}
        for times in SWEEP:
            plant(run, kind, times)
            fp8.invalidate(run.model)
            in_fp8 = judged()
            with fp8.high_precision(run.model):
                losses[kind][str(times)] = [in_fp8, judged()]
            plant(run, kind, 1 / times)
    fp8.invalidate(run.model)
    return losses


def judge(home: Path, outcomes: Outcomes) -> dict[str, Any]:
    rows, curves = [], {}
    for kind in KINDS:
        curves[kind] = {}
        for recipe in RECIPES:
            swept, lost = pooled(outcomes, [f"sweep-{recipe}-seed-{seed}" for seed in range(SEEDS)])
            by_times = {times: [loss / high - 1 for loss, high in (one.more[kind][str(times)] for one in swept)]
                    for times in SWEEP}  # fmt: skip
            curves[kind][recipe] = {str(times): gaps for times, gaps in by_times.items()}
            lines = [row(f"same weights, {kind}", f"{recipe}, {times} times", gaps, MARGIN, lost)
                     for times, gaps in by_times.items()]  # fmt: skip
            rows += lines
        for times in TRAINED:
            for recipe in RECIPES:
                named = f"train-{kind}-{times}"
                beside = {f"{named}-{recipe}-seed-{seed}": f"{named}-off-seed-{seed}" for seed in range(SEEDS)}
                present, lost = pooled(outcomes, list(beside), beside.__getitem__)
                sides = [(one, outcomes[beside[one.name]]) for one in present]
                gaps = [gap(one, other, LENGTH // 2 + 1, LENGTH) for one, other in sides]
                rows.append(row(f"trained {LENGTH} steps, {kind}", f"{recipe}, {times} times", gaps, MARGIN, lost))
    return {"rows": rows, "sweep": curves}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Loss above high precision's by magnitude, one panel a kind."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        for axes, (kind, curves) in zip(figure.subplots(1, 2, sharey=True), result["sweep"].items(), strict=True):
            for number, (recipe, curve) in enumerate(curves.items()):
                known = {int(times): gaps for times, gaps in curve.items() if gaps and np.isfinite(gaps).all()}
                means = [100 * max(sum(gaps) / len(gaps), 1e-5) for gaps in known.values()]
                axes.plot(list(known), means, color=PALETTE[f"fp8-{number}"], marker="o", markersize=3, label=recipe)
            axes.axhline(100 * MARGIN, color=PALETTE["soft"], linestyle="--", linewidth=1)
            axes.set(title=f"{kind} outliers", xscale="log", yscale="log", xlabel="times larger")
        figure.axes[0].set_ylabel("% loss above high precision")
        figure.axes[0].legend()
        figure.savefig(path, dpi=150)


ASSUMED = "assumed: as of forks; where a recipe breaks, gaps are whole per cents"
STUDY = Study(
    "long_tail",
    "Which recipe survives planted outliers, and up to which magnitude?",
    (
        Design("same weights, by magnitude", SEEDS, 0.0002, ASSUMED, MARGIN),
        Design(f"{LENGTH} steps of training", SEEDS, 0.0005, ASSUMED, MARGIN),
    ),
    units, judge, draw, home="pretraining",
)  # fmt: skip
