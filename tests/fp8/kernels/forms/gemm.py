"""The forms of the GEMMs: ``triton_kernels/gemm.py``, and what those of all GEMM kernels share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.kernels.triton_kernels.gemm import gemm_kernel
from octavo.fp8.kernels.triton_kernels.tiles import GROUP, Form, Gpu, Tile, candidates, choose, form, grain
from tests.fp8.kernels.forms import Variant


def variants() -> list[Variant]:
    """The forms of every recipe, GEMM and architecture with the tile of a large product; all tiles of one of them."""
    signature = {"out": "*bf16", "M": "i32", "N": "i32:16", "K": "i32"}
    plain = {"BIAS": False, "bias": None}
    found = forms("gemm", gemm_kernel, ("fwd", "dgrad", "wgrad"), signature, plain, every_tile=True)
    with_bias = signature | {"bias": "*bf16"}
    return found + forms("gemm+bias", gemm_kernel, ("fwd",), with_bias, {"BIAS": True})


def forms(
    name: str,
    kernel: Any,
    gemms: Sequence[str],
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    every_tile: bool = False,
) -> list[Variant]:
    """What ``kernel`` is compiled to for these GEMMs of all recipes, on each architecture; the same form once.

    ``signature`` and ``constants``: of the arguments that are not those of all GEMM kernels. ``every_tile``: of the
    blockwise ones all tiles, not only that of a large product.
    """
    found: list[Variant] = []
    seen: set[tuple[int, Form, Tile]] = set()
    for arch, title, which in itertools.product((89, 90, 100, 120), _RECIPES, gemms):
        casts = recipe(*title.split()).gemm(which)
        assert casts is not None
        dims = {"fwd": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}[which]
        gpu = Gpu(arch, 132)
        what = form(grain(casts.a, dims[0]), grain(casts.b, dims[1]), fast=which == "fwd", gpu=gpu)
        large = choose(8192, 8192, what, gpu)
        chosen = [t for t, _ in candidates(what, gpu)] if every_tile and title == "blockwise" else [large]
        for tile in chosen:
            if (arch, what, tile) in seen:
                continue
            seen.add((arch, what, tile))
            types, ones = _described(what, tile)
            types = {key: kind for key, kind in {**types, **signature}.items() if key not in constants}
            label = f"{name} {title} {which} {tile.m}x{tile.n}x{tile.k}"
            fixed: dict[str, Any] = {"FORM": what, "TILE": tile, "GROUP_M": GROUP, **ones, **constants}
            found.append(Variant(label, kernel, types, fixed, tile.warps, tile.stages, (arch,)))
    return found


_RECIPES = ("tensorwise", "tensorwise e4m3", "rowwise", "blockwise", "blockwise hybrid", "mxfp8")


def _described(what: Form, tile: Tile) -> tuple[dict[str, str], dict[str, int]]:
    """(types, strides of 1) of the arguments that describe both operands, lying as casts write them."""
    types: dict[str, str] = {}
    ones: dict[str, int] = {}
    for key, g, rows in (("a", what.a, tile.m), ("b", what.b, tile.n)):
        code = "fp8e5" if g.e5m2 else "fp8e4nv"
        types[key] = f"tensordesc<{code}[{rows}, {tile.k}]>" if what.tma else f"*{code}"
        types |= {f"{key}_scale": "*u8" if g.e8m0 else "*fp32", f"{key}_held": "i32:16"}
        along_rows = not g.e8m0 and g.free != 128
        ones[f"{key}_stride_f" if along_rows else f"{key}_stride_k"] = 1
        types[f"{key}_stride_k" if along_rows else f"{key}_stride_f"] = "i32:16" if along_rows else "i32"
    return types, ones
