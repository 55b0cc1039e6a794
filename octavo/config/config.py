"""``Config``: all sections of a run (:mod:`octavo.config.sections.all_sections`), checked by the rules (``rules``)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationInfo, model_validator

from octavo.base.recipe_specs import DEFAULT_RECIPE
from octavo.config.rules.general import check
from octavo.config.sections.all_sections import Sections
from octavo.config.sections.model import for_foundation
from octavo.config.sections.names import COMPONENTS, FROZEN, frozen_word


class Config(Sections):
    """The complete configuration of a training run: :func:`octavo.config.load_config` returns it, and a run's
    ``config.yaml`` contains it."""

    @model_validator(mode="before")
    @classmethod
    def _fill_recipes(cls, data: Any) -> Any:
        return with_recipes(data)

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Config:
        # The loader checks the rules itself, to report lines. For a Config built in Python they are checked here.
        if not (info.context and info.context.get("rules") == "later"):
            findings = [f"{'.'.join(map(str, f.path))}: {f.reason}; {f.fix}" for f in check(self)]
            if findings:
                raise ValueError("\n".join(findings))
        return self


def with_recipes(data: Any) -> Any:
    """Return the raw configuration with the recipes that follow from its other settings.

    A component that `model.load_in_fp8` names takes the recipe that multiplies by such codes, unless it has a recipe.
    If `fp8.recipe` is absent, only the components that are named (other than `off`) run in FP8; if none is named, the
    whole model does, in the recipe of the language model's codes or else in `blockwise`. With a plan file or `recipe:
    off` nothing is added. Malformed values are left to validation.
    """
    fp8 = _raw(data.get("fp8", {})) if isinstance(data, dict) else None
    if not isinstance(fp8, dict) or fp8.get("plan") is not None or fp8.get("recipe") == "off":
        return data
    sections = {name: _raw(fp8.get(name)) for name in COMPONENTS}
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
    model = _raw(data.get("model"))
    kinds = _raw(for_foundation(model.get("load_in_fp8"))) if isinstance(model, dict) else None
    words = {name: frozen_word(kind) for name, kind in kinds.items()} if isinstance(kinds, dict) else {}
    return {name: word for name, word in words.items() if isinstance(word, str) and word in FROZEN}


def _raw(value: Any) -> Any:
    """Return a section that was built in Python as a mapping of its explicitly set fields; other values unchanged."""
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
