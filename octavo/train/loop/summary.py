"""The summary of a run before its first step: the model, the plan in a line per component, memory, checkpoints.

`octavo plan FILE`, or the run with --verbose, prints the whole plan, layer by layer.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from octavo import fp8
from octavo.base import hub
from octavo.config import Config
from octavo.train.callbacks.checkpointing import save_interval
from octavo.train.errors import TrainError
from octavo.train.estimate.memory import Footprint, Footprints, gb
from octavo.train.setup import planning
from octavo.train.setup.planning import RunPlan
from octavo.train.setup.token_counts import assume_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Heard = Callable[[Footprint], None]

_REASONS = 2  # most reasons per component
_STAYS = " stays in high precision"


def summary(of: RunPlan, heard: Heard = lambda footprint: None) -> list[str]:
    """At most 15 lines, the most important first, with the notes that are specific to this run. Memory is predicted on
    a model without weights, in well under a second; `heard` gets the prediction. If there is none, its line says why.
    """
    model, _ = planning.meta_model(of.cfg)
    usual = {*of.plan.notes, *planning.high_precision_notes(model)}
    notes = [*of.plan.changes, *(note for note in of.notes if note not in usual)]
    plan = [*verdict(of.plan), *(f"note: {note}" for note in notes)]
    return [*_beginning(of, model, plan, heard), "all layers and notes: octavo plan FILE, or --verbose"]


def describe_in_full(
    of: RunPlan, layers: Callable[[fp8.Plan], Sequence[str]], heard: Heard = lambda footprint: None
) -> list[str]:
    """The same with the plan layer by layer, formatted by `layers`, and all notes."""
    off = not any(row.fp8 or row.automatic for row in of.plan.rows)
    table = [] if off else ["", *layers(of.plan), ""]
    notes = [f"note: {note}" for note in dict.fromkeys([*(() if off else of.plan.notes), *of.notes])]
    return _beginning(of, planning.meta_model(of.cfg)[0], [*verdict(of.plan), *table, *notes], heard)


def _beginning(of: RunPlan, model: PreTrainedModel, plan: Sequence[str], heard: Heard) -> list[str]:
    predicted = [] if of.prediction is None else of.prediction.sentences()
    return [*_model(of, model), *plan, *predicted, _memory(of, model, heard), _saved(of.cfg)]


def verdict(plan: fp8.Plan) -> list[str]:
    """The extent of FP8 in a plan: a line for the whole, and one per component with its share of linear FLOPs and the
    reasons for layers in high precision."""
    rows = plan.rows
    ours = [row for row in rows if row.fp8]
    if not ours:
        return ["FP8 is off: every layer computes in high precision"]
    whole = f"FP8: {len(ours)} of {len(rows)} linear layers, {100 * plan.share:.1f} % of linear FLOPs"
    lines = [f"{whole} (lm_head, patches aside)"]
    parts = {c: [row for row in rows if row.component == c] for c in dict.fromkeys(row.component for row in rows)}
    width = max(map(len, parts))
    for name, layers in parts.items():
        recipes = ", ".join(dict.fromkeys(row.recipe.summary() for row in layers if row.recipe is not None))
        inside = sum(row.fp8 for row in layers)
        part = f"  {name:<{width}}  {inside} of {len(layers)}"
        if recipes:
            part += f" {recipes}"
            part += f", {100 * plan.share_of(name):.1f} %" if any(row.share for row in layers) else ""
        why = [reason for reason, _ in Counter(row.reason for row in layers if not row.fp8).most_common()]
        if why:
            others = f" (+{len(why) - _REASONS} reasons)" if len(why) > _REASONS else ""
            reasons = "; ".join(why[:_REASONS]) + others
            part += f"; not: {reasons.replace(_STAYS, '')}" if inside else f": {reasons}"
        lines.append(part)
    return lines


def _model(of: RunPlan, model: PreTrainedModel) -> list[str]:
    cfg = of.cfg
    parameters = list(model.parameters())
    total, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    if cfg.lora is not None:
        how = f"LoRA of rank {cfg.lora.rank} on a frozen base"
    else:
        how = "all trained" if trained == total else f"{_count(trained)} trained"
    taken = hub.origin(cfg.model.path)
    path = (
        min(cfg.model.path, os.path.relpath(cfg.model.path), key=len) if taken is None else " at ".join(taken.values())
    )
    lines = [f"{of.family.name} of {_count(total)} parameters, {how}: {path}"]
    if not of.steps:
        on = f" on {of.ranks} ranks" if of.ranks > 1 else ""
        what = "packs" if cfg.data.packing else "rows"
        lines.append(f"{cfg.train.phase}: {cfg.train.steps} steps of {cfg.train.global_batch} {what}{on}")
    return [*lines, *of.steps]


def _count(number: int) -> str:
    for size, word in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return str(number)


def _memory(of: RunPlan, model: PreTrainedModel, heard: Heard) -> str:
    try:
        tokens, _ = assume_tokens(of.cfg, of.family.components, model.config)
        sizes = Footprints(of.cfg, model, of.family, of.plan, tokens, copy=of.reference == "copy")
        footprint = sizes.of(of.cfg, of.ranks)
    except TrainError as error:
        return f"memory is not predicted: {error}"
    heard(footprint)
    largest = sorted(footprint.kinds.items(), key=lambda kind: -kind[1])[:3]
    listed = ", ".join(f"{name} {gb(size)}" for name, size in largest if size)
    return f"memory, predicted{' for each rank' if of.ranks > 1 else ''}: {gb(footprint.total)} ({listed}, ...)"


def _saved(cfg: Config) -> str:
    run = cfg.run
    steps = save_interval(cfg)
    every = f"a checkpoint every {steps} steps" if 0 < steps < cfg.train.total_steps else "a checkpoint at the end"
    every += "" if run.save_states else ", weights only"
    every += ", written during training" if run.save == "async" else ""
    end = "" if not run.hf else ", adapter/ at the end" if cfg.lora is not None else ", hf/ at the end"
    return f"{run.dir}: {every} (the newest {run.keep} stay){end}"
