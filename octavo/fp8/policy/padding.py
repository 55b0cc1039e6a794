"""Sizes that tensor cores do not take as they are, such as the 3420 of Qwen2.5-VL's tower, and what they cost.

A recipe asked for by name leaves no layer in high precision for its size (the table of ``auto`` does on a GPU, and the
row's reason says so). Codes lie in buffers whose sides are multiples (:mod:`octavo.fp8.kernels`,
``layout``): of 16, and along a contraction of the recipe's block where that is larger. What is missing is zeros, which
are multiplied too. With a weight [N, K] the forward contracts K, dgrad N and wgrad tokens:

    part = mean over the GEMMs in FP8 of  N' K' / (N K) - 1

That is what the codes hold. Kernels cut matrices into tiles of 64 to 256 besides, as those of BF16 do, which is not
counted. Some backends write a result as wide as the codes and copy the real columns out (``Backend.cuts_results``):
y, whose width is N, dx and dw, whose width is K, each where that is no multiple of 16. Such a copy moves 4 bytes an
element, which beside a GEMM over 1280 inputs is much more than the zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.kernels import ALIGN, Backend, padded_sizes


class Padding(NamedTuple):
    """The largest N' and K' of a layer's GEMMs, and the part that they multiply more (0.01: a hundredth)."""

    sizes: tuple[int, int]
    part: float


def padding(recipe: Recipe, shape: tuple[int, int], gemms: Sequence[str]) -> Padding:
    """What a weight [N, K] is filled up to in the GEMMs (of fwd, dgrad, wgrad) that the recipe runs in FP8."""
    n, k = shape
    found = []
    for name in gemms:
        if (casts := recipe.gemm(name)) is None:
            continue
        if name == "wgrad":  # dy and x: N and K are the free sides of both
            sizes = padded_sizes(1, n, casts.a, 0)[0], padded_sizes(1, k, casts.b, 0)[0]
        else:
            contracted = int(name == "fwd")
            free, along = padded_sizes(n, k, casts.b, contracted)
            sizes = (free, along) if contracted else (along, free)
        found.append(sizes)
    if not found or not n * k:
        return Padding(shape, 0.0)
    part = sum(a * b / (n * k) - 1 for a, b in found) / len(found)
    return Padding((max(a for a, _ in found), max(b for _, b in found)), part)


def copied(shape: tuple[int, int], backends: Mapping[str, Backend]) -> tuple[str, ...]:
    """Which results (y, dx, dw) of a weight [N, K] are copied out of wider ones, by the backend of each GEMM."""
    n, k = shape
    widths = {"fwd": ("y", n), "dgrad": ("dx", k), "wgrad": ("dw", k)}
    named = (widths[gemm] for gemm, backend in backends.items() if backend.cuts_results)
    return tuple(name for name, width in named if width % ALIGN)
