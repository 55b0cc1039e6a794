"""The Triton kernels and their launches, one file each: AdamW, casts, GEMMs, products of few rows, grouped GEMMs, fused
layers, the key-value cache, and batch-invariant ``rows``. They import triton, so only ``triton_backend`` names them,
and each is imported when it is first used."""

import importlib
from types import ModuleType

_NAMES = ("adamw", "cast", "decode", "fused", "gemm", "grouped", "grouped_cast", "paged", "rows")


def __getattr__(name: str) -> ModuleType:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
