"""Hugging Face models described, never modified: families and components, loading, processors, small checkpoints."""

from octavo.models.errors import ModelError
from octavo.models.families import COMPONENTS, Family, describe, stays
from octavo.models.loading import empty, load, parameter_count, read_config
from octavo.models.processors import TextProcessor, load_processor, load_tokenizer

__all__ = [
    "COMPONENTS",
    "Family",
    "ModelError",
    "TextProcessor",
    "describe",
    "empty",
    "load",
    "load_processor",
    "load_tokenizer",
    "parameter_count",
    "read_config",
    "stays",
]
