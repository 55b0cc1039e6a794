"""The request: a recipe for the whole model, for components and for names; the later and narrower setting wins.

A :class:`Policy` knows no model; :func:`octavo.fp8.planning.decide` applies it to one. At every level None means "as
above". The recipe ``"auto"`` leaves the choice among ``candidates`` to measurements, or where there are none
to the table of :mod:`octavo.fp8.measuring.choose`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from octavo.base.recipe_specs import CANDIDATES, DEFAULT_RECIPE, FORMATS, SPECS
from octavo.fp8.arithmetic.errors import Fp8Error
from octavo.fp8.arithmetic.recipe import GEMMS, PRECISIONS, RECIPES, Recipe, RecipeError, recipe
from octavo.fp8.kernels import registry
from octavo.fp8.policy.globs import compile_glob

OFF, AUTO, HEAD = "off", "auto", "lm_head"
FUSE = (OFF, "on", AUTO)
ACTIVATIONS = ("bf16", "fp8")
WEIGHT_CODES = ("keep", "recast", "both")
_DELAYED = tuple(name for name, spec in SPECS.items() if spec.delayed)
_SETTINGS = ("recipe", "format", "fwd", "dgrad", "wgrad")


class PlanError(Fp8Error, ValueError):
    """A plan that cannot be made or cannot be applied: what was asked, what was found, and the fix."""


@dataclass(frozen=True)
class ComponentPolicy:
    """The settings of one component. ``recipe``: a recipe's name, "auto" or "off"; ``format``: e4m3 or hybrid; ``fwd``,
    ``dgrad``, ``wgrad``: fp8, bf16 or the recipe whose casts that GEMM has; ``activations``: bf16 or fp8; ``param``:
    whether its weights are FP8 between steps. None: as the whole model; but ``lm_head`` is off until its recipe is
    given by name, and keeps its weight in high precision."""

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
    """The settings of the layers whose names ``match`` (an anchored glob on dotted segments, as in
    ``**.layers.0.**``). ``steps``: the first and the last step in which it holds, counted from 1; outside of them it
    does not exist. None: it always holds."""

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
        """The name of this level in a reason."""
        return f"rule {self.match}"

    def holds(self, step: int | None) -> bool:
        """Whether it holds in a step; of None, a step outside of all spans, whether it always does."""
        return self.steps is None or (step is not None and self.steps[0] <= step <= self.steps[1])

    @property
    def title(self) -> str:
        """The name of this rule in errors."""
        return f"rule {self.match!r}"

    @property
    def why(self) -> str:
        """A remark, which follows the source; lines of a plan file have one."""
        return ""

    @property
    def backends(self) -> tuple[tuple[str, str], ...]:
        """(GEMM, backend) of those that it names; lines of a plan file do."""
        return ()

    def __post_init__(self) -> None:
        if not isinstance(self.match, str):
            raise PlanError(f"A rule matches names by a glob such as '**.layers.0.**'; found match={self.match!r}.")
        try:
            compile_glob(self.match)
        except ValueError as error:
            raise PlanError(f"A rule cannot be read: {error}.") from None
        if not any(getattr(self, f) is not None for f in _SETTINGS):
            raise PlanError(
                f"{self.title} says nothing: give it one of {', '.join(_SETTINGS)} (recipe='off' keeps layers "
                "in high precision), or take it out."
            )
        if self.steps is not None:
            object.__setattr__(self, "steps", tuple(self.steps))
            if not _are_steps(self.steps):
                raise PlanError(
                    f"{self.title}: steps={self.steps!r} are no steps; give the first and the last one, counted from "
                    "1, as in (1, 100)."
                )


def _are_steps(steps: Any) -> bool:
    whole = len(steps) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in steps)
    return whole and 1 <= steps[0] <= steps[1]


@dataclass(frozen=True)
class Policy:
    """Which layers run in FP8, and how.

    Args:
        recipe: of every component, the projector included: one of ``fp8.RECIPES``; "auto" (the fastest by measurement,
            see :func:`octavo.fp8.planning.decide`); or "off" (then components and rules may still switch parts on).
            None: "blockwise"; but where components are named (other than to be "off"), only those run in FP8, and all
            others are "off".
        format: "e4m3", "hybrid" or None for the recipe's default.
        fwd, dgrad, wgrad: "fp8", "bf16", or a recipe whose casts that GEMM has.
        components: component name -> :class:`ComponentPolicy` (or a recipe's name, or a mapping with its fields).
        rules: :class:`Rule` objects (or mappings with their fields); a later rule wins over an earlier one.
        activations: what blocks keep for backward besides the inputs of FP8 layers: "bf16", as they come; or "fp8",
            wherever FP8 can hold it (:mod:`octavo.fp8.dense.sources`).
        weight_codes: "keep" the FP8 codes of weights from one optimizer step to the next (a byte a parameter; two where
            forward and dgrad cast weights in two layouts), "recast" them at each use, or keep "both" layouts of those
            that forward and dgrad share (two bytes), so that no backward turns them.
        param: whether weights of FP8 layers are FP8 between steps, with their high-precision values as a master.
        backend: "auto", or the backend that must run every FP8 GEMM.
        candidates: the recipes that "auto" chooses among.
        fuse: "on" fuses gated MLPs and the norms before FP8 layers with those layers, wherever they can be; "off"
            nothing. "auto" is a word of version 0.4.0, which measured whether q, k and v pay as one GEMM; they are
            GEMMs of their own now, and "auto" is "off".

    Raises:
        PlanError: for names that do not exist and pairs that cannot be.
        BackendError: for a backend that does not exist.
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

    def __post_init__(self) -> None:
        if not isinstance(self.components, Mapping):
            raise PlanError(f"components maps a component's name to its ComponentPolicy; found {self.components!r}.")
        parts = {k: _parse_level(ComponentPolicy, v, f"component {k!r}") for k, v in self.components.items()}
        if self.recipe is None:
            named = [k for k, part in parts.items() if k != HEAD and part.recipe != OFF]
            parts |= {k: replace(parts[k], recipe=parts[k].recipe or DEFAULT_RECIPE) for k in named}
            object.__setattr__(self, "recipe", OFF if named else DEFAULT_RECIPE)
        object.__setattr__(self, "components", parts)
        if isinstance(self.rules, str | Mapping | Rule) or not isinstance(self.rules, Iterable):
            raise PlanError(f"rules is a sequence of Rule objects; found {self.rules!r}. Put it into a tuple.")
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
                raise PlanError(f"{where}: activations={level.activations!r} does not exist; use 'bf16' or 'fp8'.")
        if self.weight_codes not in WEIGHT_CODES:
            raise PlanError(f"weight_codes={self.weight_codes!r} does not exist; use 'keep', 'recast' or 'both'.")
        if self.fuse not in FUSE:
            raise PlanError(f"fuse={self.fuse!r} does not exist; use 'off' or 'on'.")
        if self.backend != "auto":
            registry.get(self.backend)  # off or not: a name that does not exist is an error here
        for where, level in self._levels():
            self._check_words(where, level)
        for where, name in self._recipes():
            if name not in (OFF, AUTO, *RECIPES):
                raise PlanError(f"{where}: recipe {name!r} does not exist; use one of {_recipe_names()}.")
        candidates = (self.candidates,) if isinstance(self.candidates, str) else tuple(self.candidates)
        unknown = [c for c in candidates if c not in RECIPES]
        if unknown or not candidates:
            listed = ", ".join(map(repr, unknown)) or "none"
            raise PlanError(f"candidates of 'auto' are recipes: {', '.join(RECIPES)}; found {listed}.")
        object.__setattr__(self, "candidates", tuple(dict.fromkeys(candidates)))

    def __repr__(self) -> str:
        return _short_repr(self)

    def _check_words(self, where: str, level: Policy | ComponentPolicy | Rule) -> None:
        """Check the words of a level, also if it is off: an invalid one would only fail once it is switched on."""
        words = (("format", FORMATS), *((gemm, PRECISIONS) for gemm in GEMMS))
        for name, allowed in words:
            value = getattr(level, name)
            optional = name == "format" or not isinstance(level, Policy)
            if value not in allowed and not (value is None and optional):
                raise PlanError(f"{where}: {name}={value!r} does not exist; use {' or '.join(map(repr, allowed))}.")
        if isinstance(level.recipe, Recipe):
            raise PlanError(
                f"{where}: recipe takes a name, found the Recipe object {level.recipe.name!r}. Write "
                f"recipe={level.recipe.name!r}, with format, fwd, dgrad and wgrad as further arguments."
            )
        if not isinstance(level.recipe, str | None):
            raise PlanError(f"{where}: recipe takes a name, one of {_recipe_names()}; found {level.recipe!r}.")

    def _levels(self) -> list[tuple[str, Policy | ComponentPolicy | Rule]]:
        """The whole model, components and rules, each with its name in errors."""
        parts = ((f"component {k!r}", c) for k, c in self.components.items())
        return [("the whole model", self), *parts, *((r.title, r) for r in self.rules)]

    def _recipes(self) -> list[tuple[str, str]]:
        return [(where, level.recipe) for where, level in self._levels() if level.recipe is not None]

    def activations_of(self, component: str) -> str:
        """What blocks of a component keep: the component's setting, else the one of the whole model."""
        part = self.components.get(component)
        return self.activations if part is None or part.activations is None else part.activations

    def param_of(self, component: str) -> bool:
        """Whether weights of a component are FP8 between steps: its own setting, else the one of the whole model."""
        part = self.components.get(component)
        if component == HEAD:  # the embedding may be the same tensor, and looks values up
            return False
        return self.param if part is None or part.param is None else part.param

    def at(self, step: int | None) -> Policy:
        """What is asked for in a step, in which only rules that hold exist; None: in one outside of all spans."""
        if all(rule.steps is None for rule in self.rules):
            return self
        return replace(self, rules=tuple(replace(r, steps=None) for r in self.rules if r.holds(step)))

    def spans(self, steps: int) -> tuple[tuple[int, int], ...]:
        """The steps 1 to ``steps`` in stretches (first, last) in each of which the same rules hold."""
        timed = [rule.steps for rule in self.rules if rule.steps is not None]
        edges = {1, steps + 1} | {edge for first, last in timed for edge in (first, last + 1) if edge <= steps}
        cuts = sorted(edges)
        return tuple((first, after - 1) for first, after in zip(cuts, cuts[1:], strict=False))

    @property
    def requests_fp8(self) -> bool:
        """True if any level asks for FP8 by a recipe's name; "auto" is content with high precision."""
        return any(name not in (OFF, AUTO) for _, name in self._recipes())

    @property
    def requests_auto(self) -> bool:
        """True if any level leaves the recipe to measurements."""
        return any(name == AUTO for _, name in self._recipes())

    def to_json(self) -> dict[str, object]:
        plain = [f.name for f in fields(self) if f.name not in ("components", "rules", "candidates")]
        return {
            **{name: getattr(self, name) for name in plain},
            **({"candidates": list(self.candidates)} if self.requests_auto else {}),
            "components": {k: _explicit_fields(c) for k, c in self.components.items()},
            "rules": [_explicit_fields(r) for r in self.rules],
        }


@dataclass(frozen=True)
class Decision:
    """The levels of a policy laid over each other for one layer; ``source`` names the level that chose the recipe, and
    ``why`` is its remark; ``backends`` holds (GEMM, backend) where the last rule names some."""

    recipe: str
    format: str | None
    fwd: str
    dgrad: str
    wgrad: str
    source: str
    why: str = ""
    backends: tuple[tuple[str, str], ...] = ()

    def overlay(self, level: ComponentPolicy | Rule, source: str) -> Decision:
        """This decision with what ``level`` asks put on top."""
        settings: dict[str, Any] = {f: getattr(level, f) for f in _SETTINGS if getattr(level, f) is not None}
        if isinstance(level, Rule):
            settings |= {"why": level.why, "backends": level.backends}
        return replace(self, **settings, source=source) if settings else self

    def reason(self, word: str = "") -> str:
        """Who decided, ``word``, and the remark."""
        return f"{self.source}{word}" + (f" ({self.why})" if self.why else "")

    def allowed(self, candidates: tuple[str, ...] = CANDIDATES) -> dict[str, Recipe]:
        """The recipes that this decision admits by name: none for off, ``candidates`` for auto (without those that the
        other settings exclude), else the one. Raises PlanError for a pair that cannot be."""
        out: dict[str, Recipe] = {}
        errors: list[str] = []
        for name in candidates if self.recipe == AUTO else () if self.recipe == OFF else (self.recipe,):
            try:
                out[name] = recipe(name, self.format, self.fwd, self.dgrad, self.wgrad)
            except RecipeError as error:
                errors.append(str(error))
        if errors and not out:
            raise PlanError(f"{self.source}: {errors[0]}")
        return out


def decide(policy: Policy, component: str, rules: tuple[Rule, ...]) -> Decision:
    """The decision for a layer of ``component`` that ``rules`` match (in their order)."""
    assert policy.recipe is not None  # settled when the policy was made
    decision = Decision(policy.recipe, policy.format, policy.fwd, policy.dgrad, policy.wgrad, "the whole model")
    level = policy.components.get(component)
    if component == HEAD and (level is None or level.recipe is None):
        decision = replace(decision, recipe=OFF, source=f"{HEAD} stays unless asked")
    on = [name for name, part in policy.components.items() if part.recipe not in (None, OFF)]
    if policy.recipe == OFF and on and component != HEAD:
        decision = replace(decision, source=f"stays: {' and '.join(on)} alone {'is' if len(on) == 1 else 'are'} named")
    if level is not None:
        decision = decision.overlay(level, f"component {component}" if level.recipe is not None else decision.source)
    for rule in rules:
        decision = decision.overlay(rule, rule.source)
    return decision


def _parse_level(kind: Any, value: Any, where: str) -> Any:
    """A level as it is, or made of the mapping or (for a component) the recipe's name that was given."""
    if isinstance(value, kind):
        return value
    if kind is ComponentPolicy and isinstance(value, str):
        return ComponentPolicy(recipe=value)
    if not isinstance(value, Mapping):
        raise PlanError(f"{where}: found {value!r} where a {kind.__name__} or a mapping with its fields belongs.")
    known = [f.name for f in fields(kind)]
    unknown = [k for k in value if k not in known]
    if unknown or (kind is Rule and "match" not in value):
        what = f"unknown fields {', '.join(map(repr, unknown))}" if unknown else "no 'match'"
        raise PlanError(f"{where} has {what}; the fields are {', '.join(known)}.")
    return kind(**value)


def _short_repr(level: Policy | ComponentPolicy | Rule) -> str:
    """The call that makes it, without the settings that are the defaults."""
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(level)}
    settings = {name: getattr(level, name) for name in defaults}
    shown = [f"{name}={value!r}" for name, value in settings.items() if value != defaults[name]]
    return f"{type(level).__name__}({', '.join(shown)})"


def _explicit_fields(level: ComponentPolicy | Rule) -> dict[str, Any]:
    known = fields(Rule if isinstance(level, Rule) else level)
    return {f.name: getattr(level, f.name) for f in known if getattr(level, f.name) is not None}


def _recipe_names() -> str:
    return ", ".join((OFF, *RECIPES, AUTO))
