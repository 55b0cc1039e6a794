"""The forms of the fused layers: ``triton_kernels/fused.py``."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.kernels.triton_kernels import fused
from octavo.fp8.kernels.triton_kernels import fused_kernels as kernels
from octavo.fp8.kernels.triton_kernels.fused import TILE
from tests.fp8.kernels.forms import Variant


def _signature(
    kernel: Any, wanted: list[str], row: CastSpec | None, col: CastSpec | None, dtype: str = "bf16"
) -> tuple[dict[str, str], dict[str, None]]:
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


def variants() -> list[Variant]:
    """Every kind of output that is used: with and without the plain result for bf16, once for fp16 and fp32."""
    blockwise = (CastSpec(block=(1, TILE)), CastSpec(block=(TILE, 1)))
    pairs = {
        "blockwise": blockwise,
        "row": (blockwise[0], None),
        "hybrid": (blockwise[0], CastSpec("e5m2", (TILE, 1))),
        "mxfp8": (CastSpec(block=(1, 32), scale="e8m0"), CastSpec(block=(32, 1), scale="e8m0")),
        "plain": (None, None),
        "tensor": (None, None),  # whose amax is taken, for a cast of its own
        "fp32": blockwise,
        "fp16": (CastSpec(scale="fp32"), CastSpec("e5m2", (TILE, 1), "fp32")),
    }
    results = []
    for name, (row, col) in pairs.items():
        dtype = name if name in ("fp32", "fp16") else "bf16"
        tile = {"UNIT": 16, "WHOLE": True, **fused._program(row, col, 4 if dtype == "fp32" else 2)}
        warps, most = tile.pop("num_warps"), tile.pop("maxnreg", None)
        for kernel, inputs, plain in (
            (kernels.rmsnorm_tile, ("x", "weight"), ("y",)),
            (kernels.swiglu, ("gate", "up"), ("h",)),
            (kernels.swiglu_backward, ("dh", "gate", "up"), ("dgate", "dup")),
        ):
            if kernel is kernels.rmsnorm_tile and col is None:
                continue
            codes_alone = row is not None and dtype == "bf16" and kernel is not kernels.rmsnorm_tile
            for emit in (True, False) if codes_alone else (True,):
                expected = [*inputs, *(plain if emit else ())]
                signature, absent = _signature(kernel, expected, row, col, dtype)
                if name == "tensor":
                    tops = [top for top in absent if top.endswith("top")]
                    signature |= dict.fromkeys(tops, "*i32")
                    absent = {n: None for n in absent if n not in tops}
                title = f"{kernel.__name__} {name}{'' if emit else ' codes only'}"
                fixed = tile | absent | (_dtypes(dtype, dtype) if kernel is kernels.rmsnorm_tile else {})
                results.append(Variant(title, kernel, signature, fixed, warps, maxnreg=most))
                if name in ("blockwise", "mxfp8"):
                    masked = fixed | {"WHOLE": False}
                    results.append(Variant(f"{title}, edges", kernel, signature, masked, warps, maxnreg=most))
                if kernel is kernels.rmsnorm_tile and name == "fp32":  # as under autocast
                    lowered = fixed | _dtypes("fp32", "bf16")
                    results.append(Variant(f"{title} codes of bf16", kernel, signature, lowered, warps, maxnreg=most))
    kernel = kernels.rmsnorm_rows
    for wide, spec in ((128, blockwise[0]), (4096, blockwise[0]), (16384, CastSpec(block=(1, -1))), (4096, None)):
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
    signature, _ = _signature(kernels.rstd_of_rows, ["x"], None, None)
    results.append(Variant("rstd_of_rows", kernels.rstd_of_rows, signature, {"UNIT": 16, "BM": 4, "BK": 1024}))
    return results
