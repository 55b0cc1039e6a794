"""The processor of LLaVA: an image is one tile, cut for the vision tower, and each of the tower's features is a token.

The image processor is the tower's (CLIP, SigLIP, DINOv2) or LLaVA's own, which pads an image to a square. Folders name
it in `image_processor_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers import BaseImageProcessor, PreTrainedConfig
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.utils import is_torchvision_available

from octavo.base.model_families import leading_tokens
from octavo.models.folder.folder import read_json
from octavo.models.folder.processor_base import ProcessorTraits
from octavo.models.processors.image import settings_file

if TYPE_CHECKING or is_torchvision_available():  # as in octavo.models.processors.stock
    from transformers.models.bit.image_processing_bit import BitImageProcessor as BitImages
    from transformers.models.clip.image_processing_clip import CLIPImageProcessor as CLIPImages
    from transformers.models.llava.image_processing_llava import LlavaImageProcessor as LlavaImages
    from transformers.models.siglip.image_processing_siglip import SiglipImageProcessor as SiglipImages
else:
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil as BitImages
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil as CLIPImages
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil as LlavaImages
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil as SiglipImages

IMAGE_PROCESSORS: Mapping[str, type[BaseImageProcessor]] = {
    "CLIPImageProcessor": CLIPImages,
    "SiglipImageProcessor": SiglipImages,
    "BitImageProcessor": BitImages,
    "LlavaImageProcessor": LlavaImages,
}
"""Name of an image processor in a folder -> the class that is used. DINOv2 has BiT's."""


def load_image_processor(folder: Path, local_files_only: bool = True) -> BaseImageProcessor:
    """Return the image processor that a local folder names. Raises ValueError if it names another class."""
    settings = read_json(settings_file(folder))
    named = settings.get("image_processor", settings).get("image_processor_type")
    name = str(named).removesuffix("Pil").removesuffix("Fast")
    if name not in IMAGE_PROCESSORS:
        raise ValueError(f"image_processor_type is {named!r:.80}; a LLaVA has one of {', '.join(IMAGE_PROCESSORS)}")
    return IMAGE_PROCESSORS[name].from_pretrained(folder, local_files_only=local_files_only)


class TowerImages:
    """Loads the image processor that a folder names, like a class of transformers."""

    from_pretrained = staticmethod(load_image_processor)


class LlavaImageTextProcessor(ProcessorTraits, LlavaProcessor):
    """LlavaProcessor for images and text."""

    image_class = TowerImages

    @staticmethod
    def options(config: PreTrainedConfig) -> dict[str, object]:
        return {
            "patch_size": config.vision_config.patch_size,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
            "num_additional_image_tokens": leading_tokens(config.vision_config),
        }

    def image_tokens(self, size: tuple[int, int], only_image: bool) -> int:
        """Return the number of tokens of an image; all images have the same."""
        side = self.image_processor.crop_size or self.image_processor.size
        like = {"pixel_values": [np.empty((3, side["height"], side["width"]))]}
        return self.replace_image_token(like, 0).count(self.image_token)


class ComposedTileProcessor(LlavaImageTextProcessor):
    """LlavaProcessor for composed models: merged patches are counted as one larger patch, and leading tokens of the
    tower are no features."""

    @staticmethod
    def options(config: PreTrainedConfig) -> dict[str, object]:
        return {
            "patch_size": config.vision_config.patch_size * config.merge,
            "vision_feature_select_strategy": "full",
            "num_additional_image_tokens": 0,
        }
