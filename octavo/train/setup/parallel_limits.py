"""Checks that ranks can share the rows and experts of a model under its plan, before weights are read; both a run and
`octavo plan` use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo import fp8
from octavo.config import Config
from octavo.fp8.dense import Coding
from octavo.parallel import SENDS_NO_CODES, Layout, WorldError, check_experts, ulysses_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check(cfg: Config, model: PreTrainedModel, plan: fp8.Plan, ranks: int) -> None:
    """Raises WorldError for a mesh of another number of ranks, and for heads, experts or an exchange that this model
    and plan do not support. ``model`` may be on the meta device; it is not converted yet."""
    if ranks == 1:
        return
    layout = Layout.of(ranks, cfg.parallel)
    text = model.config.get_text_config()
    if layout.context > 1:
        ulysses_of(layout.context, cfg.parallel.ulysses, text.num_attention_heads)
    if layout.expert > 1:
        recipes = {row.row.module: row.recipe for row in plan.rows if row.kind == "experts"}
        late = {name: recipe.short() for name, recipe in recipes.items() if recipe and recipe.delayed is not None}
        check_experts(model, layout, lambda name, module: late.get(name))
    if cfg.train.exchange == "fp8" and (layout.context > 1 or layout.expert > 1):
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        outputs, *rest = (layers for layers, _ in count_coded_layers(plan, size, text.hidden_size))
        if not (outputs and layout.context > 1) and not (any(rest) and layout.expert > 1):
            raise WorldError(SENDS_NO_CODES)


def count_coded_layers(plan: fp8.Plan, head_dim: int, hidden: int) -> list[tuple[int, float]]:
    """(layers, bytes per value) of what ranks send as codes (:mod:`octavo.parallel.wire`): outputs of attention, rows
    dispatched to experts, gradients of their results."""

    def of(name: str, coding: Callable[[fp8.Recipe | None, int], Coding | None], piece: int) -> tuple[int, float]:
        mine = (row.recipe for row in plan.rows if row.component == "foundation" and row.name.endswith(name))
        codings = [coding_of_layer for recipe in mine if (coding_of_layer := coding(recipe, piece)) is not None]
        return len(codings), codings[0].width if codings else 0.0

    return [
        of(".o_proj", Coding.of_x, head_dim),
        of(".experts.gate_up_proj", Coding.of_x, hidden),
        of(".experts.down_proj", Coding.of_dy, hidden),
    ]
