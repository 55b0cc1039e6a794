"""Recipes: the casts of the three GEMMs of a linear layer.

With x (M tokens x K), w (N x K), dy (M x N)::

    fwd    y  = x @ w.T      contracts K
    dgrad  dx = dy @ w       contracts N
    wgrad  dw = dy.T @ x     contracts M

A recipe gives every operand of every GEMM a :class:`CastSpec`, or keeps a whole GEMM in high precision (``None``).
Where two GEMMs name the same cast of the same tensor, its codes are made once and used twice.

========== ===================== ======================= ======================== ===== ==========================
recipe     fwd: x, w             dgrad: dy, w            wgrad: dy, x             scale why
========== ===================== ======================= ======================== ===== ==========================
tensorwise tensor, tensor        tensor, same            same, same               fp32  fewest scales, fastest
rowwise    row, row              row, column             column, column           pow2  outliers stay in their row
blockwise  1x128, 128x128        1x128, same             128x1, 128x1             pow2  the default; DeepSeek-V3's
mxfp8      1x32, 1x32            1x32, 32x1              32x1, 32x1               e8m0  OCP MX, along each contraction
delayed    tensor, tensor        tensor, same            same, same               fp32  no wait for an amax
========== ===================== ======================= ======================== ===== ==========================

``format="e4m3"`` uses E4M3 throughout, ``"hybrid"`` E5M2 for dy (more range, fewer digits). dy is never scaled in
2-D blocks: that diverged in large trainings.

A GEMM may have the casts of another recipe, in that recipe's own format: ``recipe("tensorwise", wgrad="blockwise")``.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import lru_cache

from octavo.fp8.arithmetic.cast import CastSpec

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed")
"""The names that :func:`recipe` knows."""

GEMMS = ("fwd", "dgrad", "wgrad")
LENT = ("tensorwise", "rowwise", "blockwise", "mxfp8")
"""Recipes whose casts a GEMM of another one may have. The histories of ``delayed`` are of a whole layer."""
PRECISIONS = ("fp8", "bf16", *LENT)
"""What a recipe may say of one of its GEMMs."""
_FORMATS = ("e4m3", "hybrid")
_DEFAULT_FORMAT = {name: "hybrid" if name in ("tensorwise", "delayed") else "e4m3" for name in RECIPES}
_SCALE = {"tensorwise": "fp32", "rowwise": "pow2", "blockwise": "pow2", "mxfp8": "e8m0", "delayed": "fp32"}

# Blocks of the six operands: fwd x, fwd w, dgrad dy, dgrad w, wgrad dy, wgrad x.
_TENSOR, _ROW, _COLUMN = (-1, -1), (1, -1), (-1, 1)
_BLOCKS: dict[str, tuple[tuple[int, int], ...]] = {
    "tensorwise": (_TENSOR, _TENSOR, _TENSOR, _TENSOR, _TENSOR, _TENSOR),
    "rowwise": (_ROW, _ROW, _ROW, _COLUMN, _COLUMN, _COLUMN),
    "blockwise": ((1, 128), (128, 128), (1, 128), (128, 128), (128, 1), (128, 1)),
    "mxfp8": ((1, 32), (1, 32), (1, 32), (32, 1), (32, 1), (32, 1)),
    "delayed": (_TENSOR, _TENSOR, _TENSOR, _TENSOR, _TENSOR, _TENSOR),
}


class RecipeError(ValueError):
    """A recipe that does not exist or cannot be: the message names the fix."""


@dataclass(frozen=True)
class Gemm:
    """The casts of one GEMM's two operands. fwd: a = x, b = w; dgrad: a = dy, b = w; wgrad: a = dy, b = x."""

    a: CastSpec
    b: CastSpec


@dataclass(frozen=True)
class Delayed:
    """Delayed scaling: x and dy take their scale from the largest amax of the last ``length`` recorded ones.

    A cast then needs no pass over the tensor before it can start; values that outgrow the history saturate. The history
    is state: it belongs into the checkpoint. Weights use current scaling all the same: they are cast once per
    optimizer step and reused by every micro-step, so there is no pass worth saving, and their scale is then exact.
    """

    length: int = 16

    def __post_init__(self) -> None:
        if type(self.length) is not int or self.length < 1:
            raise RecipeError(f"Delayed: length={self.length!r} must be an integer of at least 1 (16 is usual).")


@dataclass(frozen=True)
class Recipe:
    """The casts of the three GEMMs; ``None`` keeps that GEMM in high precision (BF16, or the input's dtype).

    ``delayed`` is None for current scaling. Recipes are values: equal fields, equal recipe; usable as a key.
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
        """The recipe as three equations, one a line, each operand with its cast (see :class:`CastSpec`)."""
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

    def words(self) -> dict[str, str]:
        """What it says of each GEMM: fp8 (its own casts), bf16, or the recipe whose casts that GEMM has."""
        return _words(self)

    def short(self) -> str:
        """One line for ``extra_repr``: name, format, and the GEMMs with other casts or in high precision."""
        return " ".join([self.name, self.format, *(f"{g}={word}" for g, word in _words(self).items() if word != "fp8")])

    def __str__(self) -> str:
        return self.short()


def recipe(name: str, format: str | None = None, fwd: str = "fp8", dgrad: str = "fp8", wgrad: str = "fp8") -> Recipe:
    """The recipe of that name.

    Args:
        name: one of :data:`RECIPES`.
        format: ``"e4m3"`` or ``"hybrid"``; None: hybrid for tensorwise and delayed, e4m3 for the others.
        fwd, dgrad, wgrad: ``"fp8"``, ``"bf16"`` to keep that GEMM in high precision, or a recipe whose casts it has.

    Raises RecipeError for an unknown name, format or precision, a pair that cannot be, and no GEMM left in FP8.
    """
    if name not in RECIPES:
        raise RecipeError(_unknown(name))
    chosen = _DEFAULT_FORMAT[name] if format is None else format
    if chosen not in _FORMATS:
        raise RecipeError(
            f"recipe {name!r}: format={chosen!r} does not exist; use 'e4m3' (for all) or 'hybrid' (E5M2 for dy)."
        )
    if name == "mxfp8" and chosen == "hybrid":
        raise RecipeError(
            "recipe 'mxfp8' with format='hybrid' cannot be: MXFP8 scales each 32 values of dy, so E5M2's range buys "
            "nothing and costs a digit. Use format='e4m3', or another recipe (tensorwise, delayed) for hybrid."
        )
    wanted = {"fwd": fwd, "dgrad": dgrad, "wgrad": wgrad}
    for gemm, precision in wanted.items():
        if precision not in PRECISIONS:
            raise RecipeError(
                f"recipe {name!r}: {gemm}={precision!r} is not a precision; use 'fp8' or 'bf16', or the recipe whose "
                f"casts it has ({', '.join(LENT)})."
            )
        if name == "delayed" and precision in LENT:
            raise RecipeError(
                f"recipe 'delayed': {gemm}={precision!r} cannot be: the histories of a layer serve all of its GEMMs. "
                "Use 'fp8' or 'bf16'."
            )
    if set(wanted.values()) == {"bf16"}:
        raise RecipeError(
            f"recipe {name!r} with fwd, dgrad and wgrad all 'bf16' leaves nothing in FP8; keep one of them 'fp8', or "
            "leave the layer out of the plan (recipe: off)."
        )
    dy_format = "e5m2" if chosen == "hybrid" else "e4m3"
    formats = ("e4m3", "e4m3", dy_format, "e4m3", dy_format, "e4m3")
    specs = [CastSpec(f, block, _SCALE[name]) for f, block in zip(formats, _BLOCKS[name], strict=True)]
    gemms: dict[str, Gemm | None] = {g: Gemm(specs[2 * i], specs[2 * i + 1]) for i, g in enumerate(GEMMS)}
    for gemm, word in wanted.items():
        if word not in ("fp8", name):
            gemms[gemm] = None if word == "bf16" else recipe(word).gemm(gemm)
    return Recipe(name, chosen, gemms["fwd"], gemms["dgrad"], gemms["wgrad"], Delayed() if name == "delayed" else None)


@lru_cache(maxsize=1024)
def _words(of: Recipe) -> dict[str, str]:
    plain, words = recipe(of.name, of.format) if of.name in RECIPES else None, {}
    for name in GEMMS:
        casts = of.gemm(name)
        if casts is None:
            words[name] = "bf16"
        elif plain is None or plain.gemm(name) == casts:
            words[name] = "fp8"
        else:
            words[name] = next((other for other in LENT if recipe(other).gemm(name) == casts), "fp8")
    return words


def _unknown(name: object) -> str:
    if name == "off":
        return "'off' is the absence of a recipe: leave the layer out of the plan, or use torch.nn.functional.linear."
    near = difflib.get_close_matches(str(name), RECIPES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"recipe {name!r} does not exist.{hint} There are: {', '.join(RECIPES)}."
