"""Recipes: the casts of the three GEMMs of a linear layer.

With x (M tokens x K), w (N x K), dy (M x N)::

    fwd    y  = x @ w.T      contracts K
    dgrad  dx = dy @ w       contracts N
    wgrad  dw = dy.T @ x     contracts M

A recipe has a :class:`CastSpec` for each operand of each GEMM, or keeps a GEMM in high precision (``None``). If two
GEMMs use the same cast of the same tensor, its codes are computed once.

:data:`octavo.base.recipe_specs.SPECS` defines the recipes; ``docs/numerics.md`` explains them.

A GEMM may use the casts of another recipe, in the format of that recipe: ``recipe("tensorwise", wgrad="blockwise")``.
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
"""The names of recipes, for :func:`recipe`."""

GEMMS = ("fwd", "dgrad", "wgrad")
PRECISIONS = ("fp8", "bf16", *CURRENT_SCALING)
"""The precisions of a GEMM in a recipe."""


class RecipeError(Fp8Error, ValueError):
    """An unknown or invalid recipe; the message has the fix."""


@dataclass(frozen=True)
class Gemm:
    """The casts of one GEMM's two operands. fwd: a = x, b = w; dgrad: a = dy, b = w; wgrad: a = dy, b = x."""

    a: CastSpec
    b: CastSpec


@dataclass(frozen=True)
class Delayed:
    """Delayed scaling: x and dy take their scale from the largest amax of the last ``length`` recorded ones.

    A cast then needs no preceding pass over the tensor, but values that exceed the history saturate. The history is
    state and belongs in the checkpoint. Weights still use current scaling: they are cast once per optimizer step and
    reused by every micro-step, so that an additional pass costs little, and their scale is exact.
    """

    length: int = 16

    def __post_init__(self) -> None:
        if type(self.length) is not int or self.length < 1:
            raise RecipeError(f"Delayed: length={self.length!r} must be an integer of at least 1 (default 16).")


@dataclass(frozen=True)
class Recipe:
    """The casts of the three GEMMs; ``None`` keeps that GEMM in high precision (BF16, or the input's dtype).

    ``delayed`` is None for current scaling. Recipes are immutable values: they can be compared and used as keys.
    """

    name: str
    format: str
    fwd: Gemm | None
    dgrad: Gemm | None
    wgrad: Gemm | None
    delayed: Delayed | None = None

    def __post_init__(self) -> None:
        rows, cols = (1, 1) if self.dgrad is None else self.dgrad.a.block
        if rows > 1 and cols > 1:
            raise RecipeError(
                f"recipe {self.name!r}: dy of dgrad has blocks of {rows}x{cols}. In such a block a token with small "
                "gradients next to one with large gradients loses all of them: the error of its dx is 1.00. Use blocks "
                f"of one token, (1, {cols}); wgrad may have blocks of several tokens."
            )

    def gemm(self, name: str) -> Gemm | None:
        """Return the casts of ``"fwd"``, ``"dgrad"`` or ``"wgrad"``."""
        return {"fwd": self.fwd, "dgrad": self.dgrad, "wgrad": self.wgrad}[name]

    def describe(self) -> str:
        """Return the recipe as three equations, one per line, with the cast of each operand (see :class:`CastSpec`)."""
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
        """Return the casts of the weight in fwd and dgrad. Each one takes a byte per parameter for its codes."""
        return tuple(dict.fromkeys(gemm.b for gemm in (self.fwd, self.dgrad) if gemm is not None))

    def gemm_precisions(self) -> dict[str, str]:
        """Return the precision of each GEMM: fp8 (the casts of this recipe), bf16, or the recipe of its casts."""
        return _gemm_precisions(self)

    def summary(self) -> str:
        """Return one line for ``extra_repr``: the name, the format, and GEMMs with other casts or in high precision."""
        return " ".join(
            [
                self.name,
                self.format,
                *(f"{g}={precision}" for g, precision in _gemm_precisions(self).items() if precision != "fp8"),
            ]
        )

    def __str__(self) -> str:
        return self.summary()


def recipe(name: str, format: str | None = None, fwd: str = "fp8", dgrad: str = "fp8", wgrad: str = "fp8") -> Recipe:
    """Return the recipe of that name.

    Args:
        name: one of :data:`RECIPES`.
        format: ``"e4m3"`` or ``"hybrid"``; by default the preferred format of the recipe.
        fwd, dgrad, wgrad: ``"fp8"``, ``"bf16"`` to keep that GEMM in high precision, or the recipe of its casts.

    Raises:
        RecipeError: the name, the format or a precision does not exist, they cannot be combined, or no GEMM would run
            in FP8.
    """
    if name not in RECIPES:
        raise RecipeError(_unknown_recipe_message(name))
    spec = SPECS[name]
    chosen_format = spec.formats[0] if format is None else format
    if chosen_format not in FORMATS:
        raise RecipeError(
            f"recipe {name!r}: format={chosen_format!r} does not exist; use 'e4m3' (for all) or 'hybrid' (E5M2 for dy)."
        )
    if chosen_format not in spec.formats:
        alternatives = ", ".join(recipe_specs.recipes_with_format(chosen_format))
        raise RecipeError(
            f"recipe {name!r} does not support format={chosen_format!r}: it scales every {max(spec.blocks[2])} values "
            f"of dy, so the range of E5M2 gains nothing and costs a mantissa bit. Use format={spec.formats[0]!r}, or "
            f"another recipe ({alternatives}) for {chosen_format}."
        )
    precisions = {"fwd": fwd, "dgrad": dgrad, "wgrad": wgrad}
    for gemm, precision in precisions.items():
        if precision not in PRECISIONS:
            raise RecipeError(
                f"recipe {name!r}: {gemm}={precision!r} is not a precision; use 'fp8', 'bf16' or the recipe of its "
                f"casts ({', '.join(CURRENT_SCALING)})."
            )
        if spec.delayed and precision in CURRENT_SCALING:
            raise RecipeError(
                f"recipe {name!r} does not support {gemm}={precision!r}: all GEMMs of a layer share its histories. Use "
                "'fp8' or 'bf16'."
            )
    if set(precisions.values()) == {"bf16"}:
        raise RecipeError(
            f"recipe {name!r} with fwd, dgrad and wgrad all 'bf16' leaves nothing in FP8; keep one of them 'fp8', or "
            "leave the layer out of the plan (recipe: off)."
        )
    # hybrid: gradients need E5M2's range; x and w need E4M3's precision.
    dy_format = "e5m2" if chosen_format == "hybrid" else "e4m3"
    formats = ("e4m3", "e4m3", dy_format, "e4m3", dy_format, "e4m3")
    casts = [CastSpec(f, block, spec.scale) for f, block in zip(formats, spec.blocks, strict=True)]
    gemms: dict[str, Gemm | None] = {g: Gemm(casts[2 * i], casts[2 * i + 1]) for i, g in enumerate(GEMMS)}
    for gemm, precision in precisions.items():
        if precision not in ("fp8", name):
            gemms[gemm] = None if precision == "bf16" else recipe(precision).gemm(gemm)
    return Recipe(
        name, chosen_format, gemms["fwd"], gemms["dgrad"], gemms["wgrad"], Delayed() if spec.delayed else None
    )


@lru_cache(maxsize=1024)
def _gemm_precisions(r: Recipe) -> dict[str, str]:
    plain = recipe(r.name, r.format) if r.name in RECIPES else None
    precisions = {}
    for gemm in GEMMS:
        casts = r.gemm(gemm)
        if casts is None:
            precisions[gemm] = "bf16"
        elif plain is None or plain.gemm(gemm) == casts:
            precisions[gemm] = "fp8"
        else:
            precisions[gemm] = next((name for name in CURRENT_SCALING if recipe(name).gemm(gemm) == casts), "fp8")
    return precisions


def _unknown_recipe_message(name: object) -> str:
    if name == "off":
        return "'off' is the absence of a recipe: leave the layer out of the plan, or use torch.nn.functional.linear."
    near = difflib.get_close_matches(str(name), RECIPES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"recipe {name!r} does not exist.{hint} There are: {', '.join(RECIPES)}."
