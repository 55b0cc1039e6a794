"""Describes a run before its first step: the model, the plan in a line per component, memory, checkpoints.

`octavo plan FILE` and `octavo train --verbose` print the plan layer by layer.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from octavo import fp8
from octavo.base import hub
from octavo.config import Config
from octavo.models.structure.fp8_twin import describe_twin
from octavo.train.callbacks.checkpointing import save_interval
from octavo.train.errors import TrainError
from octavo.train.estimate.memory import Footprint, MemoryEstimator, gb
from octavo.train.setup import planning
from octavo.train.setup.planning import RunPlan
from octavo.train.setup.token_counts import assume_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnPrediction = Callable[[Footprint], None]

_REASONS = 2  # maximum number of reasons per component
_STAYS = " stays in high precision"


def summary(run: RunPlan, on_prediction: OnPrediction = lambda footprint: None) -> list[str]:
    """Return at most 15 lines, the most important first, and the notes that are specific to this run.

    Memory is predicted on a model without weights, in well under a second, and passed to `on_prediction`. If it cannot
    be predicted, its line says why.
    """
    model, _ = planning.meta_model(run.cfg)
    common_notes = {*run.plan.notes, *planning.high_precision_notes(model)}
    common_notes |= {*planning.pretrained_notes(run.cfg, run.plan)}
    notes = [*run.plan.changes, *(note for note in run.notes if note not in common_notes)]
    plan = [*describe_plan(run.plan), *(f"note: {note}" for note in notes)]
    return [*_lines_with_plan(run, model, plan, on_prediction), "all layers and notes: octavo plan FILE, or --verbose"]


def describe_in_full(
    run: RunPlan, layers: Callable[[fp8.Plan], Sequence[str]], on_prediction: OnPrediction = lambda footprint: None
) -> list[str]:
    """Return the summary with the plan layer by layer, formatted by `layers`, and all notes."""
    off = not any(row.fp8 or row.automatic for row in run.plan.rows)
    table = [] if off else ["", *layers(run.plan), ""]
    notes = [f"note: {note}" for note in dict.fromkeys([*(() if off else run.plan.notes), *run.notes])]
    return _lines_with_plan(
        run, planning.meta_model(run.cfg)[0], [*describe_plan(run.plan), *table, *notes], on_prediction
    )


def _lines_with_plan(
    run: RunPlan, model: PreTrainedModel, plan: Sequence[str], on_prediction: OnPrediction
) -> list[str]:
    predicted = [] if run.prediction is None else run.prediction.sentences()
    return [
        *_describe_model(run, model),
        *plan,
        *predicted,
        _describe_memory(run, model, on_prediction),
        _describe_checkpoints(run.cfg),
    ]


def describe_plan(plan: fp8.Plan) -> list[str]:
    """Return a line about FP8 in the model, and a line per component with its share of linear FLOPs and the reasons for
    layers in high precision."""
    rows = plan.rows
    fp8_rows = [row for row in rows if row.fp8]
    if not fp8_rows:
        return ["FP8 is off: every layer computes in high precision"]
    total_line = f"FP8: {len(fp8_rows)} of {len(rows)} linear layers, {100 * plan.share:.1f} % of linear FLOPs"
    lines = [f"{total_line} (except lm_head, patches)"]
    parts = {c: [row for row in rows if row.component == c] for c in dict.fromkeys(row.component for row in rows)}
    name_width = max(map(len, parts))
    for name, layers in parts.items():
        recipes = ", ".join(dict.fromkeys(row.recipe.summary() for row in layers if row.recipe is not None))
        num_fp8 = sum(row.fp8 for row in layers)
        line = f"  {name:<{name_width}}  {num_fp8} of {len(layers)}"
        if recipes:
            line += f" {recipes}"
            line += f", {100 * plan.share_of(name):.1f} %" if any(row.share for row in layers) else ""
        why = [reason for reason, _ in Counter(row.reason for row in layers if not row.fp8).most_common()]
        if why:
            others = f" (+{len(why) - _REASONS} reasons)" if len(why) > _REASONS else ""
            reasons = "; ".join(why[:_REASONS]) + others
            line += f"; not: {reasons.replace(_STAYS, '')}" if num_fp8 else f": {reasons}"
        lines.append(line)
    return lines


def _describe_model(run: RunPlan, model: PreTrainedModel) -> list[str]:
    cfg = run.cfg
    parameters = list(model.parameters())
    total, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    if cfg.lora is not None:
        trained_part = f"LoRA of rank {cfg.lora.rank} on a frozen base"
    else:
        trained_part = "all trained" if trained == total else f"{_format_count(trained)} trained"
    origin = hub.origin(cfg.model.path)
    path = (
        min(cfg.model.path, os.path.relpath(cfg.model.path), key=len)
        if origin is None
        else " at ".join(origin.values())
    )
    if cfg.model.fp8_twin is not None and (twin := describe_twin(cfg)) is not None:
        path += f", {twin['format']} weights in place of {twin['of']}"
    lines = [f"{run.family.name} of {_format_count(total)} parameters, {trained_part}: {path}"]
    if not run.steps:
        ranks = f" on {run.ranks} ranks" if run.ranks > 1 else ""
        unit = "packs" if cfg.data.packing else "rows"
        lines.append(f"{cfg.train.phase}: {cfg.train.steps} steps of {cfg.train.global_batch} {unit}{ranks}")
    return [*lines, *run.steps]


def _format_count(number: int) -> str:
    for size, word in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return str(number)


def _describe_memory(run: RunPlan, model: PreTrainedModel, on_prediction: OnPrediction) -> str:
    try:
        tokens, _ = assume_tokens(run.cfg, run.family.components, model.config)
        sizes = MemoryEstimator(run.cfg, model, run.family, run.plan, tokens, copy=run.reference == "copy")
        footprint = sizes.estimate(run.cfg, run.ranks)
    except TrainError as error:
        return f"memory is not predicted: {error}"
    on_prediction(footprint)
    largest = sorted(footprint.kinds.items(), key=lambda kind: -kind[1])[:3]
    listed = ", ".join(f"{name} {gb(size)}" for name, size in largest if size)
    return f"memory, predicted{' per rank' if run.ranks > 1 else ''}: {gb(footprint.total)} ({listed}, ...)"


def _describe_checkpoints(cfg: Config) -> str:
    run = cfg.run
    steps = save_interval(cfg)
    saves = f"a checkpoint every {steps} steps" if 0 < steps < cfg.train.total_steps else "a checkpoint at the end"
    saves += "" if run.save_states else ", weights only"
    saves += ", written during training" if run.save == "async" else ""
    final = "" if not run.hf else ", adapter/ at the end" if cfg.lora is not None else ", hf/ at the end"
    return f"{run.dir}: {saves} (keeps the newest {run.keep}){final}"
