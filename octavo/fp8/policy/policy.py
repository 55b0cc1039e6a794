"""Policies: recipes for the whole model, for components and for names. Narrower and later settings win.

A :class:`Policy` does not depend on a model; :func:`octavo.fp8.plan` applies it to one. At every level None inherits
the setting of the level above. The recipe ``"auto"`` chooses among ``candidates`` by measurements, or without
measurements by the table of :mod:`octavo.fp8.measuring.choose`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from octavo.base.recipe_specs import CANDIDATES, DEFAULT_RECIPE, FORMATS, SPECS
from octavo.base.wording import did_you_mean
from octavo.fp8.arithmetic.errors import Fp8Error
from octavo.fp8.arithmetic.recipe import GEMMS, PRECISIONS, RECIPES, CastTable, Recipe, RecipeError
from octavo.fp8.kernels import registry
from octavo.fp8.policy.globs import compile_glob

OFF, AUTO, HEAD = "off", "auto", "lm_head"
# Sources of decisions that keep a layer in high precision because nothing requests FP8 for it.
_HEAD_KEPT_HIGH, _KEPT_HIGH = f"{HEAD} stays unless asked", "stays: "
FUSE = (OFF, "on", AUTO)
ACTIVATIONS = ("bf16", "fp8")
WEIGHT_CODES = ("keep", "recast", "both")
_DELAYED = tuple(name for name, spec in SPECS.items() if spec.delayed)
_SETTINGS = ("recipe", "format", "fwd", "dgrad", "wgrad")


class PlanError(Fp8Error, ValueError):
    """A plan that cannot be made or applied. The message has the request, the cause and a fix."""


@dataclass(frozen=True)
class ComponentPolicy:
    """Settings of one component; None inherits from the whole model.

    ``recipe``: name of a recipe, "auto" or "off"; ``format``: e4m3 or hybrid; ``fwd``, ``dgrad``, ``wgrad``: fp8, bf16
    or the recipe whose casts the GEMM uses; ``activations``: bf16 or fp8; ``param``: whether its weights are FP8
    between steps. ``lm_head`` is off unless its recipe is set by name, and its weight is always kept in high precision.
    """

    recipe: str | None = None
    format: str | None = None
    fwd: str | None = None
    dgrad: str | None = None
    wgrad: str | None = None
    activations: str | None = None
    param: bool | None = None

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass(frozen=True)
class Rule:
    """Settings of the layers whose names match the glob ``match``, such as ``**.layers.0.**``.

    ``steps``: first and last step of the rule, counted from 1. It is ignored in other steps. None applies it always.
    """

    match: str
    recipe: str | None = None
    format: str | None = None
    fwd: str | None = None
    dgrad: str | None = None
    wgrad: str | None = None
    steps: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return _short_repr(self)

    @property
    def source(self) -> str:
        """Name of this rule in reasons."""
        return f"rule {self.match}"

    def applies_at(self, step: int | None) -> bool:
        """Return True if the rule applies in ``step``, or if ``step`` is None: if it applies in all steps."""
        return self.steps is None or (step is not None and self.steps[0] <= step <= self.steps[1])

    @property
    def title(self) -> str:
        """Name of this rule in errors."""
        return f"rule {self.match!r}"

    @property
    def why(self) -> str:
        """Remark that follows the source; lines of a plan file have one."""
        return ""

    @property
    def backends(self) -> tuple[tuple[str, str], ...]:
        """(GEMM, backend) pairs that the rule sets; only lines of a plan file do."""
        return ()

    def __post_init__(self) -> None:
        if not isinstance(self.match, str):
            raise PlanError(f"match must be a glob such as '**.layers.0.**', got {self.match!r}.")
        try:
            compile_glob(self.match)
        except ValueError as error:
            raise PlanError(f"Invalid rule: {error}.") from None
        if not any(getattr(self, f) is not None for f in _SETTINGS):
            raise PlanError(
                f"{self.title} has no effect: set one of {', '.join(_SETTINGS)} (recipe='off' keeps layers in high "
                "precision), or remove it."
            )
        if self.steps is not None:
            object.__setattr__(self, "steps", tuple(self.steps))
            if not _are_steps(self.steps):
                raise PlanError(
                    f"{self.title}: steps={self.steps!r} must be the first and the last step, counted from 1, as in "
                    "(1, 100)."
                )


def _are_steps(steps: Any) -> bool:
    whole = len(steps) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in steps)
    return whole and 1 <= steps[0] <= steps[1]


@dataclass(frozen=True)
class Policy:
    """Which layers run in FP8, and how.

    Args:
        recipe: recipe of all components, including projectors: one of ``fp8.RECIPES``; "auto" (the fastest by
            measurement, see :func:`octavo.fp8.plan`); or "off" (components and rules can still enable parts). None
            selects "blockwise", or, if any component has settings other than "off", only those components run in FP8.
        format: "e4m3", "hybrid", or None for the default of the recipe.
        fwd, dgrad, wgrad: "fp8", "bf16", or a recipe whose casts the GEMM uses.
        components: component name -> :class:`ComponentPolicy`, the name of a recipe, or a mapping with its fields.
        rules: :class:`Rule` objects, or mappings with their fields. Later rules override earlier ones.
        activations: how blocks save other tensors than inputs of FP8 layers for backward: "bf16" saves them unchanged,
            "fp8" saves FP8 codes where possible (:mod:`octavo.fp8.dense.sources`).
        weight_codes: "keep" keeps the FP8 codes of weights between optimizer steps (1 byte per parameter, or 2 if
            forward and dgrad use two casts); "recast" casts at each use; "both" keeps two layouts of codes that forward
            and dgrad share (2 bytes), so that the backward does not transpose them.
        param: whether weights of FP8 layers are FP8 between steps, with a master in high precision.
        backend: "auto", or the backend that must run every FP8 GEMM.
        candidates: the recipes that "auto" chooses from.
        fuse: "on" fuses gated MLPs, and norms with the FP8 layers after them, where possible; "off" fuses nothing.
            "auto" is accepted for version 0.4.0, which measured whether to run q, k and v as one GEMM, and means "off".
        casts: the casts of recipe names, from a plan file; by default the casts of this version.

    Raises:
        PlanError: for unknown names and unsupported combinations.
        BackendError: for an unknown backend.
    """

    recipe: str | None = None
    format: str | None = None
    fwd: str = "fp8"
    dgrad: str = "fp8"
    wgrad: str = "fp8"
    components: Mapping[str, ComponentPolicy] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    activations: str = "bf16"
    backend: str = "auto"
    candidates: tuple[str, ...] = CANDIDATES
    fuse: str = OFF
    weight_codes: str = "keep"
    param: bool = False
    casts: CastTable = field(default=CastTable(), repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.components, Mapping):
            raise PlanError(f"components must map component names to ComponentPolicy, got {self.components!r}.")
        parts = {k: _parse_level(ComponentPolicy, v, f"component {k!r}") for k, v in self.components.items()}
        if self.recipe is None:
            named = [k for k, part in parts.items() if k != HEAD and part.recipe != OFF]
            parts |= {k: replace(parts[k], recipe=parts[k].recipe or DEFAULT_RECIPE) for k in named}
            object.__setattr__(self, "recipe", OFF if named else DEFAULT_RECIPE)
        object.__setattr__(self, "components", parts)
        if isinstance(self.rules, str | Mapping | Rule) or not isinstance(self.rules, Iterable):
            raise PlanError(f"rules must be a sequence of Rule objects, got {self.rules!r}. Use a tuple.")
        head = parts.get(HEAD, ComponentPolicy())
        if head.recipe in (AUTO, *_DELAYED) or head.param or head.activations:
            raise PlanError(
                f"component {HEAD!r}: {_explicit_fields(head)} is not supported for a head. Name a recipe that scales "
                f"by the current amax ({', '.join(CANDIDATES)}), without param and activations."
            )
        rules = tuple(_parse_level(Rule, r, f"rule {i}") for i, r in enumerate(self.rules, 1))
        object.__setattr__(self, "rules", rules)
        for where, level in self._levels():
            if isinstance(level, Rule):
                continue
            if level.activations not in ACTIVATIONS and not (level.activations is None and level is not self):
                near = did_you_mean(level.activations, ACTIVATIONS)
                raise PlanError(
                    f"{where}: activations={level.activations!r} does not exist.{near} Use 'bf16' or 'fp8'."
                )
        if self.weight_codes not in WEIGHT_CODES:
            near = did_you_mean(self.weight_codes, WEIGHT_CODES)
            raise PlanError(f"weight_codes={self.weight_codes!r} does not exist.{near} Use 'keep', 'recast' or 'both'.")
        if self.fuse not in FUSE:
            raise PlanError(f"fuse={self.fuse!r} does not exist; use 'off' or 'on'.")
        if self.backend != "auto":
            registry.get(self.backend)  # raises for an unknown name, even if the recipe is off
        for where, level in self._levels():
            self._check_words(where, level)
        for where, name in self._recipes():
            if name not in (OFF, AUTO, *RECIPES):
                near = did_you_mean(name, (OFF, AUTO, *RECIPES))
                raise PlanError(f"{where}: recipe {name!r} does not exist.{near} Use one of {_recipe_names()}.")
        candidates = (self.candidates,) if isinstance(self.candidates, str) else tuple(self.candidates)
        unknown = [c for c in candidates if c not in RECIPES]
        if unknown or not candidates:
            names = ", ".join(map(repr, unknown)) or "none"
            near = did_you_mean(unknown[0], RECIPES) if unknown else ""
            raise PlanError(f"candidates of 'auto' must be recipes ({', '.join(RECIPES)}), got {names}.{near}")
        object.__setattr__(self, "candidates", tuple(dict.fromkeys(candidates)))

    def __repr__(self) -> str:
        return _short_repr(self)

    def _check_words(self, where: str, level: Policy | ComponentPolicy | Rule) -> None:
        """Raise PlanError for an invalid word, even if the level is off: it would otherwise fail when it is enabled."""
        words = (("format", FORMATS), *((gemm, PRECISIONS) for gemm in GEMMS))
        for name, allowed in words:
            value = getattr(level, name)
            optional = name == "format" or not isinstance(level, Policy)
            if value not in allowed and not (value is None and optional):
                choices = " or ".join(map(repr, allowed))
                raise PlanError(
                    f"{where}: {name}={value!r} does not exist.{did_you_mean(value, allowed)} Use {choices}."
                )
        if isinstance(level.recipe, Recipe):
            raise PlanError(
                f"{where}: recipe must be a name, got the Recipe object {level.recipe.name!r}. Use "
                f"recipe={level.recipe.name!r}, and set format, fwd, dgrad and wgrad separately."
            )
        if not isinstance(level.recipe, str | None):
            raise PlanError(f"{where}: recipe must be one of {_recipe_names()}, got {level.recipe!r}.")

    def _levels(self) -> list[tuple[str, Policy | ComponentPolicy | Rule]]:
        """Return the whole model, components and rules, each with its name in errors."""
        parts = ((f"component {k!r}", c) for k, c in self.components.items())
        return [("the whole model", self), *parts, *((r.title, r) for r in self.rules)]

    def _recipes(self) -> list[tuple[str, str]]:
        return [(where, level.recipe) for where, level in self._levels() if level.recipe is not None]

    def activations_of(self, component: str) -> str:
        """Return ``activations`` of a component: its own setting, or the setting of the whole model."""
        part = self.components.get(component)
        return self.activations if part is None or part.activations is None else part.activations

    def param_of(self, component: str) -> bool:
        """Return ``param`` of a component: its own setting, or the setting of the whole model."""
        part = self.components.get(component)
        if component == HEAD:  # the embedding may be the same tensor, and reads values
            return False
        return self.param if part is None or part.param is None else part.param

    def at(self, step: int | None) -> Policy:
        """Return the policy of one step, with only the rules that apply in it. None: a step outside of all spans."""
        if all(rule.steps is None for rule in self.rules):
            return self
        return replace(self, rules=tuple(replace(r, steps=None) for r in self.rules if r.applies_at(step)))

    def spans(self, steps: int) -> tuple[tuple[int, int], ...]:
        """Split the steps 1 to ``steps`` into spans (first, last) in which the same rules apply."""
        timed = [rule.steps for rule in self.rules if rule.steps is not None]
        edges = {1, steps + 1} | {edge for first, last in timed for edge in (first, last + 1) if edge <= steps}
        cuts = sorted(edges)
        return tuple((first, after - 1) for first, after in zip(cuts, cuts[1:], strict=False))

    @property
    def requests_fp8(self) -> bool:
        """True if any level names an FP8 recipe; "auto" accepts high precision."""
        return any(name not in (OFF, AUTO) for _, name in self._recipes())

    @property
    def requests_auto(self) -> bool:
        """True if any level has the recipe "auto"."""
        return any(name == AUTO for _, name in self._recipes())

    def to_json(self) -> dict[str, object]:
        plain = [f.name for f in fields(self) if f.name not in ("components", "rules", "candidates", "casts")]
        return {
            **{name: getattr(self, name) for name in plain},
            **({"candidates": list(self.candidates)} if self.requests_auto else {}),
            "components": {k: _explicit_fields(c) for k, c in self.components.items()},
            "rules": [_explicit_fields(r) for r in self.rules],
        }


@dataclass(frozen=True)
class Decision:
    """The resolved settings of a policy for one layer. ``source``: the level that set the recipe, and ``why`` its
    remark; ``backends``: the (GEMM, backend) pairs of the last rule."""

    recipe: str
    format: str | None
    fwd: str
    dgrad: str
    wgrad: str
    source: str
    why: str = ""
    backends: tuple[tuple[str, str], ...] = ()

    def overlay(self, level: ComponentPolicy | Rule, source: str) -> Decision:
        """Return this decision with the settings of ``level`` applied."""
        settings: dict[str, Any] = {f: getattr(level, f) for f in _SETTINGS if getattr(level, f) is not None}
        if isinstance(level, Rule):
            settings |= {"why": level.why, "backends": level.backends}
        return replace(self, **settings, source=source) if settings else self

    def reason(self, word: str = "") -> str:
        """Return the source, followed by ``word`` and the remark."""
        return f"{self.source}{word}" + (f" ({self.why})" if self.why else "")

    @property
    def kept_high(self) -> bool:
        """True if the layer stays in high precision because nothing requests FP8 for it."""
        return self.source == _HEAD_KEPT_HIGH or self.source.startswith(_KEPT_HIGH)

    def allowed_recipes(self, policy: Policy) -> dict[str, Recipe]:
        """Return the allowed recipes by name: none if off; for auto the policy's candidates that are compatible with
        the other settings; else one. Raises PlanError if no recipe is compatible."""
        out: dict[str, Recipe] = {}
        errors: list[str] = []
        for name in policy.candidates if self.recipe == AUTO else () if self.recipe == OFF else (self.recipe,):
            try:
                out[name] = policy.casts.recipe(name, self.format, self.fwd, self.dgrad, self.wgrad)
            except RecipeError as error:
                errors.append(str(error))
        if errors and not out:
            raise PlanError(f"{self.source}: {errors[0]}")
        return out


def decide(policy: Policy, component: str, rules: tuple[Rule, ...]) -> Decision:
    """Return the decision for a layer of ``component`` that matches ``rules``, in their order."""
    assert policy.recipe is not None  # set by __post_init__
    decision = Decision(policy.recipe, policy.format, policy.fwd, policy.dgrad, policy.wgrad, "the whole model")
    level = policy.components.get(component)
    if component == HEAD and (level is None or level.recipe is None):
        decision = replace(decision, recipe=OFF, source=_HEAD_KEPT_HIGH)
    on = [name for name, part in policy.components.items() if part.recipe not in (None, OFF)]
    if policy.recipe == OFF and on and component != HEAD:
        decision = replace(
            decision, source=f"{_KEPT_HIGH}{' and '.join(on)} alone {'is' if len(on) == 1 else 'are'} named"
        )
    if level is not None:
        decision = decision.overlay(level, f"component {component}" if level.recipe is not None else decision.source)
    for rule in rules:
        decision = decision.overlay(rule, rule.source)
    return decision


def _parse_level(kind: Any, value: Any, where: str) -> Any:
    """Return a level unchanged, or construct it from a mapping or, for a component, from the name of a recipe."""
    if isinstance(value, kind):
        return value
    if kind is ComponentPolicy and isinstance(value, str):
        return ComponentPolicy(recipe=value)
    if not isinstance(value, Mapping):
        raise PlanError(f"{where} must be a {kind.__name__} or a mapping with its fields, got {value!r}.")
    known = [f.name for f in fields(kind)]
    unknown = [k for k in value if k not in known]
    if unknown or (kind is Rule and "match" not in value):
        what = f"unknown fields {', '.join(map(repr, unknown))}" if unknown else "no 'match'"
        raise PlanError(f"{where} has {what}; the fields are {', '.join(known)}.")
    return kind(**value)


def _short_repr(level: Policy | ComponentPolicy | Rule) -> str:
    """Return the constructor call, without settings that have their default."""
    defaults = {
        f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(level) if f.repr
    }
    settings = {name: getattr(level, name) for name in defaults}
    shown = [f"{name}={value!r}" for name, value in settings.items() if value != defaults[name]]
    return f"{type(level).__name__}({', '.join(shown)})"


def _explicit_fields(level: ComponentPolicy | Rule) -> dict[str, Any]:
    known = fields(Rule if isinstance(level, Rule) else level)
    return {f.name: getattr(level, f.name) for f in known if getattr(level, f.name) is not None}


def _recipe_names() -> str:
    return ", ".join((OFF, *RECIPES, AUTO))
