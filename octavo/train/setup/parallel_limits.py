"""Checks that ranks can share the rows and experts of a model with its plan, before weights are read.

A run and `octavo plan` both use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo import fp8
from octavo.config import Config
from octavo.fp8.dense import WireFormat
from octavo.parallel import NO_CODED_EXCHANGE, Layout, WorldError, check_experts, ulysses_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check(cfg: Config, model: PreTrainedModel, plan: fp8.Plan, ranks: int) -> None:
    """Raise WorldError for a mesh with a different number of ranks, and for heads, experts or an exchange that this
    model and plan do not support. ``model`` may be on the meta device; it is not converted yet."""
    if ranks == 1:
        return
    layout = Layout.from_section(ranks, cfg.parallel)
    text = model.config.get_text_config()
    if layout.context > 1:
        ulysses_size(layout.context, cfg.parallel.ulysses, text.num_attention_heads)
    if layout.expert > 1:
        recipes = {row.row.module: row.recipe for row in plan.rows if row.kind == "experts"}
        delayed_recipes = {
            name: recipe.summary() for name, recipe in recipes.items() if recipe and recipe.delayed is not None
        }
        check_experts(model, layout, lambda name, module: delayed_recipes.get(name))
    if cfg.train.exchange == "fp8" and (layout.context > 1 or layout.expert > 1):
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        outputs, *rest = (layers for layers, _ in count_coded_layers(plan, size, text.hidden_size))
        if not (outputs and layout.context > 1) and not (any(rest) and layout.expert > 1):
            raise WorldError(NO_CODED_EXCHANGE)


def count_coded_layers(plan: fp8.Plan, head_dim: int, hidden: int) -> list[tuple[int, float]]:
    """Return (layers, bytes per value) of each tensor that ranks send as codes (:mod:`octavo.parallel.wire`): outputs
    of attention, rows dispatched to experts, gradients of their results."""

    def count(
        name: str, coding: Callable[[fp8.Recipe | None, int], WireFormat | None], piece: int
    ) -> tuple[int, float]:
        recipes = (row.recipe for row in plan.rows if row.component == "foundation" and row.name.endswith(name))
        codings = [coding_of_layer for recipe in recipes if (coding_of_layer := coding(recipe, piece)) is not None]
        return len(codings), codings[0].bytes_per_value if codings else 0.0

    return [
        count(".o_proj", WireFormat.for_inputs, head_dim),
        count(".experts.gate_up_proj", WireFormat.for_inputs, hidden),
        count(".experts.down_proj", WireFormat.for_gradients, hidden),
    ]
