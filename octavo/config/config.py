"""``Config``: all sections of a run (:mod:`octavo.config.sections.all_sections`), checked by the rules (``rules``), and
the recipes and settings of a preset that follow from what is set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationInfo, model_validator

from octavo.base.recipe_specs import CURRENT_SCALING, DEFAULT_RECIPE
from octavo.config.rules import general
from octavo.config.rules.findings import Finding
from octavo.config.sections.all_sections import Sections
from octavo.config.sections.model import for_foundation
from octavo.config.sections.names import COMPONENTS, FROZEN, canonical_name, frozen_word, raw_section
from octavo.config.stages import check_stages, with_last_stage
from octavo.config.yaml.document import Path

#: preset -> the keys that it sets; the recipe of the head follows from the language model's. Logits stay in high
#: precision: in FP8 the head costs a pretrained model more than all of its layers (docs/studies.md)
PRESETS: Mapping[str, Mapping[Path, object]] = {
    "fast": {
        ("fp8", "fuse"): "on",
        ("fp8", "lm_head"): {"recipe": DEFAULT_RECIPE, "fwd": "bf16"},
        ("optimizer", "states"): "fp8",
        ("train", "compile"): True,
    }
}


class Config(Sections):
    """The complete configuration of a training run: :func:`octavo.config.load_config` returns it, and a run's
    ``config.yaml`` contains it."""

    @model_validator(mode="before")
    @classmethod
    def _fill_recipes(cls, data: Any) -> Any:
        data = with_preset(with_recipes(data))
        return with_last_stage(data) if _has_stages(data) else data

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Config:
        # The loader checks the rules itself, to report lines. For a Config built in Python they are checked here.
        if not (info.context and info.context.get("rules") == "later"):
            findings = [f"{'.'.join(map(str, f.path))}: {f.reason}; {f.fix}" for f in check_rules(self)]
            if findings:
                raise ValueError("\n".join(findings))
        return self


def check_rules(config: Sections) -> list[Finding]:
    """Return the findings of all rules that a configuration, or one of its stages, breaks."""
    return check_stages(config) if config.train.stages else general.check(config)


def _has_stages(data: object) -> bool:
    train = raw_section(data.get("train")) if isinstance(data, Mapping) else None
    return isinstance(train, Mapping) and bool(train.get("stages"))


def with_recipes(data: Any) -> Any:
    """Return the raw configuration with the recipes that follow from its other settings.

    A component that `model.load_in_fp8` names takes the recipe that multiplies by such codes, unless it has a recipe.
    If `fp8.recipe` is absent, only the components that are named (other than `off`) run in FP8; if none is named, the
    whole model does, in the recipe of the language model's codes or else in `blockwise`. With a plan file or `recipe:
    off` nothing is added. Malformed values are left to validation.
    """
    fp8 = raw_section(data.get("fp8", {})) if isinstance(data, dict) else None
    if not isinstance(fp8, dict) or fp8.get("plan") is not None or fp8.get("recipe") == "off":
        return data
    sections = {name: raw_section(fp8.get(name)) for name in COMPONENTS}
    parts: dict[str, dict] = {name: part or {} for name, part in sections.items() if isinstance(part, dict | None)}
    configured = [name for name in parts if sections[name] is not None and parts[name].get("recipe") != "off"]
    wanted = {name: recipe for name, recipe in _implied_recipes(data).items() if name in parts}
    added = dict(fp8)
    if "recipe" not in fp8 and configured:
        added["recipe"] = "off"
        wanted = {**dict.fromkeys(configured, DEFAULT_RECIPE), **wanted}
    elif "foundation" in wanted and parts["foundation"].get("recipe") is None:
        added.setdefault("recipe", wanted.pop("foundation"))
    for name, recipe in wanted.items():
        if parts[name].get("recipe") is None:
            added[name] = {**parts[name], "recipe": recipe}
    return {**data, "fp8": added} if added != fp8 else data


def whole_model_recipe(data: dict[str, Any]) -> Any:
    """Return the recipe of the whole model if FP8 is requested without a recipe."""
    return _implied_recipes(data).get("foundation", DEFAULT_RECIPE)


def _implied_recipes(data: dict[str, Any]) -> dict[str, str]:
    """Component -> the recipe that multiplies by the codes that it is loaded as."""
    model = raw_section(data.get("model"))
    kinds = raw_section(for_foundation(model.get("load_in_fp8"))) if isinstance(model, dict) else None
    words = {name: frozen_word(kind) for name, kind in kinds.items()} if isinstance(kinds, dict) else {}
    return {name: word for name, word in words.items() if isinstance(word, str) and word in FROZEN}


def missing_settings(data: object) -> dict[Path, object]:
    """Return the settings that the preset of a raw configuration adds to it: keys that it does not set.

    A model in high precision (`recipe: off`) or with a plan file gets no settings of ``fp8``. Unknown presets and
    malformed values add nothing; they are left to validation.
    """
    if not isinstance(data, dict) or not isinstance(name := data.get("preset"), str):
        return {}
    sections = {key: raw_section(data.get(key) or {}) for key in ("fp8", "optimizer", "train")}
    if not all(isinstance(section, dict) for section in sections.values()):
        return {}
    settings = dict(PRESETS.get(name, {}))
    recipe = _recipe_of_language_model(sections["fp8"])
    if recipe == "off" or sections["fp8"].get("plan") is not None:
        settings = {path: value for path, value in settings.items() if path[0] != "fp8"}
    elif recipe in CURRENT_SCALING and ("fp8", "lm_head") in settings:
        settings["fp8", "lm_head"] = {"recipe": recipe, "fwd": "bf16"}
    return {path: value for path, value in settings.items() if path[1] not in sections[str(path[0])]}


def with_preset(data: object) -> object:
    """Return the raw configuration with the settings of its preset (:func:`missing_settings`)."""
    settings = missing_settings(data)
    for (section, key), value in settings.items():
        assert isinstance(data, dict)
        data = {**data, section: {**raw_section(data.get(section) or {}), key: value}}
    return data


def _recipe_of_language_model(fp8: dict[str, Any]) -> object:
    part = raw_section(fp8.get("foundation"))
    named = part.get("recipe") if isinstance(part, dict) else None
    return canonical_name(named or fp8.get("recipe", DEFAULT_RECIPE))
