"""``Config``: all sections of a run (:mod:`octavo.config.sections`) with the rules over them kept (``rules``)."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ValidationInfo, model_validator

from octavo.config.rules import check
from octavo.config.sections import COMPONENTS, FrozenName, Sections, for_foundation, one_word


class Config(Sections):
    """One training run, whole: what :func:`octavo.config.load_config` returns and ``config.yaml`` in a run holds."""

    @model_validator(mode="before")
    @classmethod
    def _follow_the_kind(cls, data: Any) -> Any:
        return with_recipes(data)

    @model_validator(mode="after")
    def _obeys_the_rules(self, info: ValidationInfo) -> Config:
        # the loader checks the rules itself, to name the lines; whoever builds a Config in Python sees them here
        if not (info.context and info.context.get("rules") == "later"):
            findings = [f"{'.'.join(map(str, f.path))}: {f.found}; {f.fix}" for f in check(self)]
            if findings:
                raise ValueError("\n".join(findings))
        return self


def with_recipes(data: Any) -> Any:
    """The raw configuration with the recipe that `model.load_in_fp8` implies, where nobody names one.

    The kind of the language model's codes gives `fp8.recipe`, that of any other component its own. Where a plan file
    decides, or somebody named `recipe: off` for all, nothing is added. What is malformed is left to validation.
    """
    model = _raw(data.get("model")) if isinstance(data, dict) else None
    if not isinstance(model, dict):
        return data
    kinds = _raw(for_foundation(model.get("load_in_fp8")))
    fp8 = _raw(data.get("fp8", {}))
    if not isinstance(kinds, dict) or not isinstance(fp8, dict) or fp8.get("plan") is not None:
        return data
    added = dict(fp8)
    for name, asked in kinds.items():
        recipe, own = one_word(asked), _raw(fp8.get(name))
        if not isinstance(recipe, str) or recipe not in get_args(FrozenName):
            continue
        if name not in COMPONENTS or not isinstance(own, dict | None):
            continue
        if (own or {}).get("recipe") is not None or fp8.get("recipe") == "off":
            continue
        if name == "foundation":
            added.setdefault("recipe", recipe)
        else:
            added[name] = {**(own or {}), "recipe": recipe}
    return {**data, "fp8": added} if added != fp8 else data


def _raw(value: Any) -> Any:
    """A section that was built in Python as the mapping of what was named in it."""
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
