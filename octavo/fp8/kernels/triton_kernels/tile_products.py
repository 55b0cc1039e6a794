"""Products of two tiles of plain numbers, for attention and row products: exact terms, sums in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.fp8.kernels.triton_kernels.bits import INTERPRETED, round_to, widen


@triton.jit
def dot(a, b):
    """a [M, K] . b [K, N] -> fp32 [M, N]. Products of 16-bit numbers are exact; fp32 is never multiplied in TF32."""
    if INTERPRETED:  # its products of bf16 are incorrect
        return tl.dot(widen(a), widen(b), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def weighted(p, v):
    """p [M, K] fp32 . v [K, N] -> fp32 [M, N]; p is split into two numbers of v's 16 bits.

    One number would round p to 8 bits of significand in bf16: more error than all other steps of attention.
    """
    if v.dtype == tl.float32:
        return dot(p, v)
    else:
        # The second number is the rounding error of the first; tensor cores multiply both exactly.
        high = round_to(p, v.dtype)
        return dot(high, v) + dot(round_to(p - widen(high), v.dtype), v)
