"""A vision-language model of parts for which transformers has no class: an image encoder for images of any size, and a
decoder of text."""

from octavo.models.custom.composed.configuration import IMAGE_TOKEN, TOWERS, OctavoVlmConfig
from octavo.models.custom.composed.model import OctavoVlmForConditionalGeneration, OctavoVlmModel, renamings

__all__ = [
    "IMAGE_TOKEN",
    "TOWERS",
    "OctavoVlmConfig",
    "OctavoVlmForConditionalGeneration",
    "OctavoVlmModel",
    "renamings",
]
