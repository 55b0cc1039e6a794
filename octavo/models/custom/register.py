"""Families that transformers does not ship and Octavo implements itself: registered, so that Auto classes build them.

Their code is written on the layout of the published folders: their `model_type`, their fields, their names of tensors.
Such folders name code of their authors (`auto_map`); with Octavo's in its place there is no need of it, and it is never
run. Once :mod:`octavo.models` is imported, `AutoModelForImageTextToText.from_pretrained(folder)` gives Octavo's class.

MPT is another case: transformers has a class of that `model_type`, which leaves out most of what such folders say. It
stays what `AutoConfig` gives; folders that Octavo opens get Octavo's configuration
(:func:`octavo.models.custom.mpt.read`), from which the same Auto classes build Octavo's model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octavo.models.custom import mpt, nvila, onevision


class Own(NamedTuple):
    """The classes of a family: its configuration, the model without output projection, the one that answers in text;
    and transformers' rules from names on disk to those in memory, made anew for each who asks."""

    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    writes: type[PreTrainedModel]
    renamings: Callable[[], list[Any]]


FAMILIES = {
    family.config.model_type: family
    for family in (
        Own(
            onevision.LLaVAOneVision1_5_Config,
            onevision.LLaVAOneVision1_5_Model,
            onevision.LLaVAOneVision1_5_ForConditionalGeneration,
            onevision.renamings,
        ),
        Own(nvila.NvilaConfig, nvila.NvilaModel, nvila.NVILAForConditionalGeneration, nvila.renamings),
        Own(nvila.NvilaLiteConfig, nvila.NvilaLiteModel, nvila.NVILALiteForConditionalGeneration, nvila.renamings),
    )
}


IN_PLACE = (mpt.MPTConfig.model_type,)
"""Those of transformers' own families in whose place Octavo's classes stand, for folders that Octavo opens."""


def needs_no_code(model_type: object) -> bool:
    """Whether folders of this `model_type` may name code (`auto_map`), because Octavo has its own in its place."""
    return model_type in IN_PLACE or is_own(model_type)


def is_own(model_type: object) -> bool:
    """Whether models of this `model_type` are built by Octavo's own classes."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    return family is not None and CONFIG_MAPPING[family.config.model_type] is family.config


def _register(family: Own) -> None:
    """A `model_type` that transformers, or another package, knows already stays theirs: `is_own` then says no."""
    kind = family.config.model_type
    if kind in CONFIG_MAPPING:
        return
    AutoConfig.register(kind, family.config)
    AutoModel.register(family.config, family.model)
    AutoModelForImageTextToText.register(family.config, family.writes)
    register_checkpoint_conversion_mapping(kind, family.renamings())


for _family in FAMILIES.values():
    _register(_family)

AutoModel.register(mpt.MPTConfig, mpt.MPTModel)
AutoModelForCausalLM.register(mpt.MPTConfig, mpt.MPTForCausalLM)
AutoModelForSequenceClassification.register(mpt.MPTConfig, mpt.MPTForSequenceClassification)
