"""Products of two tiles of plain numbers, as attention and row products make them: exact terms, sums in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.fp8.kernels.triton_kernels.bits import INTERPRETED, round_to, widen


@triton.jit
def dot(a, b):
    """a . b in fp32, products of 16 bits exact, of fp32 by fp32 multiplications (no TF32)."""
    if INTERPRETED:  # whose products of bf16 are none
        return tl.dot(widen(a), widen(b), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def weighted(p, v):
    """p . v, p in fp32 as the sum of two numbers of v's 16 bits."""
    if v.dtype == tl.float32:
        return dot(p, v)
    else:
        high = round_to(p, v.dtype)
        return dot(high, v) + dot(round_to(p - widen(high), v.dtype), v)
