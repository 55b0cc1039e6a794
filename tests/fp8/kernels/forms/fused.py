"""The forms of the fused layers: ``triton_kernels/fused.py``."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.kernels.triton_kernels import fused
from octavo.fp8.kernels.triton_kernels import fused_kernels as kernels
from octavo.fp8.kernels.triton_kernels.fused import TILE
from tests.fp8.kernels.forms import Variant

WHOLE, EDGES = torch.Size((8192, 4096)), torch.Size((8200, 4096))
"""Tokens by features of Qwen3-8B, in whole tiles and with some at the edge."""


def _signature(
    kernel: Any, wanted: list[str], row: CastSpec | None, col: CastSpec | None, dtype: str = "bf16"
) -> tuple[dict[str, str], dict[str, Any]]:
    """Types of the arguments, and None for the pointers of outputs that are not wanted."""
    types: dict[str, str] = {"rstd": "*fp32", "eps": "fp32", "M": "i32", "K": "i32"}
    types |= dict.fromkeys(wanted, f"*{dtype}")
    for prefix, spec in (("", row), ("row_", row), ("col_", col)):
        if spec is not None:
            types |= {f"{prefix}codes": "*u8", f"{prefix}scales": "*u8" if spec.scale == "e8m0" else "*fp32"}
    for side, spec in (("row", row), ("col", col)):
        if spec is not None:
            for name in ("gate", "up"):
                types |= {f"{name}_{side}": "*u8", f"{name}_{side}_scales": "*u8" if spec.scale == "e8m0" else "*fp32"}
    types |= {name: "i32" for name in kernel.arg_names if name.endswith("stride")}
    outputs = ("y", "h", "dgate", "dup", "codes", "scales", "top")
    absent = [n for n in kernel.arg_names if n not in types and (n.endswith(outputs) or n.endswith(("_row", "_col")))]
    return {n: types[n] for n in kernel.arg_names if n in types}, dict.fromkeys(absent)


def _dtypes(out: str, low: str) -> dict[str, Any]:
    types = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
    return {"OUT": types[out], "LOW": types[low]}


def _emits(kernel: Any, row: CastSpec | None, dtype: str) -> tuple[bool, ...]:
    """Whether the plain result is written: as it is launched, and a choice of the caller for bf16 only."""
    if kernel is kernels.swiglu_backward:
        return (row is None,)
    return (True, False) if row is not None and dtype == "bf16" else (True,)


def _tile(
    title: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any], program: dict[str, Any]
) -> Variant:
    """The form of a kernel of tiles with the constants and options of ``fused._program``."""
    options = {"num_warps": program["num_warps"], "maxnreg": program.get("maxnreg")}
    fixed = {key: value for key, value in program.items() if key not in options}
    return Variant(title, kernel, signature, {"UNIT": 16} | constants | fixed, **options)


def _backward(title: str, dtype: str, wide: int, absent: dict[str, Any]) -> Variant:
    """The form of the backward of RMSNorm for rows of this width."""
    types = dict.fromkeys(("dy", "x", "weight", "dx"), f"*{dtype}") | {"rstd": "*fp32", "sums": "*fp32"}
    types |= dict.fromkeys(("M", "dy_stride", "x_stride", "K"), "i32")
    kernel, program = kernels.rmsnorm_backward, fused._whole_rows(wide)
    signature = {n: types[n] for n in kernel.arg_names if n in types and n not in absent}
    constants = {"UNIT": 16, "OUT": _dtypes(dtype, dtype)["OUT"], "ROWS": program["ROWS"], "BK": program["BK"]}
    return Variant(f"rmsnorm_backward {title}", kernel, signature, constants | absent, program["num_warps"])


def variants() -> list[Variant]:
    """Every kind of output that is used: with and without the plain result for bf16, once for fp16 and fp32."""
    vectors = (CastSpec(block=(1, TILE)), CastSpec(block=(TILE, 1)))
    pairs = {
        "1x128": vectors,
        "row": (vectors[0], None),
        "half": (None, vectors[1]),  # row codes are made from the result afterwards
        "hybrid": (vectors[0], CastSpec("e5m2", (TILE, 1))),
        "tiles": (vectors[0], CastSpec(block=(TILE, TILE))),
        "mxfp8": (CastSpec(block=(1, 32), scale="e8m0"), CastSpec(block=(32, 1), scale="e8m0")),
        "plain": (None, None),
        "tensor": (None, None),  # whose amax is taken, for a cast of its own
        "fp32": vectors,
        "fp16": (CastSpec(scale="fp32"), CastSpec("e5m2", (TILE, 1), "fp32")),
    }
    results = []
    for name, (row, col) in pairs.items():
        dtype = name if name in ("fp32", "fp16") else "bf16"
        for kernel, inputs, plain in (
            (kernels.rmsnorm_tile, ("x", "weight"), ("y",)),
            (kernels.swiglu, ("gate", "up"), ("h",)),
            (kernels.swiglu_backward, ("dh", "gate", "up"), ("dgate", "dup")),
        ):
            if (kernel is kernels.rmsnorm_tile and col is None) or (
                kernel is kernels.swiglu_backward and name == "tiles"
            ):
                continue  # other kernels do these, and no recipe casts dy in tiles
            for emit in _emits(kernel, row, dtype):
                expected = [*inputs, *(plain if emit else ())]
                signature, absent = _signature(kernel, expected, row, col, dtype)
                if name == "tensor":
                    tops = [top for top in absent if top.endswith("top")]
                    signature |= dict.fromkeys(tops, "*i32")
                    absent = {n: None for n in absent if n not in tops}
                title = f"{kernel.__name__} {name}{'' if emit else ' codes only'}"
                absent |= _dtypes(dtype, dtype) if kernel is kernels.rmsnorm_tile else {}
                size = 4 if dtype == "fp32" else 2
                results.append(
                    _tile(title, kernel, signature, absent, fused._program(row, col, WHOLE, size, len(plain)))
                )
                if name in ("1x128", "tiles", "mxfp8"):
                    edges = fused._program(row, col, EDGES, size, len(plain))
                    results.append(_tile(f"{title}, edges", kernel, signature, absent, edges))
                if kernel is kernels.rmsnorm_tile and name == "fp32":  # as under autocast
                    program = fused._program(row, col, WHOLE, size, len(plain))
                    low = absent | _dtypes("fp32", "bf16")
                    results.append(_tile(f"{title} codes of bf16", kernel, signature, low, program))
    kernel = kernels.rmsnorm_rows
    for wide, spec in ((128, vectors[0]), (4096, vectors[0]), (16384, CastSpec(block=(1, -1))), (4096, None)):
        constants = _dtypes("bf16", "bf16") | {"CAST": fused._cast(spec, 1)}
        constants |= {"UNIT": 4, "BM": max(1, 4096 // wide), "BK": wide}
        signature, absent = _signature(kernel, ["x", "weight", "y"], spec, None)
        title = f"{kernel.__name__} {wide} {spec or 'plain'}"
        results.append(Variant(title, kernel, signature, constants | absent, max(4, wide // 1024)))
    absent.pop("top")
    results.append(
        Variant(
            "rmsnorm_rows 4096 tensor", kernel, signature | {"top": "*i32"}, constants | absent, max(4, wide // 1024)
        )
    )
    for title, dtype, wide, absent in (
        ("4096", "bf16", 4096, {}),
        ("4096 dx only", "bf16", 4096, {"sums": None}),
        ("4096 fp32", "fp32", 4096, {}),
        ("16384", "bf16", 16384, {}),
    ):
        results.append(_backward(title, dtype, wide, absent))
    signature, _ = _signature(kernels.rstd_of_rows, ["x"], None, None)
    results.append(Variant("rstd_of_rows", kernels.rstd_of_rows, signature, {"UNIT": 16, "BM": 4, "BK": 1024}))
    return results
