"""NVILA and NVILA-Lite, which transformers does not ship: model code of Octavo's own, in transformers' registries.

After `import octavo.models` its auto classes build and load `nvila` and `nvila_lite` like any family of theirs; no code
of a folder is run. Source of the arithmetic: Liu et al., NVILA, arXiv 2412.04468, and the published checkpoints.
"""

from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

from octavo.models.nvila.configuration import PROJECTORS, NvilaConfig, NvilaLiteConfig
from octavo.models.nvila.model import (
    NvilaForConditionalGeneration,
    NvilaLiteForConditionalGeneration,
    NvilaLiteModel,
    NvilaModel,
    renamings,
)

__all__ = ["PROJECTORS", "NvilaConfig", "NvilaForConditionalGeneration", "NvilaLiteConfig",
           "NvilaLiteForConditionalGeneration", "NvilaLiteModel", "NvilaModel"]  # fmt: skip

for _config, _model, _whole in (
    (NvilaLiteConfig, NvilaLiteModel, NvilaLiteForConditionalGeneration),
    (NvilaConfig, NvilaModel, NvilaForConditionalGeneration),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _model)
    AutoModelForImageTextToText.register(_config, _whole)
    register_checkpoint_conversion_mapping(_config.model_type, renamings())
