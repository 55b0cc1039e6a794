"""The candidates that may break a run: each GEMM that its plan has in FP8, and each feature; and runs with some of
them.

Candidates have one order: GEMMs by component and layer in the model's order, then features. So halving tests components
first, then layers, then GEMMs. A run without any candidate is high precision without savings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.base.recipe_specs import SPECS
from octavo.config import Component, Config, Fp8Section, Rule
from octavo.config.sections.names import COMPONENTS, is_unsupported
from octavo.fp8.arithmetic import GEMMS
from octavo.fp8.policy import matches, template
from octavo.report.trial.memory_savings import HEAD, Saving, change_section, enabled_savings
from octavo.train.setup import planning

REFERENCE = "reference"  # the backend that is the specification


@dataclass(frozen=True)
class Candidate:
    """A GEMM of a layer (``gemm`` is fwd, dgrad or wgrad) or, with an empty ``gemm``, a feature in its words."""

    name: str
    gemm: str = ""
    component: str = ""
    flops: float = 0.0

    @property
    def words(self) -> str:
        return f"{self.gemm} of {self.name}" if self.gemm else self.name


@dataclass(frozen=True)
class Space:
    """The candidates of a configuration ``cfg`` whose plan has these rows."""

    cfg: Config
    gemms: tuple[Candidate, ...]
    features: tuple[Saving, ...]
    layers: tuple[str, ...]  # all linear layers, those in high precision too
    recipes: Mapping[str, str]  # of those in FP8

    @classmethod
    def of(cls, cfg: Config, plan: Mapping[str, Any]) -> Space:
        """The space of a configuration and the plan.json of a run of it. Recipes that a plan file or a measurement
        chose become rules, layer by layer."""
        rows = plan["rows"]
        if planning.leaves_open(cfg):
            cfg = _by_rules(cfg, plan)
        gemms = tuple(
            Candidate(row["name"], gemm, row["component"], float(row["flops"]))
            for row in rows
            if row["recipe"]
            for gemm in GEMMS
            if row["recipe"][gemm] == "fp8" and not (gemm == "wgrad" and row.get("frozen"))
        )
        used = {name for row in rows for name in (row.get("backend") or {}).values()}
        recipes = {row["name"]: row["recipe"]["name"] for row in rows if row["recipe"]}
        return cls(cfg, gemms, tuple(features_of(cfg, used)), tuple(row["name"] for row in rows), recipes)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return (*self.gemms, *(Candidate(switch.words) for switch in self.features))

    def with_only(self, on: Collection[Candidate]) -> Config:
        """The configuration with these candidates on and all others off."""
        cfg = self.cfg
        names = {one.name for one in on if not one.gemm}
        for switch in self.features:
            if switch.words not in names:
                cfg = switch.off(cfg)
        off = [one for one in self.gemms if one not in set(on)]
        if len(off) == len(self.gemms):
            return cfg.model_copy(update={"fp8": Fp8Section(recipe="off")})
        return _with_rules(cfg, self.rules(off))

    def without(self, off: Collection[Candidate]) -> Config:
        return self.with_only([one for one in self.candidates if one not in set(off)])

    def in_recipe(self, layers: Collection[Candidate], recipe: str) -> Config:
        """The configuration with the layers of these GEMMs in another recipe and all candidates on."""
        names = dict.fromkeys(one.name for one in layers if one.gemm)
        form = SPECS[recipe].formats[0] if is_unsupported(recipe, self.cfg.fp8.format) else None
        rules = ((name, Rule(match=name, recipe=recipe, format=form)) for name in names)
        return _with_rules(self.cfg, self._folded(dict(rules)))

    def has_recipe(self, layers: Collection[Candidate], recipe: str) -> bool:
        """Whether any of these layers already has the recipe."""
        return any(self.recipes[one.name] == recipe for one in layers)

    def rules(self, off: Iterable[Candidate]) -> list[Rule]:
        """Rules that keep these GEMMs in high precision while the other GEMMs of their layers stay in FP8."""
        out: dict[str, list[str]] = {}
        for one in off:
            out.setdefault(one.name, []).append(one.gemm)
        have = {name: {one.gemm for one in self.gemms if one.name == name} for name in out}
        return self._folded({name: _rule(name, gone, set(gone) == have[name]) for name, gone in out.items()})

    def _folded(self, rules: Mapping[str, Rule]) -> list[Rule]:
        """The rules with one glob for all layers that differ only in their numbers, if their rules are the same."""
        out: dict[str, Rule] = {}
        for name, rule in rules.items():
            glob = template(name)
            alike = [other for other in self.layers if matches(glob, other)]
            same = {k: v for k, v in rule if k != "match"}
            if all(other in rules and {k: v for k, v in rules[other] if k != "match"} == same for other in alike):
                out[glob] = rule.model_copy(update={"match": glob})
            else:
                out[name] = rule
        return list(out.values())


def _rule(name: str, gone: Sequence[str], all_of_them: bool) -> Rule:
    return Rule.model_validate({"match": name, **({"recipe": "off"} if all_of_them else dict.fromkeys(gone, "bf16"))})


def features_of(cfg: Config, backends: Collection[str]) -> list[Saving]:
    """The savings of a configuration, its other features, and the backends of its plan other than the reference."""
    others = sorted(set(backends) - {REFERENCE})
    backend = [Saving(f"backend: {', '.join(others)}", change_section("fp8", backend=REFERENCE))] if others else []
    savings = [
        switch for switch in enabled_savings(cfg) if not switch.words.startswith(HEAD)
    ]  # its GEMMs are candidates
    return [*savings, *extras(cfg), *backend]


def extras(cfg: Config) -> list[Saving]:
    """The features of a configuration, other than FP8 and savings, that change how a step is computed."""
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


def _by_rules(cfg: Config, plan: Mapping[str, Any]) -> Config:
    """A configuration whose plan comes from a file or a measurement, with a rule for each layer instead, and the plan's
    other settings."""
    chosen = [row for row in plan["rows"] if row["recipe"]]
    rules = tuple(
        Rule.model_validate({"match": row["name"], "recipe": row["recipe"]["name"], "format": row["recipe"]["format"],
                             **{gemm: "bf16" for gemm in GEMMS if row["recipe"][gemm] == "bf16"}})
        for row in chosen
    )  # fmt: skip
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
