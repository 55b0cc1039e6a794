"""The factorial trial, which measures the cost of each component: its runs, figures, and the verdict on each effect.

Cells only differ in which of the named components are in FP8, so effects are due to these components: everything else
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

from octavo.base.wording import nearest
from octavo.config import COMPONENTS, Component, Config, Rule
from octavo.config.sections.rl import BEYOND_SFT
from octavo.report.evidence.claims import LOSS_MARGIN, decide
from octavo.report.evidence.factorial import NONE, Cell, Effect, compute_effects, subsets
from octavo.report.evidence.run_reader import ReportError, RunRecord
from octavo.report.evidence.trial_claims import per_cent, points, why_accuracy_is_uninformative, why_nothing_learned
from octavo.report.evidence.trial_spec import Run, Trial
from octavo.report.evidence.trust_table import FAIL, REPORTED, SKIPPED_WARN, Check, check_gemms
from octavo.report.trial import runs
from octavo.report.trial.memory_savings import change_section, without_savings
from octavo.report.trial.reuse import comparable_settings

MAX_COMPONENTS = 4  # components: sixteen cells, each with several seeds
ACCURACY, LOSS = EFFECTS = ("effect_accuracy", "effect_loss")
TITLES = {ACCURACY: "Effect on held-out accuracy", LOSS: "Effect on held-out loss"}

Records = Sequence[tuple[Run, RunRecord]]


def check_components(components: Sequence[str]) -> tuple[str, ...]:
    """Return the components of a factorial trial, in the order of :data:`octavo.config.COMPONENTS`, because their order
    does not change the cells. Raises ReportError for unknown names, and for too few or too many."""
    for name in components:
        if name not in COMPONENTS:
            close = nearest(name, COMPONENTS)
            hint = f"did you mean {close}? " if close else ""
            raise ReportError(f"factorial: unknown component {name!r}; {hint}choose from {', '.join(COMPONENTS)}")
    if duplicate := next((name for name in components if components.count(name) > 1), None):
        raise ReportError(f"factorial: {duplicate} is named twice; name it once")
    if not 2 <= len(components) <= MAX_COMPONENTS:
        raise ReportError(
            f"factorial: {len(components)} component(s) named, and a design needs 2 to {MAX_COMPONENTS}. For the cost "
            "of one component, run an ordinary trial with the others off: fp8.NAME.recipe=off"
        )
    return tuple(name for name in COMPONENTS if name in components)


def check_settings(cfg: Config, recipes: Sequence[str] | None, savings: bool) -> None:
    """Raise ReportError for settings that a factorial trial does not support."""
    if cfg.train.phase in BEYOND_SFT:
        raise ReportError(
            f"factorial: phase {cfg.train.phase}: losses decide nothing there, and answers vary more between seeds "
            "than the effect of a component. Use phase sft or pretrain; --seeds 3 tests FP8 as a whole"
        )
    if not cfg.data.eval:
        raise ReportError(
            "factorial: effects are computed from held-out figures, and there are no held-out data; set data.eval"
        )
    if recipes is not None and len(set(recipes)) > 1:
        raise ReportError(f"factorial: components are tested with one recipe, got {len(set(recipes))}. Name one recipe")
    if savings:
        raise ReportError("factorial: memory savings are off in all cells; a separate trial measures their costs")
    if cfg.fp8.plan is not None and recipes is None:
        raise ReportError(
            "factorial: fp8.plan sets recipes per layer, but components are tested with one recipe; use --recipes "
            "blockwise"
        )
    if (runs.own_recipe(cfg) if recipes is None else recipes[0]) == "auto":
        raise ReportError("factorial: recipe auto would be measured in each cell; name a recipe: --recipes blockwise")


def fp8_layers(cfg: Config) -> dict[str, list[str]]:
    """Return the FP8 layers of each component, by the plan of a configuration. Raises the errors of planning."""
    from octavo.train.setup import planning

    layers: dict[str, list[str]] = {}
    plan, _, _ = planning.plan_for(cfg)
    for row in plan.rows:
        if row.recipe is not None and row.component in COMPONENTS:
            layers.setdefault(row.component, []).append(row.name)
    return layers


def make_runs(
    cfg: Config, factors: Sequence[str], recipes: Sequence[str] | None, directory: Path, forks: int, seeds: int
) -> tuple[list[Run], tuple[str, ...]]:
    """Return the runs of a factorial trial, and the components that are in FP8 in the configuration but not named.

    High precision comes first, then the other cells, seed by seed. Raises ReportError if a named component has nothing
    in FP8.
    """
    base = cfg if recipes is None else runs.with_recipe(cfg, recipes[0])
    plain = without_savings(base)
    layers_by_part = fp8_layers(plain)
    for name in factors:
        if name not in layers_by_part:
            close = nearest(name, layers_by_part)
            hint = f"did you mean {close}? " if close else ""
            raise ReportError(
                f"factorial: {name} would have nothing in FP8: the model has no such component, or the configuration "
                f"keeps it in high precision. {hint}In FP8 are {', '.join(layers_by_part) or 'none'}"
            )
    all_in_fp8 = with_fp8_only_in(plain, factors, layers_by_part)
    is_own_setting = comparable_settings(all_in_fp8) == comparable_settings(base)
    planned = runs.make_runs(
        all_in_fp8, None, directory, False, forks, seeds, fp8_components="" if is_own_setting else "+".join(factors)
    )
    planned = [replace(run, factors=tuple(factors)) if run.kind in ("fp8", "seed") else run for run in planned]
    parts = {part: with_fp8_only_in(plain, part, layers_by_part) for part in subsets(factors)[1:-1]}
    trial_seeds = range(cfg.run.seed, cfg.run.seed + seeds)
    cells = [runs.cell_run(cell_cfg, directory, part, seed) for seed in trial_seeds for part, cell_cfg in parts.items()]
    fp8_at = next(number for number, run in enumerate(planned) if run.kind == "fp8")
    return [*planned[:fp8_at], *cells, *planned[fp8_at:]], tuple(name for name in layers_by_part if name not in factors)


def with_fp8_only_in(cfg: Config, parts: Sequence[str], layers: Mapping[str, Sequence[str]]) -> Config:
    """Return a configuration with FP8 only in ``parts``; ``layers``: component -> its layers in FP8."""
    off = [name for name in layers if name not in parts]
    cfg = change_section("fp8", **{name: Component(recipe="off") for name in off})(cfg)
    if not cfg.fp8.rules or not off:
        return cfg
    # Rules override components, so layers that rules still put in FP8 are disabled individually.
    remaining = [layer for name in off for layer in fp8_layers(cfg).get(name, ())]
    return change_section("fp8", rules=(*cfg.fp8.rules, *(Rule(match=layer, recipe="off") for layer in remaining)))(cfg)


def _held_out_loss(record: RunRecord) -> float | None:
    """Return the held-out loss of answers, which phases rl and preference name `answer_loss`."""
    figures = record.eval or {}
    from octavo.train.forward.evaluation import token_loss  # it imports torch, which a waiting trial does not need

    return token_loss(figures)


def figures_by_seed(records: Records, name: str, factors: Sequence[str]) -> list[dict[Cell, float]]:
    """Return the figures of all cells, for each seed that has all of them: the share of correct held-out answers, or
    the held-out loss relative to high precision with the same seed, minus 1. Empty without such a seed."""
    by_seed: dict[int, dict[Cell, float]] = {}
    for run, record in records:
        if run.kind in ("reference", "noise", "cell", "fp8", "seed"):
            value = (record.eval or {}).get("exact_match") if name == ACCURACY else _held_out_loss(record)
            if value is not None and not record.failure:
                by_seed.setdefault(run.cfg.run.seed, {})[Cell(run.factors)] = float(value)
    complete = [figures for _, figures in sorted(by_seed.items()) if len(figures) == 2 ** len(factors)]
    if name == ACCURACY:
        return complete
    return [{cell: loss / figures[NONE] - 1 if figures[NONE] else math.nan for cell, loss in figures.items()}
            for figures in complete]  # fmt: skip


def estimate_effects(records: Records, name: str, factors: Sequence[str]) -> list[Effect]:
    """Return every effect on a figure; empty if no seed has all cells."""
    seeds = figures_by_seed(records, name, factors)
    return compute_effects(seeds, factors) if seeds else []


def check_effects(records: Records, trial: Trial) -> list[Check]:
    """Return the verdict on each main effect, by the margins of the claims, and each interaction with its interval."""
    if reason := why_not_comparable(records):
        run = " x ".join(trial.factors)
        return [Check(LOSS, TITLES[LOSS], run, None, "failed", "every cell is sound", FAIL, reason)]
    no_learning = why_nothing_learned(next(record for a, record in records if a.kind == "reference"), trial)
    loss_checks = [
        _effect_check(LOSS, effect, LOSS_MARGIN, no_learning)
        for effect in estimate_effects(records, LOSS, trial.factors)
    ]
    answered = estimate_effects(records, ACCURACY, trial.factors)
    if not answered:
        return loss_checks
    questions = sum(piece["right"] is not None for piece in trial.held_out.before.pieces) if trial.held_out else 0
    why = why_accuracy_is_uninformative(trial, no_learning) if trial.held_out else ""
    if questions * trial.accuracy_margin < 1:
        why = why or f"one of {questions} held-out questions is already more than the margin; add questions"
    return [*(_effect_check(ACCURACY, effect, trial.accuracy_margin, why) for effect in answered), *loss_checks]


def _effect_check(name: str, effect: Effect, margin: float, why: str) -> Check:
    scale, worse = (points, -1) if name == ACCURACY else (per_cent, 1)
    interval, title, figures = effect.interval, TITLES[name], ", ".join(map(scale, effect.by_seed))
    if effect.is_main:
        one_seed = f"{figures}: one seed gives no interval, use --seeds 3"
        why = why or (
            one_seed if len(effect.by_seed) == 1 else f"a figure is not finite ({figures})" if interval is None else ""
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
    figure, free = None if interval is None else interval.estimate, "no margin: reported only"
    return Check(name, title, effect.label, figure, shown, free, REPORTED, f"by seed: {figures}", **bounds)


def why_not_comparable(records: Records) -> str:
    """Return why effects cannot be computed: a cell failed, skipped steps, ran no FP8, or was not evaluated. Empty if
    they can."""
    for run, record in records:
        if run.kind not in ("reference", "noise", "cell", "fp8", "seed"):
            continue
        if record.failure:
            return f"{run.label}: {record.failure}"
        if len(record.skipped) > SKIPPED_WARN * run.cfg.train.total_steps:
            return f"{run.label} skipped {len(record.skipped)} of {run.cfg.train.steps} steps"
        if run.factors and (check := check_gemms(run.label, record.proof)).status == FAIL:
            return f"{run.label}: {check.sentence}"
        if _held_out_loss(record) is None:
            return f"{run.label} has no held-out loss; --fresh trains all runs again"
    return ""


def to_json(records: Records, trial: Trial) -> dict[str, Any]:
    """Return the cells for ``report.json``: the figures of each, and each effect by seed."""
    cells = [
        {"name": run.name, "in_fp8": list(run.factors), "seed": run.cfg.run.seed,
         "accuracy": (record.eval or {}).get("exact_match"), "loss": _held_out_loss(record)}
        for run, record in records if run.kind in ("reference", "noise", "cell", "fp8", "seed")
    ]  # fmt: skip
    effects_by_seed = [{"figure": name, "of": list(effect.of), "by_seed": list(effect.by_seed)}
            for name in EFFECTS for effect in estimate_effects(records, name, trial.factors)]  # fmt: skip
    return {
        "components": list(trial.factors),
        "left_out": list(trial.left_out),
        "cells": cells,
        "effects": effects_by_seed,
    }


def costly_components(checks: Sequence[Check]) -> list[str]:
    """Return the components that made training worse, beyond margin and chance; empty for a failed trial."""
    bad = (check.run for check in checks if check.status == FAIL and check.figure is not None)
    return list(dict.fromkeys(bad))
