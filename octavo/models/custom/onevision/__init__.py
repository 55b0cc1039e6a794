"""LLaVA-OneVision-1.5 on the layout of its published folders: RICE-ViT, a projector, and transformers' Qwen3."""

from octavo.models.custom.onevision.configuration import (
    LLaVAOneVision1_5_Config,
    LLaVAOneVision1_5_TextConfig,
    RiceConfig,
)
from octavo.models.custom.onevision.model import (
    LLaVAOneVision1_5_ForConditionalGeneration,
    LLaVAOneVision1_5_Model,
    renamings,
)
from octavo.models.custom.onevision.tower import RiceViT

__all__ = [
    "LLaVAOneVision1_5_Config",
    "LLaVAOneVision1_5_ForConditionalGeneration",
    "LLaVAOneVision1_5_Model",
    "LLaVAOneVision1_5_TextConfig",
    "RiceConfig",
    "RiceViT",
    "renamings",
]
