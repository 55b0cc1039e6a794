"""Makes the FP8 plan of a configuration, on a model without weights.

With `recipe: auto` and a GPU, recipes are measured here, with the token counts of the run's data. A resumed run keeps
its original plan and measures nothing, so its losses do not depend on timing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from octavo import fp8, models, parallel
from octavo.base import accelerator
from octavo.config import Config, Rule
from octavo.config.sections.names import COMPONENTS
from octavo.fp8.planning import Schedule
from octavo.fp8.proof import Prediction
from octavo.fp8.proof import predict as predict_step
from octavo.parallel import ulysses_size
from octavo.train.errors import TrainError
from octavo.train.forward import routing
from octavo.train.forward.forward import model_dtype
from octavo.train.setup import checks, frozen_base
from octavo.train.setup.token_counts import Tokens, attention_flops

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RunPlan:
    """A run before its weights are read.

    ``notes`` and ``prediction`` are as in `plan_run`. ``reference`` is base, copy, disk or None. ``steps`` has lines
    that describe a step of the phases rl and preference.
    """

    cfg: Config
    plan: fp8.Plan
    family: models.Family
    notes: Sequence[str] = ()
    prediction: Prediction | None = None
    ranks: int = 1
    reference: str | None = None
    steps: Sequence[str] = ()


def policy_from(cfg: Config) -> fp8.Policy:
    """Return the `fp8` section as a policy."""
    section = cfg.fp8
    return fp8.Policy(
        recipe=section.recipe,
        format=section.format,
        fwd=section.fwd,
        dgrad=section.dgrad,
        wgrad=section.wgrad,
        components={
            name: fp8.ComponentPolicy(**dict(part))
            for name in (*COMPONENTS, "lm_head")
            if (part := getattr(section, name))
        },
        rules=tuple(
            fp8.Rule(**rule.model_dump(exclude={"first", "last"}), steps=steps_of_rule(rule, cfg.train.steps))
            for rule in section.rules
        ),
        activations=section.activations,
        weight_codes=section.weight_codes,
        param=section.param,
        backend=section.backend,
        candidates=section.candidates,
        fuse=section.fuse,
    )


def steps_of_rule(rule: Rule, steps: int | None) -> tuple[int, int] | None:
    """Return (first step, last step) of a rule, or None if it applies in all steps."""
    if rule.first is None and rule.last is None:
        return None
    if steps is None:
        raise TrainError(
            f"the rule {rule.match!r} applies to a part of the steps, and the number of steps in train.epochs is not "
            "known yet (it depends on the rows of data.train). Set train.steps"
        )
    if rule.last is None:
        return 1, rule.first or 0
    return steps + 1 - max(1, math.ceil(round(rule.last * steps, 9))), steps


def make_schedule(
    cfg: Config, plan: fp8.Plan, model: PreTrainedModel | None = None, measurements: fp8.Measurements | None = None
) -> Schedule:
    """Return the plans of the run by step; ``plan`` applies outside the spans of its rules."""
    if all(rule.steps is None for rule in plan.policy.rules):
        return Schedule(plan)
    return fp8.schedule(meta_model(cfg)[0] if model is None else model, plan, cfg.train.total_steps, measurements)


def describe_spans(schedule: Schedule) -> tuple[str, ...]:
    """Return a sentence for each span of steps with different rules; empty if all rules apply in all steps."""
    return tuple(
        f"steps {span.first} to {span.last}: {sum(row.fp8 for row in span.plan.rows)} of {len(span.plan.rows)} linear "
        f"layers in FP8, {100 * span.plan.share:.1f} % of linear FLOPs"
        + (f" ({recipes})" if (recipes := _recipes(span.plan)) else "")
        for span in schedule.spans
    )


def _recipes(plan: fp8.Plan) -> str:
    return ", ".join(dict.fromkeys(row.recipe.summary() for row in plan.rows if row.recipe is not None))


def has_open_recipes(cfg: Config) -> bool:
    """Return True if recipes come from a measurement or a plan file."""
    return cfg.fp8.plan is not None or policy_from(cfg).requests_auto


def meta_model(cfg: Config) -> tuple[PreTrainedModel, models.Family]:
    """Return (model without weights, family), frozen as in the run.

    A frozen layer has no wgrad. Where the run loads FP8 codes, the model has frozen FP8 weights. Raises ModelError,
    also for rows that are too long for the model, and TrainError if the model does not support the configured
    load-balancing loss.
    """
    model = models.empty(cfg.model.path, dtype=model_dtype(cfg))
    if (why := models.why_too_long(model.config, cfg.train.seq_length)) is not None:
        raise models.ModelError(f"train.seq_length is {cfg.train.seq_length}, and {cfg.model.path} {why}")
    if cfg.train.router_aux_loss_coef:
        routing.aux_loss_coef(cfg, model)  # raises TrainError for a model without that loss
    family = models.describe(model)
    frozen_base.prepare_meta_model(model, family, cfg, cfg.model.path)
    return model, family


def plan_for(cfg: Config, ranks: int = 1, saved: Path | None = None) -> tuple[fp8.Plan, models.Family, tuple[str, ...]]:
    """Return (plan, family, notes) of a configuration on the meta device, without reading weights or measuring.

    `saved` is the plan file of a resumed run, which is used instead: a new version may plan the same configuration
    differently, but a run must keep its plan. `notes` list the modules besides linear layers that stay in high
    precision, and settings with effects that a reader may miss. Raises PlanError, ModelError, and WorldError for an
    impossible number of ranks.
    """
    model, family = meta_model(cfg)
    if saved is not None:
        backend = "auto" if cfg.fp8.plan is not None else cfg.fp8.backend
        plan = fp8.load_plan(saved, model, family.components, other_machine=True, backend=backend)
        checks.check_ranks(cfg, model, plan, ranks)
        return plan, family, _notes(plan, model, family, ranks, cfg)
    return plan_model(cfg, model, family, ranks)


def plan_model(
    cfg: Config,
    model: PreTrainedModel,
    family: models.Family,
    ranks: int = 1,
    tokens: Tokens | None = None,
    measurements: fp8.Measurements | None = None,
) -> tuple[fp8.Plan, models.Family, tuple[str, ...]]:
    """Return (plan, family, notes) like `plan_for`, for an existing model and optional measurements."""
    if cfg.data.packing and (why := models.why_not_packed(model)) is not None:
        raise fp8.PlanError(f"data.packing: true is not possible: {why}. Set data.packing: false")
    if cfg.fp8.plan is not None and measurements is None:
        plan = fp8.load_plan(cfg.fp8.plan, model, family.components)
    else:
        counts = None if tokens is None else tokens.counts
        micro_steps = count_micro_steps(cfg, ranks)
        plan = fp8.plan(model, policy_from(cfg), family.components, counts, measurements, micro_steps)
    _check_compile(cfg, plan)
    checks.check_ranks(cfg, model, plan, ranks)
    return plan, family, _notes(plan, model, family, ranks, cfg)


def _check_compile(cfg: Config, plan: fp8.Plan) -> None:
    """Raise PlanError if a compiled block would not run as planned."""
    if not cfg.train.compile:
        return
    codes = [r.name for r in plan.rows if r.fp8 and (r.row.codes is not None or plan.policy.param_of(r.component))]
    for block in plan.blocks:
        # The layers of an MLP are its children; the layers of a norm are its siblings' children.
        parent = block.name if block.kind == "gated MLP" else block.name.rpartition(".")[0]
        layer = next((name for name in codes if name.startswith(f"{parent}.")), None)
        if block.fused and layer is not None:
            raise fp8.PlanError(
                f"{block.name} is planned to be fused and train.compile is true, but the weight of {layer} is FP8 "
                "(param, or a frozen base) and finds its codes outside compiled graphs. Use fuse: off, or "
                "train.compile: false."
            )


def count_micro_steps(cfg: Config, ranks: int = 1) -> int:
    """Return the number of forwards of one rank per optimizer step."""
    return max(1, -(-samples_per_step(cfg) // (data_ranks(cfg, ranks) * cfg.train.micro_batch)))


def data_ranks(cfg: Config, ranks: int) -> int:
    """Return the number of ranks with different rows; ranks that share rows count once."""
    return max(1, ranks // cfg.parallel.context)


def samples_per_step(cfg: Config) -> int:
    """Return the number of samples per optimizer step: rows, pairs or completions."""
    if cfg.train.phase == "rl" and cfg.rl is not None:
        return cfg.rl.prompts // cfg.rl.mini_batches * cfg.rl.group
    return cfg.train.global_batch


def predict(plan: fp8.Plan, model: PreTrainedModel, tokens: Tokens) -> Prediction | None:
    """Return a measured plan's prediction for a step, with attention estimated; None if nothing was measured."""
    attention = attention_flops(model.config, tokens)
    return predict_step(plan, {} if attention is None else {"attention": attention})


def plan_run(
    cfg: Config,
    world: parallel.World,
    count: Callable[[models.Family, nn.Module], Tokens],
    saved: Path | None,
    log: Callable[[str], None],
) -> tuple[Schedule, models.Family, tuple[str, ...], Prediction | None]:
    """Return (plans, family, notes, prediction) at the start of a run. A collective call if recipes are measured.

    `count` counts the tokens of a micro-batch and is only called for a measurement. `saved` is the plan file of a
    resumed run, or None. With recipe auto and a GPU, rank 0 measures, and all ranks plan with its measurements.
    """
    planned = saved is not None or cfg.fp8.plan is not None
    if planned or not policy_from(cfg).requests_auto or not accelerator.is_gpu(world.device):
        plan, family, notes = plan_for(cfg, world.size, saved)
        plans = make_schedule(cfg, plan)
        return plans, family, (*notes, *describe_spans(plans)), None
    model, family = meta_model(cfg)

    def measure() -> dict:
        tokens = count(family, model).shared(cfg.parallel.context)
        measurements = measure_recipes(cfg, model, family, world.device, tokens, _make_progress(log))
        return {"tokens": list(astuple(tokens)), "found": measurements.to_json()}

    answer = world.run_on_main(measure)
    tokens = Tokens(*answer["tokens"])
    measurements = fp8.Measurements.from_json(answer["found"])
    plan, family, notes = plan_model(cfg, model, family, world.size, tokens, measurements)
    plans = make_schedule(cfg, plan, model, measurements)
    return plans, family, (*notes, *describe_spans(plans)), predict(plan, model, tokens)


def measure_recipes(
    cfg: Config,
    model: PreTrainedModel,
    family: models.Family,
    device: torch.device,
    tokens: Tokens,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    cache: Path | None = None,
) -> fp8.Measurements:
    """Measure the recipes that the configuration allows; ``cache`` defaults to the user's cache. Raises
    MeasureError."""
    policy, measurements = policy_from(cfg), fp8.MeasurementCache(cache)
    return fp8.measure(
        model, policy, family.components, tokens.counts, device=device, cache=measurements, progress=progress
    )


def _make_progress(log: Callable[[str], None]) -> Callable[[int, int, str], None]:
    def report(done: int, total: int, what: str) -> None:
        if done < total:
            log(f"measuring layer {done + 1} of {total}: {what}")

    return report


def high_precision_notes(model: nn.Module) -> list[str]:
    """Return notes on the modules besides linear layers that stay in high precision."""
    return [f"{kind} in high precision: {reason}" for kind, reason in models.high_precision_modules(model).items()]


def pretrained_notes(cfg: Config, plan: fp8.Plan) -> list[str]:
    """Return a note on what an FP8 forward costs pretrained weights, or LoRA on weights that are stored as FP8 codes,
    and the setting that avoids it; empty for random weights, and where the forward is in high precision."""
    in_fp8 = [r for r in plan.rows if r.recipe is not None and r.recipe.fwd is not None]
    if cfg.model.init == "random" or cfg.fp8.param or cfg.fp8.plan is not None or not in_fp8:
        return []
    if all(r.row.codes is not None for r in in_fp8):
        return [
            "FP8 in fwd raises the loss of LoRA on an FP8 base: on SmolLM2 by 0.68 % in 40 steps, and not measurably "
            f"with {FORWARD_SETTING}, at the same memory (docs/studies.md)"
        ]
    return [
        "FP8 in fwd raises the loss of pretrained weights: on SmolLM2 by 0.67 % after 100 steps, and by 0.02 % with "
        f"{FORWARD_SETTING}, which leaves dgrad and wgrad in FP8; the first and last two blocks in high precision, by "
        "fp8.rules, halve it (docs/plan.md)"
    ]


#: the setting that keeps the loss in the study smollm2
FORWARD_SETTING = "fp8.fwd=bf16"


def _notes(plan: fp8.Plan, model: PreTrainedModel, family: models.Family, ranks: int, cfg: Config) -> tuple[str, ...]:
    """Return the notes of a plan, and a note for each setting with an effect that a reader may miss."""
    notes = [*plan.notes, *pretrained_notes(cfg, plan), *high_precision_notes(model)]
    # settings whose effect depends on the number of ranks or on the model
    if ranks > 1 and any(row.recipe is not None and row.recipe.delayed is not None for row in plan.rows):
        notes.append(f"delayed on {ranks} ranks: amax histories are reduced over all ranks after each step")
    if (adapt := cfg.fp8.adapt) is not None:
        notes.append(
            f"fp8.adapt: GEMMs are judged every {adapt.every} steps and may move; at most {100 * adapt.budget:g} % of "
            "linear FLOPs in high precision by moves"
        )
        if adapt.time is not None and all(row.times is None for row in plan.rows):
            notes.append("fp8.adapt.time: nothing was measured, so moves are limited only by fp8.adapt.budget")
    if cfg.train.cuda_graphs:
        notes.append(
            "train.cuda_graphs: graphs keep separate gradients, activations and workspace, which are not in the "
            "predicted memory"
        )
    if cfg.data.packing:
        kernel = cfg.model.attention.foundation
        by = {"sdpa": "torch's varlen flash attention in 16 bits on CUDA, else one call per sample", "varlen": "varlen",
              "flex": "one call of flex attention"}.get(kernel, f"{kernel}, one call per sample")  # fmt: skip
        notes.append(
            f"data.packing: rows are packs of up to {cfg.train.seq_length} tokens, planned {cfg.data.window} samples "
            f"at a time; attention within each sample by {by}"
        )
    if (shared := cfg.parallel.context) > 1:
        heads = model.config.get_text_config().num_attention_heads
        by_heads = ulysses_size(shared, cfg.parallel.ulysses, heads)
        notes.append(
            f"parallel.context: {shared} ranks share the tokens of each pack; {by_heads} exchange heads for tokens, "
            f"{shared // by_heads} gather keys and values. Tensorwise and delayed scales are computed from the tokens "
            "of each rank"
        )
    if cfg.train.gather == "bf16":
        with_ranks = "weights are gathered and gradients summed in BF16; shards stay fp32"
        single = "one process gathers nothing and computes as with train.gather: stored"
        notes.append(f"train.gather: bf16 on {ranks} rank(s): {with_ranks if ranks > 1 else single}")
    if cfg.train.exchange == "fp8" and not (cfg.parallel.context > 1 or cfg.parallel.expert > 1):
        notes.append("train.exchange: fp8 changes nothing: no ranks share rows or experts (parallel)")
    return (*notes, *frozen_base.dropout_note(model, cfg), *frozen_base.notes(cfg, model, family))
