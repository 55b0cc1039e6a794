"""Registers the families that Octavo implements because transformers does not have them, so that Auto classes build
them.

Their code follows the layout of the published folders: `model_type`, configuration fields and tensor names. Such
folders name Python code of their authors (`auto_map`), which Octavo's code replaces and never runs. After
:mod:`octavo.models` is imported, `AutoModelForImageTextToText.from_pretrained(folder)` returns Octavo's class.

MPT differs: transformers has a class for that `model_type`, which ignores most fields of such folders. `AutoConfig`
still returns that class; for folders that Octavo opens, :func:`octavo.models.custom.mpt.read` returns Octavo's
configuration, from which the same Auto classes build Octavo's model.
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

from octavo.models.custom import composed, mpt, nvila, onevision


class CustomFamily(NamedTuple):
    """The classes of a family: its configuration, the model without output projection, the generating model; and a
    function that returns new transformers rules from names on disk to names in memory."""

    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    generator: type[PreTrainedModel]
    renamings: Callable[[], list[Any]]


FAMILIES = {
    family.config.model_type: family
    for family in (
        CustomFamily(
            onevision.LLaVAOneVision1_5_Config,
            onevision.LLaVAOneVision1_5_Model,
            onevision.LLaVAOneVision1_5_ForConditionalGeneration,
            onevision.renamings,
        ),
        CustomFamily(
            composed.OctavoVlmConfig,
            composed.OctavoVlmModel,
            composed.OctavoVlmForConditionalGeneration,
            composed.renamings,
        ),
        CustomFamily(
            composed.OctavoLlavaConfig,
            composed.OctavoLlavaModel,
            composed.OctavoLlavaForConditionalGeneration,
            composed.renamings,
        ),
        CustomFamily(nvila.NvilaConfig, nvila.NvilaModel, nvila.NVILAForConditionalGeneration, nvila.renamings),
        CustomFamily(
            nvila.NvilaLiteConfig, nvila.NvilaLiteModel, nvila.NVILALiteForConditionalGeneration, nvila.renamings
        ),
    )
}


COMPOSED = (composed.OctavoVlmConfig.model_type, composed.OctavoLlavaConfig.model_type)
"""Families of models that `octavo compose` writes, for which no other program has a class."""
REPLACED_FAMILIES = (mpt.MPTConfig.model_type,)
"""Families of transformers for which Octavo uses its own classes when it opens a folder."""


def may_name_code(model_type: object) -> bool:
    """Return whether folders of this `model_type` may name code (`auto_map`), because Octavo implements the family."""
    return model_type in REPLACED_FAMILIES or is_custom(model_type)


def is_custom(model_type: object) -> bool:
    """Return whether models of this `model_type` are built by Octavo's classes."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    return family is not None and CONFIG_MAPPING[family.config.model_type] is family.config


def _register(family: CustomFamily) -> None:
    """Register a family, unless transformers or another package has registered its `model_type`: `is_custom` is then
    false."""
    kind = family.config.model_type
    if kind in CONFIG_MAPPING:
        return
    AutoConfig.register(kind, family.config)
    AutoModel.register(family.config, family.model)
    AutoModelForImageTextToText.register(family.config, family.generator)
    if rules := family.renamings():
        register_checkpoint_conversion_mapping(kind, rules)


for _family in FAMILIES.values():
    _register(_family)

AutoModel.register(mpt.MPTConfig, mpt.MPTModel)
AutoModelForCausalLM.register(mpt.MPTConfig, mpt.MPTForCausalLM)
AutoModelForSequenceClassification.register(mpt.MPTConfig, mpt.MPTForSequenceClassification)
