"""Recipes: the casts of the three GEMMs of a linear layer.

With x (M tokens x K), w (N x K), dy (M x N)::

    fwd    y  = x @ w.T      contracts K
    dgrad  dx = dy @ w       contracts N
    wgrad  dw = dy.T @ x     contracts M

A recipe has a :class:`CastSpec` for each operand of each GEMM, or keeps a GEMM in high precision (``None``). If two
GEMMs use the same cast of the same tensor, its codes are computed once.

:data:`octavo.base.recipe_specs.SPECS` defines the recipes; ``docs/numerics.md`` explains them.

A GEMM may use the casts of another recipe, in the format of that recipe: ``recipe("tensorwise", wgrad="blockwise")``.

A :class:`CastTable` has the casts of all names, for plans that outlive a change of :data:`SPECS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from octavo.base import recipe_specs
from octavo.base.recipe_specs import CURRENT_SCALING, FORMATS, SPECS
from octavo.base.wording import did_you_mean
from octavo.fp8.arithmetic.cast import CastError, CastSpec
from octavo.fp8.arithmetic.errors import Fp8Error, short_repr

RECIPES = recipe_specs.NAMES
"""The names of recipes, for :func:`recipe`."""

GEMMS = ("fwd", "dgrad", "wgrad")
LONGEST_HISTORY = 2**16
PRECISIONS = ("fp8", "bf16", *CURRENT_SCALING)
"""The precisions of a GEMM in a recipe."""


class RecipeError(Fp8Error, ValueError):
    """An unknown or invalid recipe; the message has the fix."""


@dataclass(frozen=True)
class Gemm:
    """The casts of one GEMM's two operands. fwd: a = x, b = w; dgrad: a = dy, b = w; wgrad: a = dy, b = x."""

    a: CastSpec
    b: CastSpec

    def __str__(self) -> str:
        return f"{self.a} @ {self.b}"


@dataclass(frozen=True)
class Delayed:
    """Delayed scaling: x and dy take their scale from the largest amax of the last ``length`` recorded ones.

    A cast then needs no preceding pass over the tensor, but values that exceed the history saturate. The history is
    state and belongs in the checkpoint. Weights still use current scaling: they are cast once per optimizer step and
    reused by every micro-step, so that an additional pass costs little, and their scale is exact.
    """

    length: int = 16

    def __post_init__(self) -> None:
        if type(self.length) is not int or not 1 <= self.length <= LONGEST_HISTORY:
            raise RecipeError(
                f"Delayed: length={self.length!r} must be an integer from 1 to {LONGEST_HISTORY:,} (default 16)."
            )


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
        if rows != 1 and (rows, cols) != (-1, -1):
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
        """Return the precision of each GEMM: fp8 (the casts of this recipe), bf16, the recipe of its casts, or the
        casts themselves where no recipe has them."""
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
        near = did_you_mean(chosen_format, FORMATS)
        raise RecipeError(
            f"recipe {name!r}: format={chosen_format!r} does not exist.{near} Use 'e4m3' (for all) or 'hybrid' (E5M2 "
            "for dy)."
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
    return find_precisions(r, recipe)


def find_precisions(r: Recipe, recipe_of: Callable[..., Recipe]) -> dict[str, str]:
    """Return the precision of each GEMM, as :meth:`Recipe.gemm_precisions` does, by the recipes of ``recipe_of``."""
    plain = recipe_of(r.name, r.format) if r.name in RECIPES else None
    precisions = {}
    for gemm in GEMMS:
        casts = r.gemm(gemm)
        if casts is None:
            precisions[gemm] = "bf16"
        elif plain is None or plain.gemm(gemm) == casts:
            precisions[gemm] = "fp8"
        else:
            # A name whose casts are the same in every version comes first: it says the same wherever it is read.
            names = sorted(CURRENT_SCALING, key=lambda name: recipe_of(name) != recipe(name))
            precisions[gemm] = next((name for name in names if recipe_of(name).gemm(gemm) == casts), str(casts))
    return precisions


def _unknown_recipe_message(name: object) -> str:
    if name == "off":
        return "'off' is the absence of a recipe: leave the layer out of the plan, or use torch.nn.functional.linear."
    return f"recipe {name!r} does not exist.{did_you_mean(name, RECIPES)} There are: {', '.join(RECIPES)}."


# --- the casts of a plan ----------------------------------------------------------------------------------------------

_OPERANDS = {"fwd": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


@dataclass(frozen=True)
class CastTable:
    """The casts that the names of recipes have in a plan.

    A later version may give a name other casts. Plans and runs must not change with it, so plan files and checkpoints
    have the casts of all names, as they were when the plan was made::

        "blockwise e4m3": {"fwd": "e4m3 1x128 pow2 @ e4m3 128x128 pow2", "dgrad": ..., "wgrad": ...}
        "delayed hybrid": {"fwd": ..., "dgrad": ..., "wgrad": ..., "history": 16}

    A GEMM has the casts of its operands a and b, as :class:`Gemm` does; ``history`` is the length of amax histories.
    Which GEMMs are in high precision or use the casts of another recipe follows from the words of a layer, so that one
    entry serves all of these combinations.

    Args:
        recipes: "NAME FORMAT" -> the recipe with FP8 in all GEMMs. Names that it lacks have the casts of this version.
            The first entry of a name has its default format.
    """

    recipes: Mapping[str, Recipe] = field(default_factory=dict)

    def recipe(
        self, name: str, format: str | None = None, fwd: str = "fp8", dgrad: str = "fp8", wgrad: str = "fp8"
    ) -> Recipe:
        """Return the recipe as :func:`octavo.fp8.recipe` does, with the casts of this table. Raises RecipeError."""
        default = next((r.format for r in self.recipes.values() if r.name == name), None)
        current = recipe(name, format or default, fwd, dgrad, wgrad)
        plain = self.recipes.get(f"{name} {current.format}")
        gemms = {gemm: current.gemm(gemm) for gemm in GEMMS}
        for gemm, word in zip(GEMMS, (fwd, dgrad, wgrad), strict=True):
            if word in SPECS and word != name:
                gemms[gemm] = self.recipe(word).gemm(gemm)
            elif word != "bf16" and plain is not None:
                gemms[gemm] = plain.gemm(gemm)
        delayed = current.delayed if plain is None else plain.delayed
        return Recipe(name, current.format, gemms["fwd"], gemms["dgrad"], gemms["wgrad"], delayed)

    def gemm_precisions(self, r: Recipe) -> dict[str, str]:
        """Return the precision of each GEMM by which :meth:`recipe` returns this recipe."""
        return find_precisions(r, self.recipe)

    def words(self, r: Recipe) -> tuple[str, ...]:
        """Return the arguments with which :meth:`recipe` returns this recipe."""
        return r.name, r.format, *self.gemm_precisions(r).values()

    def describe_changes(self, later: CastTable, used: Iterable[tuple[str, ...]]) -> list[str]:
        """Return a phrase for each recipe, given by its :meth:`words`, that has other casts in a ``later`` table."""
        phrases: dict[str, None] = {}
        for words in dict.fromkeys(used):
            if changes := list(_differences(self.recipe(*words), later.recipe(*words))):
                phrases[f"{words[0]} ({words[1]}): {', '.join(changes)}"] = None
        return list(phrases)

    def to_json(self) -> dict[str, dict[str, str | int]]:
        """Return the casts of all recipes, also of names that only this version has."""
        current = {f"{name} {form}": recipe(name, form) for name, spec in SPECS.items() for form in spec.formats}
        # Entries of this table come first, so that its names keep their default formats.
        return {key: _entry_to_json(r) for key, r in {**self.recipes, **current, **self.recipes}.items()}

    @classmethod
    def from_json(cls, table: object) -> CastTable:
        """Return the table of :meth:`to_json`. Names of recipes that this version lacks are allowed: only a layer that
        uses one is an error.

        Raises RecipeError, with the key, for a damaged table.
        """
        if not isinstance(table, Mapping):
            raise RecipeError(f"must map recipes to their casts, got {short_repr(table)}")
        return cls({key: _parse_entry(key, entry) for key, entry in table.items()})


def _differences(before: Recipe, now: Recipe) -> Iterator[str]:
    """Yield the operands whose casts differ, and a different amax history."""
    for gemm, names in _OPERANDS.items():
        old, new = before.gemm(gemm), now.gemm(gemm)
        if old is None or new is None:
            continue
        for name, old_cast, new_cast in zip(names, (old.a, old.b), (new.a, new.b), strict=True):
            if old_cast != new_cast:
                yield f"{gemm} {name} {old_cast} (now {new_cast})"
    if before.delayed != now.delayed:
        lengths = [0 if r.delayed is None else r.delayed.length for r in (before, now)]
        yield f"amax history of {lengths[0]} (now {lengths[1]})"


def _entry_to_json(r: Recipe) -> dict[str, str | int]:
    gemms = {name: gemm for name in GEMMS if (gemm := r.gemm(name)) is not None}
    entry: dict[str, str | int] = {name: str(gemm) for name, gemm in gemms.items()}
    return entry if r.delayed is None else {**entry, "history": r.delayed.length}


def _parse_entry(key: str, entry: object) -> Recipe:
    name, _, form = key.rpartition(" ")
    if not name or form not in FORMATS:
        raise RecipeError(f"{key!r} is not a recipe and a format, such as 'blockwise {FORMATS[0]}'")
    if not isinstance(entry, Mapping) or not set(GEMMS) <= entry.keys() <= {*GEMMS, "history"}:
        keys = short_repr(list(entry) if isinstance(entry, Mapping) else entry)
        raise RecipeError(f"{key!r} must have {', '.join(GEMMS)} and, with delayed scaling, history; got {keys}")
    if "history" in entry and name in SPECS and not SPECS[name].delayed:
        raise RecipeError(f"{key!r} has a history, which only delayed scaling has; remove it")
    try:
        fwd, dgrad, wgrad = (_parse_gemm(gemm, entry[gemm]) for gemm in GEMMS)
        return Recipe(name, form, fwd, dgrad, wgrad, Delayed(entry["history"]) if "history" in entry else None)
    except RecipeError as error:
        raise RecipeError(f"{key!r}: {error}") from None


def _parse_gemm(gemm: str, text: object) -> Gemm:
    parts = text.split(" @ ") if isinstance(text, str) else []
    if len(parts) != 2:
        raise RecipeError(f"{gemm} must have two casts, as in 'CAST @ CAST', got {short_repr(text)}")
    try:
        return Gemm(CastSpec.parse(parts[0]), CastSpec.parse(parts[1]))
    except CastError as error:
        raise RecipeError(f"{gemm}: {error}") from None
