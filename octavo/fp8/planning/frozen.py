"""Frozen FP8 weights in a plan: which recipes can use their codes, and notes on them.

The forward of a layer needs codes in the blocks of its recipe: rows for rowwise, 128 x 128 for blockwise, the whole
tensor for tensorwise and delayed (:data:`octavo.base.recipe_specs.RECIPES_OF_KIND`). Casting dequantized values in
other blocks would train against weights that no checkpoint has, so it is not supported. dgrad uses the same codes if
its blocks are the same (block, tensor). With rowwise it contracts the other dimension, so codes are cast from
dequantized values in each backward and not kept. GEMMs in high precision (recipe off, ``fwd: bf16``, ``dgrad: bf16``)
use dequantized values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from octavo.base.recipe_specs import COLUMN, NAME_OF_KIND, ROW
from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.arithmetic.recipe import Gemm, Recipe
from octavo.fp8.planning.rows import PlanRow
from octavo.fp8.policy.policy import AUTO, OFF, Decision, PlanError
from octavo.fp8.policy.topology import Row
from octavo.fp8.weights.frozen import codes_cast, frozen_bytes, frozen_weights, kind_of


def recipe_for_codes(recipe: Recipe, codes: CastSpec) -> Recipe | None:
    """Return the recipe with the weight's cast replaced by the cast of these codes, or None if its blocks differ. The
    casts can differ in ``scale``: scales of checkpoints need not be powers of two, and backends check that."""

    def replace_cast(gemm: Gemm | None) -> Gemm | None:
        return Gemm(gemm.a, codes) if gemm is not None and _same_codes(gemm.b, codes) else gemm

    fwd, dgrad = recipe.fwd, recipe.dgrad
    if fwd is not None:
        fits = _same_codes(fwd.b, codes)
    else:
        fits = dgrad is None or _same_codes(dgrad.b, codes) or (codes.block == ROW and dgrad.b.block == COLUMN)
    return replace(recipe, fwd=replace_cast(fwd), dgrad=replace_cast(dgrad)) if fits else None


def _same_codes(spec: CastSpec, codes: CastSpec) -> bool:
    return (spec.format, spec.block, spec.scale == "e8m0") == (codes.format, codes.block, codes.scale == "e8m0")


def recipes_for_codes(
    row: Row, codes: CastSpec, decision: Decision, allowed: Mapping[str, Recipe]
) -> Mapping[str, Recipe]:
    """Return the allowed recipes that can use the codes of a layer, with the cast of these codes.

    Raises PlanError if the policy names a recipe that cannot.
    """
    out = {
        name: matching for name, recipe in allowed.items() if (matching := recipe_for_codes(recipe, codes)) is not None
    }
    if not out and decision.recipe not in (AUTO, OFF):
        kind = kind_of(codes)
        fix = f"recipe {NAME_OF_KIND[kind]!r}" if kind in NAME_OF_KIND else "another checkpoint"
        raise PlanError(
            f"{row.name!r} has frozen FP8 codes of kind {NAME_OF_KIND.get(kind, kind)} ({codes}), but "
            f"{decision.source} requests the recipe {decision.recipe!r}, which needs different blocks. "
            f"Use {fix} for it, or 'off' to compute with dequantized values."
        )
    return out


def no_recipe_reason(codes: CastSpec) -> str:
    """Return the reason if "auto" finds no recipe for these codes."""
    kind = kind_of(codes)
    no_candidate = f", and {NAME_OF_KIND[kind]} is not a candidate of auto" if kind in NAME_OF_KIND else ""
    return f"auto: has frozen FP8 codes ({codes}){no_candidate}"


def frozen_notes(model: nn.Module, rows: Sequence[PlanRow]) -> Iterator[str]:
    """Yield notes on the number and size of frozen FP8 weights, and on how layers use them."""
    frozen_rows = [r for r in rows if r.row.codes is not None]
    if not frozen_rows:
        return
    weights = [w for _, w in frozen_weights(model)]
    params, size = sum(w.numel() for w in weights), frozen_bytes(model)
    kinds = Counter(kind_of(spec) for weight in weights if (spec := codes_cast(weight)) is not None)
    what = ", ".join(f"{n} {NAME_OF_KIND.get(kind, kind)}" for kind, n in kinds.items())
    yield (
        f"{len(weights)} weights are frozen FP8 codes ({what}): {size:,} bytes with their scales, "
        f"{size / max(1, params):.3f} per parameter"
    )
    # These layers save memory but no time, which is easy to miss.
    high = sum(not r.fp8 for r in frozen_rows)
    if high:
        yield (
            f"{high} of {len(frozen_rows)} layers with frozen codes stay in high precision and use dequantized values"
        )
    fp8 = [r.recipe for r in frozen_rows if r.recipe is not None]
    if any(r.fwd is None for r in fp8):
        yield "fwd: bf16 uses dequantized values of frozen weights"
    if any(r.dgrad is None for r in fp8):
        yield "dgrad: bf16 uses dequantized values of frozen weights"
    if recasting := sorted({r.name for r in fp8 if len(r.weight_casts()) > 1}):
        yield (
            f"dgrad of {' and '.join(recasting)} needs different blocks: it casts codes of frozen weights from "
            "dequantized values in each backward, and does not keep them"
        )
