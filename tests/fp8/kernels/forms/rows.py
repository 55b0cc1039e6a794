"""The forms of rows that stand for themselves: ``row_products.py``, ``row_attention.py`` and ``row_sums.py``; FP8
products in their one tile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from octavo.fp8.kernels.triton_kernels import gemm, row_attention, row_products, row_sums
from octavo.fp8.kernels.triton_kernels.tiles import Gpu
from tests.fp8.kernels import recorded
from tests.fp8.kernels.forms import Variant
from tests.fp8.kernels.forms.decode import RECIPES as KNOWN
from tests.fp8.kernels.forms.gemm import GPUS, distinct, operands

RECIPES = [title for title in KNOWN if title != "tensorwise"]  # whose activations share no scale between rows
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = {"qwen3-8b": (32, 8, 128, 128), "a tower": (16, 16, 72, 72), "64": (32, 8, 64, 64), "256": (8, 1, 256, 256)}
"""Heads of queries and of keys, and the sizes of keys and values."""
LENGTHS = (2, 128, 1152, 4096)


def _empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def variants() -> list[Variant]:
    results = [_sums(dtype, length) for dtype in (torch.bfloat16, torch.float32) for length in LENGTHS]
    results += [_product(dtype, kind) for dtype in DTYPES for kind in ("plain", "bias", "grouped", "by columns")]
    for size, dtype in [*((size, torch.bfloat16) for size in SIZES), *(("qwen3-8b", dtype) for dtype in DTYPES[1:])]:
        elsewhere = (89, 100, 120) if size == "256" else (89, 90, 100, 120)
        created = [_attention(size, dtype, kind) for kind in ("mask", "positions")]
        results += [variant._replace(architectures=elsewhere) for variant in created]
    results += [_on_hopper(kind) for kind in ("mask", "positions")]
    results += [_attention("qwen3-8b", torch.bfloat16, kind) for kind in ("added", "window", "all keys")]
    results += [_attention(size, torch.float32, "all keys") for size in ("a tower", "256")]
    return results + distinct(list(_fixed()))


def _sums(dtype: torch.dtype, length: int) -> Variant:
    with recorded.launches(row_sums) as observed:
        row_sums.sums(_empty(300, length, dtype=dtype))
    return _told(f"sums of {length} {_short(dtype)}", observed)


def _product(dtype: torch.dtype, kind: str) -> Variant:
    a, w, bias = _empty(300, 4096, dtype=dtype), _empty(1024, 4096, dtype=dtype), _empty(1024, dtype=dtype)
    with recorded.launches(row_products) as observed:
        if kind == "grouped":
            ends = _empty(8, dtype=torch.int64)
            row_products.grouped_product(a, _empty(8, 1024, 4096, dtype=dtype).mT, ends)
        else:
            b = _empty(4096, 1024, dtype=dtype) if kind == "by columns" else w.t()
            row_products.product(a, b, bias if kind == "bias" else None, 1.0, 1.0, dtype)
    return _told(f"row product {kind} {_short(dtype)}", observed)


def _attention(size: str, dtype: torch.dtype, kind: str) -> Variant:
    heads, kv, d, wide = SIZES[size]
    q, k, v = (_empty(4, h, 512, n, dtype=dtype) for h, n in ((heads, d), (kv, d), (kv, wide)))
    mask = positions = original = None
    if kind == "mask":
        mask, original = _empty(4, 1, 512, 512, dtype=torch.bool), _empty(4, 512, dtype=torch.bool)
    elif kind == "added":
        mask = _empty(4, 1, 512, 512, dtype=dtype)
    elif kind != "all keys":
        positions = _empty(4, 512, dtype=torch.int64)
    with recorded.launches(row_attention) as observed:
        row_attention.attend(q, k, v, mask, positions, original, 100 if kind == "window" else None, d**-0.5)
    return _told(f"row attention {kind}, {size}, {_short(dtype)}", observed)


def _on_hopper(kind: str) -> Variant:
    """Wide heads there: 1.13 ms for 8 x 4,096 queries of BF16 on an H200, the form that spills nothing 1.31."""
    with mock.patch.object(row_attention, "gpu_of", lambda device: Gpu(90, 132)):
        results = _attention("256", torch.bfloat16, kind)
    return results._replace(name=f"{results.name}, Hopper", architectures=(90,), spill=320)


def _fixed() -> Iterator[Variant]:
    for gpu, title in itertools.product(GPUS, RECIPES):
        with recorded.launches(gemm) as observed:
            gemm.gemm(*_in_order(operands(title, "fwd", 8, 4096, 4096)), torch.bfloat16, gpu=gpu, fixed=True)
        for launch in observed:
            yield recorded.variant(f"gemm of fixed tile {title}", gpu.sm, *launch)


def _in_order(pair: tuple) -> tuple:
    return pair[0], 1, pair[1], 1


def _told(name: str, seen: list) -> Variant:
    return recorded.variant(name, 0, *seen[-1])._replace(architectures=(89, 90, 100, 120))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
