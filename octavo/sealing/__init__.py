"""Sealing: permuted copies of models and data sets, which train like the originals and are exact by construction.

docs/confidential.md describes what this hides.
"""

from octavo.sealing.adapter import seal_adapter, unseal_adapter
from octavo.sealing.errors import SealError
from octavo.sealing.folder import SealResult, seal_model, unseal_model
from octavo.sealing.key import Key, find_key, read_key
from octavo.sealing.rows import SealedDataResult, seal_data
from octavo.sealing.tokenizer import seal_text, unseal_text

__all__ = [
    "Key",
    "SealedDataResult",
    "SealError",
    "SealResult",
    "find_key",
    "read_key",
    "seal_adapter",
    "seal_data",
    "seal_model",
    "seal_text",
    "unseal_adapter",
    "unseal_model",
    "unseal_text",
]
