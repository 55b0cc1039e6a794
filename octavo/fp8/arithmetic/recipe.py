"""Recipes: the casts of the three GEMMs of a linear layer.

With x (M tokens x K), w (N x K), dy (M x N)::

    fwd    y  = x @ w.T      contracts K
    dgrad  dx = dy @ w       contracts N
    wgrad  dw = dy.T @ x     contracts M

A recipe gives every operand of every GEMM a :class:`CastSpec`, or keeps a whole GEMM in high precision (``None``).
Where two GEMMs use the same cast of the same tensor, its codes are computed once.

:data:`octavo.base.recipe_specs.SPECS` defines the recipes. ``docs/numerics.md`` has their table with the reasons.

A GEMM may use the casts of another recipe, in that recipe's own format: ``recipe("tensorwise", wgrad="blockwise")``.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import lru_cache

from octavo.base import recipe_specs
from octavo.base.recipe_specs import CURRENT_SCALING, FORMATS, SPECS
from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.arithmetic.errors import Fp8Error

RECIPES = recipe_specs.NAMES
"""The names that :func:`recipe` knows."""

GEMMS = ("fwd", "dgrad", "wgrad")
PRECISIONS = ("fp8", "bf16", *CURRENT_SCALING)
"""The precisions that a recipe may choose for one of its GEMMs."""


class RecipeError(Fp8Error, ValueError):
    """An unknown or invalid recipe; the message names the fix."""


@dataclass(frozen=True)
class Gemm:
    """The casts of one GEMM's two operands. fwd: a = x, b = w; dgrad: a = dy, b = w; wgrad: a = dy, b = x."""

    a: CastSpec
    b: CastSpec


@dataclass(frozen=True)
class Delayed:
    """Delayed scaling: x and dy take their scale from the largest amax of the last ``length`` recorded ones.

    A cast then needs no pass over the tensor first; values that exceed the history saturate. The history is state: it
    belongs in the checkpoint. Weights use current scaling nevertheless: they are cast once per optimizer step and
    reused by every micro-step, so that a pass matters little, and their scale is exact.
    """

    length: int = 16

    def __post_init__(self) -> None:
        if type(self.length) is not int or self.length < 1:
            raise RecipeError(f"Delayed: length={self.length!r} must be an integer of at least 1 (16 is usual).")


@dataclass(frozen=True)
class Recipe:
    """The casts of the three GEMMs; ``None`` keeps that GEMM in high precision (BF16, or the input's dtype).

    ``delayed`` is None for current scaling. Recipes are values: equal fields make equal recipes, which can be keys.
    """

    name: str
    format: str
    fwd: Gemm | None
    dgrad: Gemm | None
    wgrad: Gemm | None
    delayed: Delayed | None = None

    def gemm(self, name: str) -> Gemm | None:
        """The casts of ``"fwd"``, ``"dgrad"`` or ``"wgrad"``."""
        return {"fwd": self.fwd, "dgrad": self.dgrad, "wgrad": self.wgrad}[name]

    def describe(self) -> str:
        """The recipe as three equations, one per line, each operand with its cast (see :class:`CastSpec`)."""
        rows = (
            ("fwd", "y ", "x", "w.T", self.fwd),
            ("dgrad", "dx", "dy", "w", self.dgrad),
            ("wgrad", "dw", "dy.T", "x", self.wgrad),
        )
        lines = [f"{self.name} ({self.format})" + (f", amax history of {self.delayed.length}" if self.delayed else "")]
        for gemm, out, a, b, casts in rows:
            left, right = (f"{a}_bf16", f"{b}_bf16") if casts is None else (f"{a}[{casts.a}]", f"{b}[{casts.b}]")
            lines.append(f"  {gemm:<5}  {out} = {left} @ {right}")
        return "\n".join(lines)

    def weight_casts(self) -> tuple[CastSpec, ...]:
        """The casts of the weight in fwd and dgrad. Each is a layout of codes, a byte per parameter."""
        return tuple(dict.fromkeys(gemm.b for gemm in (self.fwd, self.dgrad) if gemm is not None))

    def gemm_precisions(self) -> dict[str, str]:
        """The precision of each GEMM: fp8 (its own casts), bf16, or the recipe whose casts that GEMM has."""
        return _gemm_precisions(self)

    def summary(self) -> str:
        """One line for ``extra_repr``: name, format, and the GEMMs with other casts or in high precision."""
        return " ".join(
            [self.name, self.format, *(f"{g}={word}" for g, word in _gemm_precisions(self).items() if word != "fp8")]
        )

    def __str__(self) -> str:
        return self.summary()


def recipe(name: str, format: str | None = None, fwd: str = "fp8", dgrad: str = "fp8", wgrad: str = "fp8") -> Recipe:
    """The recipe of that name.

    Args:
        name: one of :data:`RECIPES`.
        format: ``"e4m3"`` or ``"hybrid"``; None: the recipe's own, the first of its line.
        fwd, dgrad, wgrad: ``"fp8"``, ``"bf16"`` to keep that GEMM in high precision, or a recipe whose casts it has.

    Raises RecipeError for an unknown name, format or precision, an invalid combination, and no GEMM in FP8.
    """
    if name not in RECIPES:
        raise RecipeError(_unknown_recipe_message(name))
    spec = SPECS[name]
    chosen = spec.formats[0] if format is None else format
    if chosen not in FORMATS:
        raise RecipeError(
            f"recipe {name!r}: format={chosen!r} does not exist; use 'e4m3' (for all) or 'hybrid' (E5M2 for dy)."
        )
    if chosen not in spec.formats:
        others = ", ".join(recipe_specs.recipes_with_format(chosen))
        raise RecipeError(
            f"recipe {name!r} with format={chosen!r} cannot be: it scales each {max(spec.blocks[2])} values of dy, so "
            f"E5M2's range buys nothing and costs a digit. Use format={spec.formats[0]!r}, or another recipe "
            f"({others}) for {chosen}."
        )
    wanted = {"fwd": fwd, "dgrad": dgrad, "wgrad": wgrad}
    for gemm, precision in wanted.items():
        if precision not in PRECISIONS:
            raise RecipeError(
                f"recipe {name!r}: {gemm}={precision!r} is not a precision; use 'fp8' or 'bf16', or the recipe whose "
                f"casts it has ({', '.join(CURRENT_SCALING)})."
            )
        if spec.delayed and precision in CURRENT_SCALING:
            raise RecipeError(
                f"recipe {name!r}: {gemm}={precision!r} cannot be: the histories of a layer serve all of its GEMMs. "
                "Use 'fp8' or 'bf16'."
            )
    if set(wanted.values()) == {"bf16"}:
        raise RecipeError(
            f"recipe {name!r} with fwd, dgrad and wgrad all 'bf16' leaves nothing in FP8; keep one of them 'fp8', or "
            "leave the layer out of the plan (recipe: off)."
        )
    # hybrid: gradients need E5M2's range; x and w need E4M3's precision.
    dy_format = "e5m2" if chosen == "hybrid" else "e4m3"
    formats = ("e4m3", "e4m3", dy_format, "e4m3", dy_format, "e4m3")
    casts = [CastSpec(f, block, spec.scale) for f, block in zip(formats, spec.blocks, strict=True)]
    gemms: dict[str, Gemm | None] = {g: Gemm(casts[2 * i], casts[2 * i + 1]) for i, g in enumerate(GEMMS)}
    for gemm, word in wanted.items():
        if word not in ("fp8", name):
            gemms[gemm] = None if word == "bf16" else recipe(word).gemm(gemm)
    return Recipe(name, chosen, gemms["fwd"], gemms["dgrad"], gemms["wgrad"], Delayed() if spec.delayed else None)


@lru_cache(maxsize=1024)
def _gemm_precisions(of: Recipe) -> dict[str, str]:
    plain, words = recipe(of.name, of.format) if of.name in RECIPES else None, {}
    for name in GEMMS:
        casts = of.gemm(name)
        if casts is None:
            words[name] = "bf16"
        elif plain is None or plain.gemm(name) == casts:
            words[name] = "fp8"
        else:
            words[name] = next((other for other in CURRENT_SCALING if recipe(other).gemm(name) == casts), "fp8")
    return words


def _unknown_recipe_message(name: object) -> str:
    if name == "off":
        return "'off' is the absence of a recipe: leave the layer out of the plan, or use torch.nn.functional.linear."
    near = difflib.get_close_matches(str(name), RECIPES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"recipe {name!r} does not exist.{hint} There are: {', '.join(RECIPES)}."
