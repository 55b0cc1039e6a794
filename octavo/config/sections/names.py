"""The words of a configuration (recipes, formats, components) and the base class of its sections.

A word with two spellings is stored in one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from octavo.base.recipe_specs import CURRENT_SCALING, FORMATS, NAME_OF_KIND, NAMES, SPECS


def one_of(*words: str) -> Any:
    """Return the type of a setting that is one of these words."""
    return Literal[words]


def canonical_name(value: Any) -> Any:
    """Return the recipe's name for a kind of frozen weights: ``block`` becomes ``blockwise``. Other values are
    unchanged."""
    return NAME_OF_KIND.get(value, value) if isinstance(value, str) else value


def frozen_word(value: Any) -> Any:
    """Return the kind of frozen weights by name: `true` is the default, one scale per row, and `false` is None."""
    return {True: NAME_OF_KIND["row"], False: None}[value] if isinstance(value, bool) else canonical_name(value)


#: the recipes this version can run, `off` (plain high precision) first
RECIPES: tuple[str, ...] = ("off", *NAMES)

#: kinds of frozen FP8 weights, by the recipes that are named after them
FROZEN: tuple[str, ...] = tuple(NAME_OF_KIND.values())

if TYPE_CHECKING:  # a type checker cannot read a Literal that is built from a table
    Format = str
    RecipeName = str
    CandidateName = str
    HeadName = str
    FrozenName = str
else:
    Format = one_of(*FORMATS)
    RecipeName = one_of(*RECIPES, "auto")
    CandidateName = one_of(*NAMES)
    HeadName = one_of("off", *CURRENT_SCALING)
    FrozenName = one_of(*FROZEN)
Gemm = Literal["fp8", "bf16"]

Recipe = Annotated[
    RecipeName, BeforeValidator(canonical_name, json_schema_input_type=one_of(*RECIPES, "auto", *NAME_OF_KIND))
]
Candidate = Annotated[
    CandidateName, BeforeValidator(canonical_name, json_schema_input_type=one_of(*NAMES, *NAME_OF_KIND))
]
FROZEN_INPUT = one_of(*FROZEN, *NAME_OF_KIND) | bool
Frozen = Annotated[FrozenName | None, BeforeValidator(frozen_word, json_schema_input_type=FROZEN_INPUT | None)]


def is_unsupported(recipe: str | None, form: str | None) -> bool:
    """Return True if both a recipe and a format are set, and the recipe does not have the format."""
    return recipe is not None and recipe in SPECS and form is not None and form not in SPECS[recipe].formats


def is_delayed(recipe: str | None) -> bool:
    """Return True if a recipe is set whose scales come from amax histories."""
    return recipe is not None and recipe in SPECS and SPECS[recipe].delayed


#: the components that `model.freeze` and the `fp8` section can name
COMPONENTS: tuple[str, ...] = ("image_encoder", "image_projector", "audio_encoder", "audio_projector", "foundation")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


FROM_LIST = BeforeValidator(_as_tuple)


class Section(BaseModel):
    """Strict (no text where a number belongs), closed (no unknown key) and immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def raw_section(value: Any) -> Any:
    """Return a section that was built in Python as a mapping of its explicitly set fields; other values unchanged."""
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
