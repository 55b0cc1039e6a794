"""The factorial trial, the cost of each component: its runs, its figures, and the verdict on each effect.

Cells differ only in which of the named components are in FP8, so that an effect belongs only to these: everything else
is in high precision in every cell. Components that are not named, the head and memory savings are therefore off in all
of them. The cell without components is high precision, and the cell with all of them is the FP8 run of the trial, which
is the configuration's own run if it has nothing else in FP8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.config import COMPONENTS, Component, Config, Rule
from octavo.config.sections.rl import BEYOND_SFT
from octavo.config.yaml.problems import nearest
from octavo.report.evidence.claims import LOSS_MARGIN, decide
from octavo.report.evidence.factorial import NONE, Cell, Effect, effects, subsets
from octavo.report.evidence.run_reader import ReportError, RunRecord
from octavo.report.evidence.trial_claims import learned_nothing, no_answers_to_lose, per_cent, points
from octavo.report.evidence.trial_spec import Run, Trial
from octavo.report.evidence.trust_table import FAIL, REPORTED, SKIPPED_WARN, Check, check_gemms
from octavo.report.trial import runs
from octavo.report.trial.memory_savings import changing, without
from octavo.report.trial.reuse import comparable

MOST = 4  # components: sixteen cells, each with several seeds
ACCURACY, LOSS = EFFECTS = ("effect_accuracy", "effect_loss")
TITLES = {ACCURACY: "Effect on held-out accuracy", LOSS: "Effect on held-out loss"}

Records = Sequence[tuple[Run, RunRecord]]


def named(components: Sequence[str]) -> tuple[str, ...]:
    """The components of a factorial trial, in the order of :data:`octavo.config.COMPONENTS`, because their order does
    not change the cells. Raises ReportError for unknown names, and for too few or too many."""
    for name in components:
        if name not in COMPONENTS:
            close = nearest(name, COMPONENTS)
            hint = f"did you mean {close}? " if close else ""
            raise ReportError(f"factorial: unknown component {name!r}; {hint}there are {', '.join(COMPONENTS)}")
    if twice := next((name for name in components if components.count(name) > 1), None):
        raise ReportError(f"factorial: {twice} is named twice; name it once")
    if not 2 <= len(components) <= MOST:
        raise ReportError(
            f"factorial: {len(components)} component(s) named, and a design needs 2 to {MOST}. For the cost of one "
            "component, run an ordinary trial with the others off: fp8.NAME.recipe=off"
        )
    return tuple(name for name in COMPONENTS if name in components)


def check_asked(cfg: Config, recipes: Sequence[str] | None, savings: bool) -> None:
    """Raises ReportError for settings that a factorial trial does not support."""
    if cfg.train.phase in BEYOND_SFT:
        raise ReportError(
            f"factorial: phase {cfg.train.phase}: its losses decide nothing, and its answers vary more between seeds "
            "than a component costs. It is for phases sft and pretrain; --seeds 3 tests FP8 as a whole"
        )
    if not cfg.data.eval:
        raise ReportError(
            "factorial: effects are computed from held-out figures, and there are no held-out data; set data.eval"
        )
    if recipes is not None and len(set(recipes)) > 1:
        raise ReportError(f"factorial: {len(set(recipes))} recipes; components are tested in one. Name one recipe")
    if savings:
        raise ReportError("factorial: memory savings are off in all cells; a separate trial measures their costs")
    if cfg.fp8.plan is not None and recipes is None:
        raise ReportError(
            "factorial: fp8.plan decides for layers, and components are tested in one recipe: --recipes blockwise"
        )
    if (runs.own_recipe(cfg) if recipes is None else recipes[0]) == "auto":
        raise ReportError("factorial: recipe auto would be measured in each cell; name a recipe: --recipes blockwise")


def in_fp8(cfg: Config) -> dict[str, list[str]]:
    """Component -> its layers in FP8, by the plan of a configuration. Raises the errors of planning."""
    from octavo.train.setup import planning

    layers: dict[str, list[str]] = {}
    plan, _, _ = planning.plan_for(cfg)
    for row in plan.rows:
        if row.recipe is not None and row.component in COMPONENTS:
            layers.setdefault(row.component, []).append(row.name)
    return layers


def runs_of(
    cfg: Config, factors: Sequence[str], recipes: Sequence[str] | None, directory: Path, forks: int, seeds: int
) -> tuple[list[Run], tuple[str, ...]]:
    """The runs of a factorial trial, and the components that the configuration has in FP8 and that are not named.

    High precision comes first, then the other cells, seed by seed. Raises ReportError if a named component has nothing
    in FP8.
    """
    base = cfg if recipes is None else runs.with_recipe(cfg, recipes[0])
    plain = without(base)
    layers_by_part = in_fp8(plain)
    for name in factors:
        if name not in layers_by_part:
            close = nearest(name, layers_by_part)
            hint = f"did you mean {close}? " if close else ""
            raise ReportError(
                f"factorial: {name} would have nothing in FP8: the model has no such component, or the configuration "
                f"keeps it in high precision. {hint}In FP8 are {', '.join(layers_by_part) or 'none'}"
            )
    whole = only(plain, factors, layers_by_part)
    same = comparable(whole) == comparable(base)
    planned = runs.runs_of(whole, None, directory, False, forks, seeds, of="" if same else "+".join(factors))
    planned = [replace(run, factors=tuple(factors)) if run.kind in ("fp8", "seed") else run for run in planned]
    parts = {part: only(plain, part, layers_by_part) for part in subsets(factors)[1:-1]}
    each = range(cfg.run.seed, cfg.run.seed + seeds)
    cells = [runs.cell(of_it, directory, part, seed) for seed in each for part, of_it in parts.items()]
    at = next(number for number, run in enumerate(planned) if run.kind == "fp8")
    return [*planned[:at], *cells, *planned[at:]], tuple(name for name in layers_by_part if name not in factors)


def only(cfg: Config, parts: Sequence[str], layers: Mapping[str, Sequence[str]]) -> Config:
    """A configuration with FP8 only in ``parts``; ``layers``: component -> its layers in FP8."""
    off = [name for name in layers if name not in parts]
    cfg = changing("fp8", **{name: Component(recipe="off") for name in off})(cfg)
    if not cfg.fp8.rules or not off:
        return cfg
    # Rules override components, so layers that rules still put in FP8 are switched off one by one.
    left = [layer for name in off for layer in in_fp8(cfg).get(name, ())]
    return changing("fp8", rules=(*cfg.fp8.rules, *(Rule(match=layer, recipe="off") for layer in left)))(cfg)


def by_seed(records: Records, name: str, factors: Sequence[str]) -> list[dict[Cell, float]]:
    """The figures of all cells, for each seed that has all of them: the share of correct held-out answers, or the
    held-out loss relative to high precision with the same seed, minus 1. Empty without such a seed."""
    figures_of: dict[int, dict[Cell, float]] = {}
    for run, record in records:
        if run.kind in ("reference", "noise", "cell", "fp8", "seed"):
            value = (record.eval or {}).get("exact_match" if name == ACCURACY else "loss")
            if value is not None and not record.failure:
                figures_of.setdefault(run.cfg.run.seed, {})[Cell(run.factors)] = float(value)
    whole = [figures for _, figures in sorted(figures_of.items()) if len(figures) == 2 ** len(factors)]
    if name == ACCURACY:
        return whole
    return [{cell: loss / figures[NONE] - 1 if figures[NONE] else math.nan for cell, loss in figures.items()}
            for figures in whole]  # fmt: skip


def found_of(records: Records, name: str, factors: Sequence[str]) -> list[Effect]:
    """Every effect on a figure; empty if no seed has all cells."""
    seeds = by_seed(records, name, factors)
    return effects(seeds, factors) if seeds else []


def checks_of(records: Records, trial: Trial) -> list[Check]:
    """The verdict on each main effect, by the margins of the claims, and each interaction with its interval."""
    if wrong := unsound(records):
        run = " x ".join(trial.factors)
        return [Check(LOSS, TITLES[LOSS], run, None, "failed", "every cell is sound", FAIL, wrong)]
    idle = learned_nothing(next(r for a, r in records if a.kind == "reference"), trial)
    loss_checks = [_checked(LOSS, effect, LOSS_MARGIN, idle) for effect in found_of(records, LOSS, trial.factors)]
    answered = found_of(records, ACCURACY, trial.factors)
    if not answered:
        return loss_checks
    questions = sum(piece["right"] is not None for piece in trial.held.before.pieces) if trial.held else 0
    why = no_answers_to_lose(trial, idle) if trial.held else ""
    if questions * trial.accuracy_margin < 1:
        why = why or f"one of {questions} held-out questions is more than the margin; ask more"
    return [*(_checked(ACCURACY, effect, trial.accuracy_margin, why) for effect in answered), *loss_checks]


def _checked(name: str, effect: Effect, margin: float, why: str) -> Check:
    scale, worse = (points, -1) if name == ACCURACY else (per_cent, 1)
    interval, title, each = effect.found, TITLES[name], ", ".join(map(scale, effect.by_seed))
    if effect.main:
        one = f"{each}: one seed gives no interval, use --seeds 3"
        why = why or (
            one if len(effect.by_seed) == 1 else f"a figure is not finite ({each})" if interval is None else ""
        )
        return decide(
            name, title, effect.label, interval, margin,
            unit="seeds", scale=scale, worse=worse, why_not=why, seen=f"{len(effect.by_seed)} seeds",
        )  # fmt: skip
    bounds = {} if interval is None else {"low": interval.low, "high": interval.high}
    shown = (
        "no interval"
        if interval is None
        else f"{scale(interval.estimate)} ({scale(interval.low)} to {scale(interval.high)})"
    )
    figure, free = None if interval is None else interval.estimate, "no margin: it decides nothing"
    return Check(name, title, effect.label, figure, shown, free, REPORTED, f"by seed: {each}", **bounds)


def unsound(records: Records) -> str:
    """Why effects cannot be computed: a cell failed, skipped steps, ran no FP8, or was not evaluated. Empty if they
    can."""
    for run, record in records:
        if run.kind not in ("reference", "noise", "cell", "fp8", "seed"):
            continue
        if record.failure:
            return f"{run.label}: {record.failure}"
        if len(record.skipped) > SKIPPED_WARN * run.cfg.train.total_steps:
            return f"{run.label} skipped {len(record.skipped)} of {run.cfg.train.steps} steps"
        if run.factors and (check := check_gemms(run.label, record.proof)).status == FAIL:
            return f"{run.label}: {check.sentence}"
        if not record.eval or "loss" not in record.eval:
            return f"{run.label} has no held-out loss; --fresh trains all runs again"
    return ""


def document(records: Records, trial: Trial) -> dict[str, Any]:
    """The cells in ``report.json``: the figures of each, and each effect seed by seed."""
    cells = [
        {"name": run.name, "in_fp8": list(run.factors), "seed": run.cfg.run.seed,
         "accuracy": (record.eval or {}).get("exact_match"), "loss": (record.eval or {}).get("loss")}
        for run, record in records if run.kind in ("reference", "noise", "cell", "fp8", "seed")
    ]  # fmt: skip
    effects_by_seed = [{"figure": name, "of": list(effect.of), "by_seed": list(effect.by_seed)}
            for name in EFFECTS for effect in found_of(records, name, trial.factors)]  # fmt: skip
    return {
        "components": list(trial.factors),
        "left_out": list(trial.left_out),
        "cells": cells,
        "effects": effects_by_seed,
    }


def costly(checks: Sequence[Check]) -> list[str]:
    """The components that made training worse, beyond margin and chance; a failed trial has no costs."""
    bad = (check.run for check in checks if check.status == FAIL and check.figure is not None)
    return list(dict.fromkeys(bad))
