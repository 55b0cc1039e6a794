"""From a configuration to a plan: what will run in FP8 and why, on a model without weights."""

from __future__ import annotations

from torch import nn

from octavo import fp8, models
from octavo.config import Config
from octavo.config.schema import COMPONENTS


def policy_from(cfg: Config) -> fp8.Policy:
    """The `fp8` section as a policy."""
    section = cfg.fp8
    parts = {name: part for name in COMPONENTS if (part := getattr(section, name)) is not None}
    return fp8.Policy(
        recipe=section.recipe,
        format=section.format,
        fwd=section.fwd,
        dgrad=section.dgrad,
        wgrad=section.wgrad,
        components={
            name: fp8.ComponentPolicy(part.recipe, part.format, part.fwd, part.dgrad, part.wgrad)
            for name, part in parts.items()
        },
        rules=tuple(fp8.Rule(r.match, r.recipe, r.format, r.fwd, r.dgrad, r.wgrad) for r in section.rules),
        activations=section.activations,
        backend=section.backend,
    )


def plan_for(cfg: Config, ranks: int = 1) -> tuple[fp8.Plan, models.Family, tuple[str, ...]]:
    """(plan, family, notes) of a configuration, on the meta device: no weights are read.

    The model is frozen as the run would freeze it, since a frozen layer has no wgrad. `notes` say what stays in high
    precision besides linear layers, and what else a reader of the plan should know. Raises PlanError, ModelError.
    """
    model = models.empty(cfg.model.path)
    family = models.describe(model)
    models.freeze(model, family, cfg.model.freeze)
    return plan_model(cfg, model, family, ranks)


def plan_model(
    cfg: Config, model: nn.Module, family: models.Family, ranks: int = 1
) -> tuple[fp8.Plan, models.Family, tuple[str, ...]]:
    """`plan_for` on a model that is already there."""
    plan = fp8.plan(model, policy_from(cfg), family.components)
    return plan, family, _notes(plan, model, ranks)


def _notes(plan: fp8.Plan, model: nn.Module, ranks: int) -> tuple[str, ...]:
    notes = list(plan.notes)
    notes += [f"{kind} in high precision: {reason}" for kind, reason in models.stays(model).items()]
    recipes = {row.recipe.name for row in plan.rows if row.recipe is not None}
    if ranks > 1 and "delayed" in recipes:
        notes.append(f"delayed on {ranks} ranks: amax histories are reduced over all ranks after each step")
    return tuple(notes)
