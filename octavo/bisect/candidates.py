"""The candidates that may break a run: each GEMM that its plan has in FP8, and each feature; and configurations with a
subset of them.

Candidates are ordered: GEMMs by component and layer in the order of the model, then features. Halving therefore
separates components first, then layers, then GEMMs. A run without candidates is high precision without savings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo import fp8
from octavo.base.recipe_specs import SPECS
from octavo.bisect.short_runs import BisectError
from octavo.config import Component, Config, Fp8Section, Rule
from octavo.config.sections.names import COMPONENTS, is_unsupported
from octavo.fp8.arithmetic import GEMMS
from octavo.fp8.planning import saved_recipes
from octavo.fp8.policy import matches, template
from octavo.report.trial.memory_savings import HEAD, Saving, change_section, enabled_savings
from octavo.train.setup import planning

REFERENCE = "reference"  # the backend that defines the arithmetic


@dataclass(frozen=True)
class Candidate:
    """A GEMM of a layer (``gemm`` is fwd, dgrad or wgrad) or, with an empty ``gemm``, a feature."""

    name: str
    gemm: str = ""
    component: str = ""
    flops: float = 0.0

    @property
    def words(self) -> str:
        return f"{self.gemm} of {self.name}" if self.gemm else self.name


@dataclass(frozen=True)
class Space:
    """The candidates of a configuration ``cfg``, with the layers and recipes of its plan."""

    cfg: Config
    gemms: tuple[Candidate, ...]
    features: tuple[Saving, ...]
    layers: tuple[str, ...]  # all linear layers, including those in high precision
    recipes: Mapping[str, str]  # layer -> recipe, of the layers in FP8

    @classmethod
    def of(cls, cfg: Config, plan: Mapping[str, Any], file: Path) -> Space:
        """Create the space of a configuration from the plan.json of a run of it, which ``file`` names. Recipes that a
        plan file or a measurement chose become rules, layer by layer. Raises BisectError if no rule has their casts."""
        rows = plan["rows"]
        recipes = {row["name"]: row["recipe"]["name"] for row in rows if row["recipe"]}
        if planning.has_open_recipes(cfg):
            lines = {line.match: casts for line, casts in saved_recipes(plan, file) if line.steps is None}
            cfg = _plan_to_rules(cfg, plan, lines)
            recipes = {rule.match: str(rule.recipe) for rule in cfg.fp8.rules}  # by the names of these casts now
        gemms = tuple(
            Candidate(row["name"], gemm, row["component"], float(row["flops"]))
            for row in rows
            if row["recipe"]
            for gemm in GEMMS
            if row["recipe"][gemm] != "bf16" and not (gemm == "wgrad" and row.get("frozen"))
        )
        used = {name for row in rows for name in (row.get("backend") or {}).values()}
        return cls(cfg, gemms, tuple(list_features(cfg, used)), tuple(row["name"] for row in rows), recipes)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return (*self.gemms, *(Candidate(switch.words) for switch in self.features))

    def with_only(self, on: Collection[Candidate]) -> Config:
        """Return the configuration with only these candidates on."""
        cfg = self.cfg
        names = {candidate.name for candidate in on if not candidate.gemm}
        for switch in self.features:
            if switch.words not in names:
                cfg = switch.off(cfg)
        off = [candidate for candidate in self.gemms if candidate not in set(on)]
        if len(off) == len(self.gemms):
            return cfg.model_copy(update={"fp8": Fp8Section(recipe="off")})
        return _with_rules(cfg, self.rules(off))

    def without(self, off: Collection[Candidate]) -> Config:
        return self.with_only([candidate for candidate in self.candidates if candidate not in set(off)])

    def in_recipe(self, layers: Collection[Candidate], recipe: str) -> Config:
        """Return the configuration with the layers of these GEMMs in another recipe and all candidates on."""
        names = dict.fromkeys(candidate.name for candidate in layers if candidate.gemm)
        form = SPECS[recipe].formats[0] if is_unsupported(recipe, self.cfg.fp8.format) else None
        rules = ((name, Rule(match=name, recipe=recipe, format=form)) for name in names)
        return _with_rules(self.cfg, self._merge_rules(dict(rules)))

    def has_recipe(self, layers: Collection[Candidate], recipe: str) -> bool:
        """Return whether any of these layers already has the recipe."""
        return any(self.recipes[candidate.name] == recipe for candidate in layers)

    def rules(self, off: Iterable[Candidate]) -> list[Rule]:
        """Return rules that keep these GEMMs in high precision while the other GEMMs of their layers stay in FP8."""
        out: dict[str, list[str]] = {}
        for candidate in off:
            out.setdefault(candidate.name, []).append(candidate.gemm)
        all_gemms = {name: {c.gemm for c in self.gemms if c.name == name} for name in out}
        return self._merge_rules(
            {name: _rule(name, gemms, set(gemms) == all_gemms[name]) for name, gemms in out.items()}
        )

    def _merge_rules(self, rules: Mapping[str, Rule]) -> list[Rule]:
        """Merge the rules of layers that differ only in their numbers into one glob, if the rules are equal."""
        out: dict[str, Rule] = {}
        for name, rule in rules.items():
            glob = template(name)
            matching = [other for other in self.layers if matches(glob, other)]
            settings = {k: v for k, v in rule if k != "match"}
            if all(
                other in rules and {k: v for k, v in rules[other] if k != "match"} == settings for other in matching
            ):
                out[glob] = rule.model_copy(update={"match": glob})
            else:
                out[name] = rule
        return list(out.values())


def _rule(name: str, gemms: Sequence[str], is_whole_layer: bool) -> Rule:
    return Rule.model_validate(
        {"match": name, **({"recipe": "off"} if is_whole_layer else dict.fromkeys(gemms, "bf16"))}
    )


def list_features(cfg: Config, backends: Collection[str]) -> list[Saving]:
    """Return the savings of a configuration, its other features, and the backends of its plan except the reference."""
    others = sorted(set(backends) - {REFERENCE})
    backend = [Saving(f"backend: {', '.join(others)}", change_section("fp8", backend=REFERENCE))] if others else []
    savings = [
        switch for switch in enabled_savings(cfg) if not switch.words.startswith(HEAD)
    ]  # GEMMs of the head are candidates
    return [*savings, *extra_features(cfg), *backend]


def extra_features(cfg: Config) -> list[Saving]:
    """Return the features of a configuration, except FP8 and savings, that change how a step is computed."""
    train, fp8 = cfg.train, cfg.fp8
    switchable = (
        (train.compile, "compile", change_section("train", compile=False)),
        (train.cuda_graphs, "cuda_graphs", change_section("train", cuda_graphs=False)),
        (train.gather == "bf16", "gather: bf16", change_section("train", gather="stored")),
        (train.exchange == "fp8", "exchange: fp8", change_section("train", exchange="stored")),
        (fp8.fuse == "on", "fuse", change_section("fp8", fuse="off")),
    )
    return [Saving(words, off) for on, words, off in switchable if on]


def _with_rules(cfg: Config, rules: Sequence[Rule]) -> Config:
    return change_section("fp8", rules=(*cfg.fp8.rules, *rules))(cfg) if rules else cfg


def _plan_to_rules(cfg: Config, plan: Mapping[str, Any], recipes: Mapping[str, fp8.Recipe]) -> Config:
    """Replace the plan file or measurement of a configuration by a rule for each layer and the plan's other
    settings. ``recipes``: glob -> recipe of the plan's lines."""
    rules = tuple(
        _rule_with_casts(row["name"], next(casts for glob, casts in recipes.items() if matches(glob, row["name"])))
        for row in plan["rows"]
        if row["recipe"]
    )
    settings = {name: plan.get(name) or {} for name in ("activations", "param")}
    parts = {
        name: Component(**options)
        for name in COMPONENTS
        if (options := {setting: by[name] for setting, by in settings.items() if name in by})
    }
    whole = {setting: by[""] for setting, by in settings.items() if "" in by}
    fuse = "on" if plan.get("fuse_blocks") else "off"
    plan_settings = {**parts, **whole, "weight_codes": plan.get("weight_codes") or "keep", "fuse": fuse}
    return cfg.model_copy(
        update={"fp8": Fp8Section(recipe="off", rules=rules, backend=cfg.fp8.backend, **plan_settings)}
    )


def _rule_with_casts(layer: str, casts: fp8.Recipe) -> Rule:
    """Return a rule by which a layer has these casts in this version. A plan file of another version may have them
    under another name. Raises BisectError if there is none: a rule cannot give single GEMMs other casts."""
    words = {gemm: "bf16" for gemm in GEMMS if casts.gemm(gemm) is None}
    names = [name for name in fp8.RECIPES if casts.format in SPECS[name].formats]
    for name in sorted(names, key=lambda name: name != casts.name):
        if replace(fp8.recipe(name, casts.format, **words), name=casts.name) == casts:
            return Rule.model_validate({"match": layer, "recipe": name, "format": casts.format, **words})
    raise BisectError(
        f"fp8.plan gives {layer} casts that no rule has: {casts}. Name recipes in the configuration instead of fp8.plan"
    )
