"""The forms of products with few rows, ``triton_kernels/decode.py``, for decoding with Qwen3-8B and Qwen2.5-7B."""

from __future__ import annotations

import itertools
from functools import cache

import torch

from octavo.fp8.kernels.triton_kernels import decode
from tests.fp8.kernels import recorded
from tests.fp8.kernels.forms import Variant
from tests.fp8.kernels.forms.gemm import GPUS, distinct, operands

SHAPES = (  # (N, K, with a bias) of q and o, k and v, gate and up, down; of Qwen2.5's q
    *((4096, 4096, False), (1024, 4096, False), (12288, 4096, False), (4096, 12288, False), (3584, 3584, True)),
)
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
ROWS = 8  # any: the forms for 1 row and for 64 are the same


@cache
def variants() -> list[Variant]:
    """What those shapes run, each form once: products of all of the contraction and of a part, and sums of parts."""
    results = []
    for gpu, title, (n, k, biased) in itertools.product(GPUS, RECIPES, SHAPES):
        bias = torch.empty(n, dtype=torch.bfloat16, device="meta") if biased else None
        with recorded.launches(decode) as observed:
            decode.decode(*operands(title, "fwd", ROWS, n, k), torch.bfloat16, bias, gpu)
        for kernel, args, options in observed:
            parts = options.get("PARTS")
            name = f"decode{'+bias' * options['BIAS']} {title}" + (f" joins {parts}" if parts else "")
            results.append(recorded.variant(name, gpu.sm, kernel, args, options))
    return distinct(results)
