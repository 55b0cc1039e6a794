"""A vision-language model of parts for which transformers has no class: an image encoder for images of any size, one
with registers, or a projector that is not LLaVA's; and a decoder of text."""

from octavo.models.custom.composed.configuration import (
    IMAGE_TOKEN,
    PROJECTORS,
    TOWERS,
    ComposedConfig,
    OctavoLlavaConfig,
    OctavoVlmConfig,
)
from octavo.models.custom.composed.model import (
    OctavoLlavaForConditionalGeneration,
    OctavoLlavaModel,
    OctavoVlmForConditionalGeneration,
    OctavoVlmModel,
    renamings,
)

__all__ = [
    "IMAGE_TOKEN",
    "PROJECTORS",
    "TOWERS",
    "ComposedConfig",
    "OctavoLlavaConfig",
    "OctavoLlavaForConditionalGeneration",
    "OctavoLlavaModel",
    "OctavoVlmConfig",
    "OctavoVlmForConditionalGeneration",
    "OctavoVlmModel",
    "renamings",
]
