"""Frozen FP8 weights in a plan: which recipes multiply by their codes as they are, and notes on them.

A layer's forward needs codes in the blocks of its recipe's cast: of a row rowwise, of 128 x 128 blockwise, of a tensor
tensorwise and delayed (:data:`octavo.base.recipe_specs.RECIPES_OF_KIND`). There is no other way to run it in FP8, since
casting dequantized values in other blocks would train for a base that does not exist. dgrad multiplies by the same
codes where its blocks are the same (block, tensor); rowwise contracts the other dimension there, and its codes are cast
from dequantized values at each backward and not kept. In high precision (recipe off, ``fwd: bf16``, ``dgrad: bf16``)
GEMMs multiply by dequantized values.
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
    """The recipe with the cast of these codes in place of its own for the weight (scales of checkpoints may be no
    powers of two, and backends ask); None if it would multiply by other blocks."""

    def own(gemm: Gemm | None) -> Gemm | None:
        same = gemm is not None and _same_codes(gemm.b, codes)
        return Gemm(gemm.a, codes) if gemm is not None and same else gemm

    fwd, dgrad = recipe.fwd, recipe.dgrad
    if fwd is not None:
        fits = _same_codes(fwd.b, codes)
    else:
        fits = dgrad is None or _same_codes(dgrad.b, codes) or (codes.block == ROW and dgrad.b.block == COLUMN)
    return replace(recipe, fwd=own(fwd), dgrad=own(dgrad)) if fits else None


def _same_codes(spec: CastSpec, codes: CastSpec) -> bool:
    return (spec.format, spec.block, spec.scale == "e8m0") == (codes.format, codes.block, codes.scale == "e8m0")


def recipes_for_codes(
    row: Row, codes: CastSpec, decision: Decision, allowed: Mapping[str, Recipe]
) -> Mapping[str, Recipe]:
    """Of the recipes that a layer may take those that multiply by its codes, with their cast.

    Raises PlanError where one was asked for by name that does not.
    """
    out = {
        name: matching for name, recipe in allowed.items() if (matching := recipe_for_codes(recipe, codes)) is not None
    }
    if not out and decision.recipe not in (AUTO, OFF):
        kind = kind_of(codes)
        fix = f"recipe {NAME_OF_KIND[kind]!r}" if kind in NAME_OF_KIND else "another checkpoint"
        raise PlanError(
            f"{row.name!r} holds frozen FP8 codes of kind {NAME_OF_KIND.get(kind, kind)} ({codes}), and "
            f"{decision.source} asks for the recipe {decision.recipe!r}, which multiplies by other blocks. "
            f"Set {fix} for it, or 'off' to compute with its dequantized values."
        )
    return out


def no_recipe_reason(codes: CastSpec) -> str:
    """The reason of a layer that "auto" leaves in high precision."""
    kind = kind_of(codes)
    no_candidate = f", and {NAME_OF_KIND[kind]} is no candidate of auto" if kind in NAME_OF_KIND else ""
    return f"auto: holds frozen FP8 codes ({codes}){no_candidate}"


def frozen_notes(model: nn.Module, rows: Sequence[PlanRow]) -> Iterator[str]:
    """How many weights are frozen FP8, what they take, and how they are computed with."""
    held = [r for r in rows if r.row.codes is not None]
    if not held:
        return
    weights = [w for _, w in frozen_weights(model)]
    params, size = sum(w.numel() for w in weights), frozen_bytes(model)
    kinds = Counter(kind_of(spec) for weight in weights if (spec := codes_cast(weight)) is not None)
    what = ", ".join(f"{n} {NAME_OF_KIND.get(kind, kind)}" for kind, n in kinds.items())
    yield (
        f"{len(weights)} weights hold frozen FP8 codes ({what}): {size:,} bytes with their scales, "
        f"{size / max(1, params):.3f} a parameter"
    )
    # These layers keep one byte a parameter and gain no speed, which is easy to miss.
    high = sum(not r.fp8 for r in held)
    if high:
        yield (
            f"{high} of {len(held)} layers with frozen codes stay in high precision and compute with dequantized values"
        )
    fp8 = [r.recipe for r in held if r.recipe is not None]
    if any(r.fwd is None for r in fp8):
        yield "fwd: bf16 multiplies by dequantized values of frozen weights"
    if any(r.dgrad is None for r in fp8):
        yield "dgrad: bf16 multiplies by dequantized values of frozen weights"
    if other := sorted({r.name for r in fp8 if len(r.weight_casts()) > 1}):
        yield (
            f"dgrad of {' and '.join(other)} multiplies by other blocks: codes of frozen weights are cast for it from "
            "dequantized values at each backward, and not kept"
        )
