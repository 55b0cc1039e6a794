"""NVILA and NVILA-Lite, which transformers does not have, implemented by Octavo (:mod:`octavo.models.custom.register`).

Source of the arithmetic: Liu et al., NVILA, arXiv 2412.04468, and the published checkpoints.
"""

from octavo.models.custom.nvila.configuration import PROJECTORS, NvilaConfig, NvilaLiteConfig
from octavo.models.custom.nvila.model import (
    NVILAForConditionalGeneration,
    NVILALiteForConditionalGeneration,
    NvilaLiteModel,
    NvilaModel,
    renamings,
)

__all__ = ["PROJECTORS", "NvilaConfig", "NVILAForConditionalGeneration", "NvilaLiteConfig",
           "NVILALiteForConditionalGeneration", "NvilaLiteModel", "NvilaModel", "renamings"]  # fmt: skip
