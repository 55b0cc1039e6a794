"""The words of a configuration: recipes, formats, components, and what every section is.

A word that has two spellings is kept in one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict

Short = Literal["row", "block", "tensor"]


def one_word(value: Any) -> Any:
    """Weights that are codes and the recipe that multiplies by them have one name: ``block`` reads as ``blockwise``."""
    return f"{value}wise" if isinstance(value, str) and value in get_args(Short) else value


def frozen_word(value: Any) -> Any:
    """The kind of frozen weights: `true` is the usual one, rows, and `false` none."""
    return {True: "rowwise", False: None}[value] if isinstance(value, bool) else one_word(value)


RecipeName = Literal["off", "tensorwise", "rowwise", "blockwise", "mxfp8", "delayed", "auto"]
Format = Literal["e4m3", "hybrid"]
Gemm = Literal["fp8", "bf16"]
CandidateName = Literal["tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"]
FrozenName = Literal["rowwise", "blockwise", "tensorwise"]

Recipe = Annotated[RecipeName, BeforeValidator(one_word, json_schema_input_type=Literal[RecipeName, Short])]
Candidate = Annotated[CandidateName, BeforeValidator(one_word, json_schema_input_type=Literal[CandidateName, Short])]
Frozen = Annotated[
    FrozenName | None,
    BeforeValidator(frozen_word, json_schema_input_type=Literal[FrozenName, Short] | bool | None),
]

#: the recipes this version can run, `off` (plain high precision) first
RECIPES: tuple[str, ...] = ("off", "tensorwise", "rowwise", "blockwise", "mxfp8", "delayed")

#: the recipe of what runs in FP8 without saying in which
USUAL: RecipeName = "blockwise"

#: what `model.freeze` and the `fp8` section know by name
COMPONENTS: tuple[str, ...] = ("image_encoder", "image_projector", "audio_encoder", "audio_projector", "foundation")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


FROM_LIST = BeforeValidator(_as_tuple)


class Section(BaseModel):
    """Strict (no text where a number belongs), closed (no unknown key) and immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
