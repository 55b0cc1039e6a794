"""Turns finished runs into a verdict: collects the figures of each run and evaluates every row of the trust table.

No training and no plotting here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.report.evidence import rl_claims, trial_claims, trust_table
from octavo.report.evidence.claims import Evaluation
from octavo.report.evidence.power import Estimate
from octavo.report.evidence.run_reader import LayerHealth, ReportError, RunRecord, common_steps
from octavo.report.evidence.trial_claims import Sides, compute_claims, mean_loss_gap
from octavo.report.evidence.trial_spec import Run, Trial
from octavo.report.evidence.trust_table import FAIL, PASS, REPORTED, UNDECIDED, UNTRIED, WARN, Check, percent
from octavo.report.trial import factorial_cells
from octavo.report.trial.memory_savings import describe_lora_base

CLAIMS = (*trial_claims.CLAIMS, *rl_claims.CLAIMS[1:])
#: fields of the environment that two runs must share; others (free memory, variables) may differ
_SAME_MACHINE = ("octavo", "python", "os", "cpu", "torch", "gpus", "driver", "packages")


@dataclass(frozen=True)
class Verdict:
    """The result of ``compare``: a status (pass, warn, undecided or fail) in one line, the ``claims`` on FP8 training,
    the reasons from all other checks (worst first), and all figures."""

    status: str
    line: str
    reasons: tuple[str, ...]
    checks: tuple[Check, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def claims(self) -> tuple[Check, ...]:
        """The claims on FP8 training, each with its interval."""
        return tuple(check for check in self.checks if check.name in CLAIMS)

    @property
    def closed_claims(self) -> tuple[Check, ...]:
        """The claims that this trial decided, or whose figure it reports."""
        return tuple(claim for claim in self.claims if claim.status not in (UNDECIDED, UNTRIED))

    @property
    def open_claims(self) -> tuple[Check, ...]:
        """The claims that this trial did not decide, or did not test."""
        return tuple(claim for claim in self.claims if claim.status in (UNDECIDED, UNTRIED))

    @property
    def headline(self) -> str:
        """The result in at most twelve words, after the status that the page shows before it."""
        dtype, runs = self.data["reference_dtype"], [run for run in self.data["arms"] if run["kind"] == "fp8"]
        if len(runs) > 1:
            return ", ".join(f"{run['label'].removeprefix('FP8 ')} {run['status']}" for run in runs[:4])
        (run,) = runs
        if run["failure"]:
            return f"{run['label']} failed after step {run['steps']}"
        worst = next((check for check in self.checks if check.status == self.status), None)
        what = "" if worst is None else _begin_lower(worst.title)
        if self.status == PASS and self.closed_claims:
            has_answers = any(claim.name == trial_claims.ACCURACY for claim in self.closed_claims)
            return f"{run['label']} {'answers as well as' if has_answers else 'trains like'} {dtype}, within the margin"
        if self.status == FAIL and worst in self.claims:
            return f"{run['label']} is worse than {dtype}: {what}"
        if self.status == WARN and worst in self.claims:
            return f"{run['label']} beats {dtype} beyond the margin: {what}"
        return f"{worst.run}: {what}" if worst is not None and what else f"{run['label']}: no claim was tested"

    @property
    def effects(self) -> tuple[Check, ...]:
        """The cost of each component of a factorial trial, accuracy first; main effects before interactions."""
        return tuple(check for check in self.checks if check.name in factorial_cells.EFFECTS)

    @property
    def lines(self) -> list[str]:
        """The lines to print: the verdict, one line per claim, and the reasons."""
        has_several_runs = len({check.run for check in self.claims}) > 1
        claim_lines = []
        for claim in self.claims:
            prefix = f"{claim.run}: " if has_several_runs else ""
            passes = "" if claim.margin is None else f", passes with a {claim.threshold}"
            figure = "" if claim.low is None and claim.status != REPORTED else f" {claim.shown}{passes}"
            claim_lines.append(f"{claim.status}: {prefix}{claim.title}{figure}: {claim.sentence}")
        return [self.line, *(f"  {text}" for text in (*claim_lines, *self.reasons))]

    @property
    def exit_code(self) -> int:
        """The exit code of ``octavo compare``: 1 for fail, 3 for undecided, else 0."""
        return {FAIL: 1, UNDECIDED: 3}.get(self.status, 0)


def _begin_lower(title: str) -> str:
    """Return a title within a sentence: with a small first letter, unless its first word has others (FP8, NaN)."""
    first = title.split()[0]
    return title if first != first.capitalize() else f"{title[0].lower()}{title[1:]}"


def accuracy(record: RunRecord) -> float | None:
    """Return the share of held-out questions answered correctly, or None if there was no evaluation."""
    value = (record.eval or {}).get("exact_match")
    return None if value is None else float(value)


def high_precision_dtype(run: Run, record: RunRecord) -> str:
    """Return the dtype of the high-precision run: fp32, fp16 or bf16."""
    precision = run.cfg.train.precision
    if precision != "auto":
        return precision
    if run.cfg.lora is not None:  # the base of LoRA is BF16 on any device
        return "bf16"
    device = record.environment.get("accelerator") or {}
    return device.get("high") or ("bf16" if record.environment.get("gpus") else "fp32")  # older records lack it


def dy_format(row: Mapping[str, Any]) -> str:
    """Return the format of the dy operands of a plan row: e5m2 for hybrid, otherwise e4m3."""
    recipe = row.get("recipe")
    form = recipe.get("format") if isinstance(recipe, Mapping) else row.get("format")
    return "e5m2" if form == "hybrid" else "e4m3"


def _values_by_operand(health: Sequence[LayerHealth], figure: str, roles: Sequence[str]) -> dict[str, float]:
    """Return a figure by operand, with keys such as "x of layers.0.q_proj" and "dy (wgrad) of layers.0.q_proj"."""
    values = {}
    for layer in health:
        for role in roles:
            value = getattr(layer, figure).get(role)
            if value is not None:
                operand, _, layout = role.partition("_")
                values[f"{operand}{f' ({layout})' if layout else ''} of {layer.layer}"] = value
    return values


def _health_checks(run: Run, record: RunRecord) -> list[Check]:
    health = record.health
    e5m2 = {row["name"] for row in record.plan.get("rows", ()) if dy_format(row) == "e5m2"}
    by_format: dict[str, dict[str, float]] = {}
    for layer in health:
        for role in layer.sqnr:
            fmt = "e5m2" if role.startswith("dy") and layer.layer in e5m2 else "e4m3"
            by_format.setdefault(fmt, {}).update(_values_by_operand([layer], "sqnr", [role]))
    wgrad = _values_by_operand(health, "underflow", ("x_wgrad", "dy_wgrad")) or _values_by_operand(
        health, "underflow", ("x", "dy")
    )
    # Frozen layers have no weight gradient as planned, so its figures are not missing.
    of_wgrad: Callable[[Check], Check] = trust_table.mark_no_wgrad if _all_frozen(record.plan) else lambda check: check
    return [
        trust_table.check_underflow(run.label, _values_by_operand(health, "underflow", ("x", "w", "dy")), wgrad=False),
        of_wgrad(trust_table.check_underflow(run.label, wgrad, wgrad=True)),
        # If only gradients are in FP8, as E5M2, no E4M3 operand is missing; a run without figures misses all of them.
        *(trust_table.check_sqnr(run.label, fmt, values) for fmt, values in (by_format or {"e4m3": {}}).items()),
        of_wgrad(trust_table.check_cosine(run.label, {h.layer: h.cosine for h in health if h.cosine is not None})),
        trust_table.check_nan_codes(run.label, {h.layer: h.nan_codes for h in health}),
    ]


def _all_frozen(plan: Mapping[str, Any]) -> bool:
    """Return whether a plan has FP8 layers and all of them are frozen."""
    fp8 = [row for row in plan.get("rows", ()) if row.get("recipe")]
    return bool(fp8) and all(row.get("frozen") for row in fp8)


def _check_machine(run: Run, environment: Mapping[str, Any], reference: Mapping[str, Any]) -> Check:
    differ = [
        name for key in _SAME_MACHINE for name in _list_differences(key, environment.get(key), reference.get(key))
    ]
    threshold = "same device, threads and versions"
    if not environment or not reference:
        sentence = "a run did not record its environment"
        return Check("same_machine", "Same machine", run.label, None, "not recorded", threshold, WARN, sentence)
    if differ:
        shown = ", ".join(differ[:4]) + (", ..." if len(differ) > 4 else "")
        sentence = f"this run and high precision differ in {shown}; --fresh trains all runs on this machine"
        return Check(
            "same_machine", "Same machine", run.label, float(len(differ)), "differs", threshold, WARN, sentence
        )
    return Check("same_machine", "Same machine", run.label, 0.0, "same", threshold, PASS, "same device and versions")


def _list_differences(key: str, value: Any, reference: Any) -> list[str]:
    """Return the entries of an environment record that differ, ignoring the flag of uncommitted changes."""
    if isinstance(value, Mapping) and isinstance(reference, Mapping):
        names = dict.fromkeys([*value, *reference])
        return [f"{key}.{name}" for name in names if name != "dirty" and value.get(name) != reference.get(name)]
    return [key] if value != reference else []


def largest_seed_noise(reference: RunRecord, records: Sequence[RunRecord]) -> float:
    """Return the seed noise of the mean loss: the largest over the high-precision runs with other seeds."""
    noises = []
    for record in records:
        record_at, reference_at = common_steps(record, reference)
        noises.append(trust_table.seed_noise(record.losses[record_at], reference.losses[reference_at]))
    return max(noises, default=math.nan)


def judge(runs: Sequence[tuple[Run, RunRecord]], trial: Trial | None = None) -> Verdict:
    """Check every FP8 run against the trust table and the claims.

    Raises ``ReportError`` if the reference run or the FP8 run is missing, or the run with another seed if losses are
    judged.
    """
    trial = trial or Trial()
    by_kind = {
        kind: [(run, record) for run, record in runs if run.kind == kind] for kind in ("reference", "noise", "fp8")
    }
    needed = [
        kind
        for kind in by_kind
        if kind != "noise" or trial_claims.SEEDS in (trial.claims or trial_claims.DEFAULT_CLAIMS)
    ]
    if missing := [kind for kind in needed if not by_kind[kind]]:
        raise ReportError(f"a verdict needs the runs {', '.join(needed)}; missing: {', '.join(missing)}")
    ref_run, ref = by_kind["reference"][0]
    is_rl_or_preference = rl_claims.is_rl_or_preference(ref_run)
    noise = math.nan if is_rl_or_preference else largest_seed_noise(ref, [record for _, record in by_kind["noise"]])
    whole_runs = [(run, record) for run, record in runs if run.kind != "fork"]
    checks: list[Check] = []
    for run, record in by_kind["fp8"]:
        if record.failure:
            continue
        sides = Sides((run, record), (ref_run, ref), runs)
        checks += rl_claims.compute_claims(sides, trial) if is_rl_or_preference else compute_claims(sides, trial, noise)
        checks.append(trust_table.check_gemms(run.label, record.proof))
        checks += _health_checks(run, record)
        checks.append(trust_table.check_states(run.label, run.cfg.optimizer.states, record.zeroed))
        checks += _check_same_data((run, record), ref)
        checks.append(_check_machine(run, record.environment, ref.environment))
    if trial.factors:
        checks += factorial_cells.check_effects(runs, trial)
    for run, record in whole_runs:
        checks += _completion_checks(run, record)
    status = trust_table.worst_status([c.status for c in checks])
    open_checks = (c for c in checks if c.status not in (PASS, REPORTED) and c.name not in CLAIMS)
    ordered = sorted(open_checks, key=lambda c: c.status != FAIL)
    reasons = tuple(f"{c.run}: {c.title}: {c.sentence}" for c in ordered)
    by_run = {
        run.label: trust_table.worst_status([c.status for c in checks if c.run == run.label]) for run, _ in whole_runs
    }
    line = _verdict_line(status, by_kind["fp8"], (ref_run, ref), checks, by_run)
    same_seed = {run.cfg.run.seed: record for run, record in by_kind["noise"]}

    # Runs of another seed are compared with high precision of the same seed.
    def counterpart(run: Run) -> RunRecord:
        return same_seed.get(run.cfg.run.seed, ref) if run.kind in ("seed", "cell") else ref

    data = {
        "phase": ref_run.cfg.train.phase,
        "noise": noise,
        "before": None if trial.held_out is None else _summarize_evaluation(trial.held_out.before),
        "jobs": trial.jobs,
        "power": [expected.to_json() | {"came": _actual_half_widths(expected, checks)} for expected in trial.expected],
        "factorial": factorial_cells.to_json(runs, trial) if trial.factors else None,
        "reference_dtype": high_precision_dtype(ref_run, ref),
        "arms": [
            {"status": by_run[run.label], **_run_data(run, record, counterpart(run))} for run, record in whole_runs
        ],
        "forks": [_fork_data(run, record) for run, record in runs if run.kind == "fork"],
    }
    return Verdict(status, line, reasons, tuple(checks), data)


def _actual_half_widths(expected: Estimate, checks: Sequence[Check]) -> dict[str, float]:
    """Return the actual half-widths of the intervals of a claim: run or component -> half-width."""
    matching = (check for check in checks if check.name == expected.claim and check.status != REPORTED)
    return {c.run: (c.high - c.low) / 2 for c in matching if c.low is not None and c.high is not None}


def _check_same_data(fp8: tuple[Run, RunRecord], ref: RunRecord) -> list[Check]:
    """Check that both runs read the same data. In phase rl the tokens depend on the completions of each run, so prompts
    are compared; if groups with equal rewards are replaced by other prompts, these differ too, and there is no
    check."""
    run, record = fp8
    if run.cfg.rl is None:
        record_at, ref_at = common_steps(record, ref)
        return [trust_table.check_same_data(run.label, record.tokens[record_at], ref.tokens[ref_at])]
    from octavo.rl.phases.settings import Settings  # it imports torch, which a waiting trial does not need

    return [] if Settings.of(run.cfg).refill else [rl_claims.check_same_prompts(run.label, record, ref)]


def _summarize_evaluation(evaluation: Evaluation) -> dict[str, Any]:
    """Return the evaluation of the model before training, in the format of a run's evaluation."""
    right = [bool(piece["right"]) for piece in evaluation.pieces if piece["right"] is not None]
    share = sum(right) / len(right) if right else None
    return {"loss": evaluation.loss, "exact_match": share, "questions": len(right)}


def last_step(record: RunRecord) -> int:
    """Return the last recorded step, or 0 if there is none."""
    return int(record.steps[-1]) if record.steps.size else 0


def _completion_checks(run: Run, record: RunRecord) -> list[Check]:
    planned = run.cfg.train.total_steps
    if record.failure:
        shown = f"after step {last_step(record)} of {planned}"
        return [Check("training", "Training failed", run.label, None, shown, "reaches its end", FAIL, record.failure)]
    return [
        trust_table.check_skipped(run.label, record.skipped, int(record.steps[-1]), planned, record.overflowed),
        trust_table.check_recorded(run.label, record.steps, run.cfg.run.log_every, planned),
    ]


def _verdict_line(
    status: str,
    fp8: Sequence[tuple[Run, RunRecord]],
    reference: tuple[Run, RunRecord],
    checks: Sequence[Check],
    by_run: Mapping[str, str],
) -> str:
    """Return the first line of the page: the status, then the results of the claims of each recipe."""
    ref_run, ref = reference
    parts = []
    for run, record in fp8:
        if record.failure:
            parts.append(f"{run.label} (fail): training failed after step {last_step(record)}")
            continue
        base = f", LoRA with its {describe_lora_base(run.cfg)}," if run.cfg.lora is not None else ""
        reference_base = f" with its {describe_lora_base(ref_run.cfg)}" if ref_run.cfg.lora is not None else ""
        text = f"{run.label}{f' ({by_run[run.label]})' if len(fp8) > 1 else ''}{base}"
        text += f" compared with {high_precision_dtype(ref_run, ref)}{reference_base}: "
        claims = [c for c in checks if c.run == run.label and c.name in CLAIMS and c.status != REPORTED]
        text += ", ".join(f"{c.title[0].lower()}{c.title[1:]} {c.status}" for c in claims)
        if (share := record.proof.get("share")) is not None:
            text += f"; {percent(float(share), 1)} of linear FLOPs counted in FP8"
        parts.append(text)
    return f"{status.upper()}: {'; '.join(parts)}."


def _fork_data(run: Run, record: RunRecord) -> dict[str, Any]:
    return {
        "name": run.name,
        "label": run.label,
        "of": run.of,
        "number": run.number,
        "begins": run.begins,
        "seed": run.cfg.run.seed,
        "failure": record.failure,
        "mean_loss": record.mean_loss,
        "curve": {"step": record.steps.tolist(), "loss": record.losses.tolist()},
    }


def _loss_gap_of_run(run: Run, record: RunRecord, reference: RunRecord) -> float:
    """Return the gap of the mean loss; NaN in phases whose losses are not comparable."""
    if rl_claims.is_rl_or_preference(run):
        return math.nan
    return 0.0 if run.kind == "reference" else mean_loss_gap(record, reference)


def _final_figures(run: Run, record: RunRecord, reference: RunRecord) -> dict[str, Any]:
    """Return the final figures of a run of phase rl or preference, and its reward gap; empty in other phases."""
    if not rl_claims.is_rl_or_preference(run):
        return {}
    panels = rl_claims.PANELS[run.cfg.train.phase]
    return {
        "end": {panel.key: rl_claims.final_mean(record, panel.key) for panel in panels},
        "reward_gap": rl_claims.final_gap(record, reference, panels[0].key),
        "rates": {
            key: float(np.nanmedian(record.figures[key]))
            for key in ("rollout_tokens_per_s", "training_tokens_per_s")
            if key in record.figures and not np.isnan(record.figures[key]).all()
        },
        "figures": {key: values.tolist() for key, values in record.figures.items()},
    }  # fmt: skip


def _run_data(run: Run, record: RunRecord, reference: RunRecord) -> dict[str, Any]:
    # One step is noisy, so the last loss is the mean of the last twentieth.
    tail = record.losses[-max(1, len(record.losses) // 20) :]
    return {
        "name": run.name,
        "label": run.label,
        "kind": run.kind,
        "recipe": run.cfg.fp8.recipe,
        "base": describe_lora_base(run.cfg),
        "seed": run.cfg.run.seed,
        "failure": record.failure,
        "steps": last_step(record),
        "mean_loss": record.mean_loss,
        "last_loss": float(np.nanmean(tail)) if np.isfinite(tail).any() else math.nan,
        "gap": _loss_gap_of_run(run, record, reference),
        **_final_figures(run, record, reference),
        "eval": dict(record.eval) if record.eval else None,
        "tokens_per_s": record.speed,
        "speed_ratio": record.speed / reference.speed,
        "memory": dict(record.memory),
        "skipped": list(record.skipped),
        "overflowed": list(record.overflowed),
        "health_steps": list(record.health_steps),
        "health": [
            {"layer": h.layer, "sqnr": dict(h.sqnr), "underflow": dict(h.underflow), "saturation": dict(h.saturation),
             "dw_cosine": h.cosine, "nan_codes": h.nan_codes}
            for h in record.health
        ],
        "plan": dict(record.plan),
        "proof": dict(record.proof),
        "environment": dict(record.environment),
        "config": record.config,
        "curve": {"step": record.steps.tolist(), "loss": record.losses.tolist()},
    }  # fmt: skip
