"""The Triton kernels and their launches, a file each: casts, GEMMs, products of few rows, grouped GEMMs, fused layers,
the key-value cache, and ``rows`` that stand for themselves. They import triton, so that nothing outside
``triton_backend`` names them, and each is imported when it is first named."""

import importlib
from typing import Any

_NAMES = ("adamw", "cast", "decode", "fused", "gemm", "grouped", "grouped_cast", "paged", "rows")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
