"""The forms of the key-value cache: ``triton_kernels/paged.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.fp8.kernels.triton_kernels import paged
from tests.fp8.kernels.forms import Variant, launched

SIZES = {"qwen3-8b": (32, 8, 128), "qwen3-0.6b": (16, 8, 128), "64": (32, 8, 64), "80": (32, 32, 80), "96": (12, 4, 96)}
"""Heads of queries and of keys, and their size."""
ROWS, PAGES, PAGE = 64, 9000, 8


def _empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def _form(kind: str, size: str, dtype: torch.dtype, coded: bool, width: int, at: int) -> Variant:
    """One new token of each of ROWS sequences of up to ``width`` pages."""
    queries, heads, dim = SIZES[size]
    codes = _empty(2 * heads, PAGES * PAGE, dim, dtype=torch.float8_e4m3fn if coded else dtype)
    scales = _empty(2 * heads, PAGES * PAGE, dtype=torch.float32) if coded else None
    k, v = _empty(ROWS, heads, dim, dtype=dtype), _empty(ROWS, heads, dim, dtype=dtype)
    where, lengths = _empty(ROWS, dtype=torch.int64), _empty(ROWS, dtype=torch.int32)
    table = _empty(ROWS, 4 + width, dtype=torch.int32)[:, 4:]

    def call() -> object:
        if kind == "write":
            return paged.write(k, v, where, codes, scales, dtype)
        return paged.attend(_empty(ROWS, queries, dim, dtype=dtype), codes, scales, table, lengths, dim**-0.5, PAGE)

    name = f"paged {kind}, {size}, {'e4m3 for ' if coded else ''}{str(dtype).removeprefix('torch.')}"
    results = launched(name, paged, call, at)
    if "scale" in results.constants:  # the one number that is no constant of a launch
        rest = {name: value for name, value in results.constants.items() if name != "scale"}
        results = results._replace(signature={**results.signature, "scale": "fp32"}, constants=rest)
    return results


def variants() -> list[Variant]:
    """Published models' heads in bf16 and FP8; the other dtypes of one of them; a table of one chunk, and of many."""
    results = []
    for size in SIZES:
        for coded in (False, True):
            results.append(_form("write", size, torch.bfloat16, coded, 64, -1))
            results.append(_form("attend", size, torch.bfloat16, coded, 64, -1))
    for dtype in (torch.float16, torch.float32):
        for coded in (False, True):
            results.append(_form("write", "qwen3-8b", dtype, coded, 64, -1))
            results.append(_form("attend", "qwen3-8b", dtype, coded, 64, -1))
    results.append(_form("attend to a chunk", "qwen3-8b", torch.bfloat16, False, 512, 0))
    results.append(_form("join chunks", "qwen3-8b", torch.bfloat16, False, 512, -1))
    return results
