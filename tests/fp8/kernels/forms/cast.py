"""The forms of the casts: ``triton_kernels/cast.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.kernels.triton_kernels import cast
from tests.fp8.kernels.forms import Variant, launched

EVEN, EDGES = (8192, 4096), (8200, 4096)
"""Tokens by features of Qwen3-8B, in whole tiles and with some at the edge."""
LONG = (8192, 18944)
"""Rows of Qwen2.5-7B, longer than one program holds with the maxima of the columns."""
SPECS = {
    "1x128": (CastSpec("e4m3", (1, 128)), CastSpec("e4m3", (128, 1))),
    "1x32 e8m0": (CastSpec("e4m3", (1, 32), "e8m0"), CastSpec("e4m3", (32, 1), "e8m0")),
    "row": (CastSpec("e4m3", (1, -1)), CastSpec("e4m3", (-1, 1))),
    "tensor": (CastSpec("e4m3", (-1, -1), "fp32"), CastSpec("e4m3", (-1, -1), "fp32")),
    "tensor e5m2": (CastSpec("e5m2", (-1, -1), "fp32"), CastSpec("e5m2", (-1, -1), "fp32")),
}


def form(name: str, call: Callable[[Tensor], object], shape: tuple[int, int] = EVEN, at: int = -1) -> Variant:
    """What ``call`` launches for a matrix of bf16, last or ``at``."""
    return launched(name, cast, lambda: call(torch.empty(shape, dtype=torch.bfloat16, device="meta")), at)


def _given(x: Tensor, spec: CastSpec, contracts: tuple[int, ...]) -> object:
    one = torch.empty((), device="meta")
    return cast.quantize_with_scale(x, one, spec, one, contracts)


def variants() -> list[Variant]:
    """What the recipes use: every kernel of this file in its forms, for bf16."""
    square = CastSpec("e4m3", (128, 128))
    results = [form("cast 128x128 rows", lambda x: cast.quantize(x, square))]
    results.append(form("cast 128x128 both", lambda x: cast.quantize_both(x, square, square)))
    mixed = (SPECS["1x128"][0], square)
    results.append(form("cast 1x128 and 128x128", lambda x: cast.quantize_both(x, *mixed)))
    results.append(form("cast 1x128 and 128x128, edges", lambda x: cast.quantize_both(x, *mixed), EDGES))
    for name, (row, col) in SPECS.items():
        if name != "row":  # whose layouts are two launches
            results.append(form(f"cast {name} both", lambda x, r=row, c=col: cast.quantize_both(x, r, c)))
            results.append(form(f"cast {name} both, edges", lambda x, r=row, c=col: cast.quantize_both(x, r, c), EDGES))
        results.append(form(f"cast {name} rows", lambda x, r=row: cast.quantize(x, r)))
        results.append(form(f"cast {name} rows, edges", lambda x, r=row: cast.quantize(x, r), EDGES))
        results.append(form(f"cast {name} columns", lambda x, c=col: cast.quantize(x, c, 0)))
        results.append(form(f"cast {name} columns, edges", lambda x, c=col: cast.quantize(x, c, 0), EDGES))
    for shape in (EVEN, EDGES, (8192, 12288), (8192, 1024)):
        name = f"rows and maxima, {shape[0]} x {shape[1]}"
        results.append(form(name, lambda x: cast.quantize_both(x, *SPECS["row"]), shape, 0))
    # Loads of 8 bytes, of single values, and blocks of one row in both layouts.
    row, col = SPECS["1x128"]
    results.append(form("cast 1x128 both, 3420 wide", lambda x: cast.quantize_both(x, row, col), (8200, 3420)))
    results.append(form("cast 1x128 both, 8 warps", lambda x: cast.quantize_both(x, row, col, 8)))
    short = CastSpec("e4m3", (1, 16))
    results.append(form("cast 1x16 both", lambda x: cast.quantize_both(x, short, short)))
    for name in ("1x128", "row"):
        pair = SPECS[name]
        strided = f"cast {name} both, strided" if name != "row" else "rows and maxima, strided"
        results.append(form(strided, lambda x, p=pair: cast.quantize_both(x[:, ::2], *p), EDGES, 0))
        results.append(form(f"cast {name} rows, strided", lambda x, s=pair[0]: cast.quantize(x[:, ::2], s), EDGES))
    results.append(form("cast row rows, 18944 long", lambda x: cast.quantize(x, SPECS["row"][0]), LONG))
    for name in ("tensor", "tensor e5m2"):
        spec = SPECS[name][0]
        results.append(form(f"cast {name} rows, scale given", lambda x, s=spec: _given(x, s, (1,))))
        results.append(form(f"cast {name} both, scale given", lambda x, s=spec: _given(x, s, (1, 0))))
    for name, (row, col), shape in (("rows and columns", SPECS["row"], LONG), ("tensor", SPECS["tensor"], EVEN)):
        results.append(form(f"amax {name}", lambda x, r=row, c=col: cast.quantize_both(x, r, c), shape, 0))
    results.append(form("cast row both, 18944 long", lambda x: cast.quantize_both(x, *SPECS["row"]), LONG))
    results.append(form("amax columns", lambda x: cast.quantize(x, SPECS["row"][1], 0), at=0))
    back = SPECS["1x128"][0]
    results.append(form("dequantize 1x128", lambda x: cast.dequantize(cast.quantize(x, back), torch.bfloat16)))
    results.append(form("relay", lambda x: cast.convert_to_k_major(cast.quantize(x, square), 0)))
    return results
