"""MPT as trained by LLM-Foundry, with all of its configuration fields, most of which transformers' class ignores."""

from octavo.models.custom.mpt.configuration import MPTConfig
from octavo.models.custom.mpt.model import MPTForCausalLM, MPTForSequenceClassification, MPTModel
from octavo.models.custom.mpt.reading import ignored_by_stock, read, why_too_long

__all__ = [
    "MPTConfig",
    "MPTForCausalLM",
    "MPTForSequenceClassification",
    "MPTModel",
    "ignored_by_stock",
    "read",
    "why_too_long",
]
