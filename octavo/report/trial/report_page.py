"""Writes the report of a trial: ``report.html`` (one file, opens offline), ``report.json`` and the PNG plots.

Every figure on the page comes from the run directories through ``judge``. Its layout is in
``trial.html.jinja`` and ``page.css``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

import octavo
from octavo.base import atomic_write
from octavo.base.safe_read import replace_nonfinite
from octavo.report.evidence import rl_claims
from octavo.report.evidence.claims import LOSS_MARGIN
from octavo.report.evidence.power import Estimate
from octavo.report.evidence.run_reader import ReportError, RunRecord
from octavo.report.evidence.trial_claims import ACCURACY, FORKS, HELD_OUT_LOSS, SEEDS, WEIGHTS, Sides
from octavo.report.evidence.trial_spec import Run
from octavo.report.evidence.trust_table import Check, percent
from octavo.report.run import completions, page_parts, plots
from octavo.report.run.page_parts import (
    KINDS,
    TOTALS,
    choose_unit,
    flatten,
    format_fixed,
    gemm_counts,
    memory_kinds,
    memory_total,
    plan_groups,
)
from octavo.report.trial import factorial_cells, memory_savings, rl_plots
from octavo.report.trial.judge import CLAIMS, Verdict, accuracy, last_step

Records = Sequence[tuple[Run, RunRecord]]

STATUSES = ("fail", "undecided", "warn", "pass")
MEANINGS = {
    ACCURACY: "Accuracy: the same held-out questions, answered by the models that FP8 and high precision trained.",
    WEIGHTS: "Same weights: the weights that FP8 trained, evaluated in FP8 and in high precision.",
    FORKS: "Forks: both precisions continue from high precision's checkpoint at two thirds, with the same data, "
    "several times.",
    SEEDS: "Trajectories: whole runs in pairs with the same seed.",
    HELD_OUT_LOSS: "Held-out loss: the models that FP8 and high precision trained, on the same held-out answers.",
}
ROLE_WORDS = {"x": "x", "w": "w", "dy": "dy", "x_wgrad": "x, wgrad", "dy_wgrad": "dy, wgrad"}


@dataclass(frozen=True)
class Interview:
    """What a run answered: the ``title`` of this part of the page, the ``label`` of the run, and rows with question,
    answer, truth and whether it is right (None: nothing decides that). ``picture``: as a data URL, if the questions are
    about one. ``note``: a sentence about the model or the question."""

    title: str
    label: str
    rows: Sequence[Mapping[str, object]]
    picture: str = ""
    note: str = ""


def write(verdict: Verdict, records: Records, directory: Path, interview: Interview | None = None) -> tuple[Path, ...]:
    """Write the report of a trial into ``directory``, with an ``interview`` if there is one; return the paths, the page
    first."""
    directory.mkdir(parents=True, exist_ok=True)
    data = to_json(verdict) | {
        "savings": replace_nonfinite(saving_rows(verdict, records)),
        "completions": compare_completions(records),
    }
    drawings, images = draw_plots(records, directory, (*verdict.claims, *verdict.effects))
    page, numbers = directory / "report.html", directory / "report.json"
    atomic_write.write_text(page, render(verdict, records, drawings, data["created"], interview))
    atomic_write.write_text(numbers, json.dumps(data, indent=1, allow_nan=False) + "\n")
    return (page, numbers, *images)


def to_json(verdict: Verdict) -> dict[str, Any]:
    """Return ``report.json``: verdict, checks and all measurements as plain JSON; non-finite numbers are null."""
    return replace_nonfinite(
        {
            "octavo": octavo.__version__,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "verdict": {
                "status": verdict.status,
                "line": verdict.line,
                "reasons": list(verdict.reasons),
                "exit_code": verdict.exit_code,
            },
            "checks": [check.to_json() for check in verdict.checks],
            **verdict.data,
        }
    )


def loss_curves(records: Records) -> list[plots.Curve]:
    """Return the loss curves, each with its colour; FP8 runs cycle through five colours."""
    curves, fp8 = [], 0
    for run, record in records:
        if run.kind in ("saving", "seed", "cell"):
            continue
        color = {"reference": "base", "noise": "noise"}.get(run.kind, f"fp8-{fp8 % 5}")
        fp8 += run.kind == "fp8"
        if record.steps.size:
            curves.append(plots.Curve(run.label, run.kind, color, record.steps, record.losses))
    return curves


def compare_completions(records: Records) -> list[dict[str, Any]]:
    """Return completions of each FP8 recipe and of high precision for the same prompts; empty if none were recorded."""
    reference = next(record for run, record in records if run.kind == "reference")
    compared = (
        (run.label, completions.side_by_side(reference, record)) for run, record in records if run.kind == "fp8"
    )
    return [{"label": label, "steps": steps} for label, steps in compared if steps]


def draw_plots(records: Records, directory: Path, claims: Sequence[Check] = ()) -> tuple[dict[str, str], list[Path]]:
    """Draw all plots. Returns SVG by name for the page, and the paths of the PNG files."""
    fp8 = [(run, record) for run, record in records if run.kind == "fp8"]
    drawings, images = {}, []

    def keep(name: str, draw: Callable[..., Any], *figures: Any) -> None:
        images.append(directory / f"{name}.png")
        drawings[name] = plots.save(lambda width: draw(*figures, width=width), images[-1])

    with matplotlib.rc_context(plots.STYLE):
        effects = [check for check in claims if check.name in factorial_cells.EFFECTS]
        claims = [check for check in claims if check.name not in factorial_cells.EFFECTS]
        if any(claim.low is not None and claim.margin for claim in claims):
            images.append(directory / "claims.png")  # the page draws claims itself
            images[-1].write_bytes(plots.png(plots.claims_figure(claims)))
        if any(effect.low is not None for effect in effects):
            keep("effects", plots.effects_figure, effects)
        if all(record.steps.size < 2 for _, record in records):
            pass  # a single step is no curve: the tables have its figures
        elif (panels := rl_claims.PANELS.get(fp8[0][0].cfg.train.phase)) is not None:
            pairs = rl_plots.pair_sides(records)
            sides = [*rl_plots.unpaired_sides(records), *(fp8_side for fp8_side, _ in pairs), pairs[0][1]]
            keep("learning", rl_plots.learning_figure, sides, panels)
            keep("gap", rl_plots.reward_gap_figure, pairs, panels[0])
        else:
            curves = loss_curves(records)
            keep("loss", plots.loss_figure, curves)
            if any(curve.kind == "noise" for curve in curves):
                keep("gap", plots.gap_figure, curves, LOSS_MARGIN)
        for run, record in fp8:
            if record.health:
                name = "health" if len(fp8) == 1 else f"health-{run.name}"
                components = {row["name"]: row.get("component") or "" for row in record.plan.get("rows", ())}
                keep(name, plots.health_figure, record.health, components, run.label)
        # From the bottom: high precision, FP8 with one more saving each, and FP8 with everything on.
        bars = [
            (run.label, record.memory)
            for run, record in records
            if record.memory and run.kind not in ("noise", "seed", "cell")
        ]
        if bars:
            kinds = memory_kinds(bars)
            most = max(sum(memory.get(kind, 0) for kind in kinds) for _, memory in bars)
            words = {kind: KINDS.get(kind, kind) for kind in kinds}
            keep("memory", plots.memory_figure, bars, words, choose_unit(most))
    return drawings, images


def tiles(verdict: Verdict, records: Records, run: Run, record: RunRecord) -> list[dict[str, str]]:
    """Return the key figures of an FP8 run for the top of the page."""
    if record.failure:
        return [{"figure": "failed", "word": f"after step {last_step(record)} of {run.cfg.train.steps}"}]
    runs = {run["label"]: run for run in verdict.data["arms"]}
    reference = next(pair for pair in records if pair[0].kind == "reference")
    dtype, pairs = verdict.data["reference_dtype"], [(record, reference[1])]
    if (panels := rl_claims.PANELS.get(verdict.data["phase"])) is not None:  # means over the seeds
        pairs = rl_claims.pair_runs(Sides((run, record), reference, records))
        fp8_figure, high_figure = (
            _mean_or_nan([rl_claims.final_mean(pair[at], panels[0].key) for pair in pairs]) for at in (0, 1)
        )
        word = f"{panels[0].title.lower()}, last third of the steps; {dtype}: {format_fixed(high_figure, 3)}"
        figures = [{"figure": format_fixed(fp8_figure, 3), "word": word}]
    elif judges_loss(verdict):
        word = f"mean loss against {dtype}; the seed alone: up to {percent(verdict.data['noise'])}"
        figures = [{"figure": f"{100 * runs[run.label]['gap']:+.2f} %", "word": word}]
    elif judges_held_out_loss(verdict):
        fp8_loss, high_loss = (
            float((runs[label]["eval"] or {}).get("loss", math.nan)) for label in (run.label, reference[0].label)
        )
        word = f"held-out loss, nats a token; {dtype}: {format_fixed(high_loss, 4)}"
        figures = [{"figure": format_fixed(fp8_loss, 4), "word": word}]
    else:  # the trial judges accuracy only
        figures = []
    fp8_accuracy, high_figure = (_mean_or_nan([accuracy(pair[at]) for pair in pairs]) for at in (0, 1))
    if math.isfinite(fp8_accuracy) and math.isfinite(high_figure):
        figures.append(
            {"figure": percent(fp8_accuracy, 1), "word": f"held-out answers right; {dtype}: {percent(high_figure, 1)}"}
        )
    if record.proof.get("share") is not None:
        share = percent(float(record.proof["share"]), 1)
        figures.append({"figure": share, "word": "of linear FLOPs ran in FP8 (measured)"})
    sizes = [memory_total(side.memory) for side in (record, reference[1])]
    if all(sizes):
        unit, size = choose_unit(sizes[0])
        word = f"weights, gradients, optimizer and saved activations; {dtype}: {sizes[1] / size:.1f} {unit}"
        figures.append({"figure": f"{sizes[0] / size:.1f} {unit}", "word": word})
    ratio = runs[run.label]["speed_ratio"]
    if math.isfinite(ratio):
        kind = computed_on(record.environment)
        places = {"gpu": "on this GPU", "cpu": "with FP8 emulated on this CPU"}
        where = places.get(kind, f"with FP8 emulated on this {kind} device")
        figures.append({"figure": f"{ratio:.2f} x", "word": f"the speed of {dtype}, {where}"})
    return figures


def _mean_or_nan(values: Sequence[float | None]) -> float:
    """Return the mean, or NaN if a value is missing."""
    return float(np.mean([math.nan if value is None else value for value in values]))


def expectations(verdict: Verdict) -> dict[tuple[str, str], str]:
    """Return the expected and the actual width of intervals, by (claim, run)."""
    texts = {}
    for expectation in verdict.data["power"]:
        estimate = Estimate(
            **{key: value for key, value in expectation.items() if key in Estimate.__dataclass_fields__}
        )
        if estimate.why_not or estimate.units < 2:
            continue
        for run, half in expectation["came"].items():
            texts[expectation["claim"], run] = (
                f"expected {estimate.format(estimate.expected_half_width)}, measured {estimate.format(half)}"
            )
    return texts


def saving_rows(verdict: Verdict, records: Records) -> list[dict[str, Any]]:
    """Return the table of the cost of each saving; empty if the trial trained no runs for it."""
    by_name = {run["name"]: run for run in verdict.data["arms"]}
    runs = [by_name[run.name] for run, _ in records if run.kind == "saving"]
    if not runs:
        return []
    top = next(run for run, _ in records if run.kind == "fp8")
    return memory_savings.cost_rows(runs, by_name[top.name], memory_savings.describe_last_saving(top.cfg))


def speed_sentence(records: Records, jobs: int = 1) -> str:
    """Return how to interpret the speed figures on this device; ``jobs`` runs trained at the same time."""
    shared = f"Up to {jobs} runs trained at the same time and shared the machine. " if jobs > 1 else ""
    environment = next(record.environment for run, record in records if run.kind == "reference")
    if computed_on(environment) == "gpu":
        return shared + "Measured on the GPU listed under Environment, in one trial."
    return shared + (
        "This machine has no GPU: the reference backend emulated FP8 in plain PyTorch, with casts in addition to "
        "ordinary matrix products. The trial shows the effect of FP8 on training; these figures say nothing about its "
        "speed."
    )


def judges_loss(verdict: Verdict) -> bool:
    """Return whether one of the claims is about losses during training, whose noise the run with another seed shows."""
    return any(claim.name in (WEIGHTS, FORKS, SEEDS) for claim in verdict.claims)


def judges_held_out_loss(verdict: Verdict) -> bool:
    """Return whether the trial judges the held-out loss of the trained models."""
    return any(claim.name == HELD_OUT_LOSS for claim in verdict.claims)


def computed_on(environment: Mapping[str, Any]) -> str:
    """Return gpu, cpu, or the type of another device; older records only list GPUs."""
    device_type = (environment.get("accelerator") or {}).get("type")
    gpu = bool(environment.get("gpus")) and device_type != "cpu"
    return "gpu" if gpu else str(device_type or "cpu")


def render(
    verdict: Verdict,
    records: Records,
    drawings: Mapping[str, str],
    created: str,
    interview: Interview | None = None,
) -> str:
    """Return the page as HTML."""
    shown = [
        (label, record.memory) for label, record in ((run.label, record) for run, record in records) if record.memory
    ]
    fp8 = [
        {
            "label": run.label,
            "name": run.name,
            "groups": plan_groups(record.plan),
            "notes": record.plan.get("notes") or [],
            "health": record.health,
            "health_steps": record.health_steps,
            "drawing": drawings.get("health") or drawings.get(f"health-{run.name}"),
            "proof": record.proof,
            "counted": gemm_counts(record.proof),
        }
        for run, record in records
        if run.kind == "fp8"
    ]
    if not fp8:
        raise ReportError("a page needs at least one FP8 run")
    reference = next(record for run, record in records if run.kind == "reference")
    return page_parts.render(
        "trial.html.jinja",
        verdict=verdict,
        interview=interview,
        meanings=" ".join(
            MEANINGS[name] for name in dict.fromkeys(claim.name for claim in verdict.claims) if name in MEANINGS
        ),
        created=created,
        tiles=[(run.label, tiles(verdict, records, run, record)) for run, record in records if run.kind == "fp8"],
        expected=expectations(verdict),
        effects=verdict.effects,
        factorial=verdict.data["factorial"],
        checks=sorted(
            (c for c in verdict.checks if c.name not in (*CLAIMS, *factorial_cells.EFFECTS)),
            key=lambda c: STATUSES.index(c.status),
        ),
        runs=verdict.data["arms"],
        noise=verdict.data["noise"],
        judges_loss=judges_loss(verdict),
        judges_held_out_loss=judges_held_out_loss(verdict),
        dtype=verdict.data["reference_dtype"],
        panels=rl_claims.PANELS.get(verdict.data["phase"], ()),
        no_losses=rl_claims.WHY_NO_LOSS_CLAIMS.get(verdict.data["phase"], ""),
        before=verdict.data["before"],
        completions=compare_completions(records),
        rollouts=verdict.data["phase"] == "rl",
        evaluated=any(run["eval"] for run in verdict.data["arms"]),
        drawings=drawings,
        fp8=fp8,
        savings=saving_rows(verdict, records),
        roles=ROLE_WORDS,
        kinds=[(kind, KINDS.get(kind, kind.replace("_", " "))) for kind in memory_kinds(shown)],
        totals=[(k, word) for k, word in TOTALS.items() if any(k in memory for _, memory in shown)],
        speed_sentence=speed_sentence(records, verdict.data.get("jobs", 1)),
        environment=flatten(reference.environment),
        configs=[(run.label, record.config) for run, record in records],
    )
