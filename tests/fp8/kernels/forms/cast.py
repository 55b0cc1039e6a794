"""The forms of the casts: ``triton_kernels/cast.py``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.kernels.triton_kernels import cast, cast_tiles, room
from tests.fp8.kernels.forms import Variant


def cast_variant(name: str, jobs: Sequence[cast.Job], shape: tuple[int, int], given: bool = False) -> Variant:
    """The form of ``cast_kernel`` that a bf16 matrix of this shape takes, with :func:`cast.run`'s constants; ``given``:
    scales come from outside, and amax too."""
    x = torch.empty(1, *shape, dtype=torch.bfloat16, device="meta")
    tile = cast._tile(jobs, *shape, given)
    signature = {"x_ptr": "*bf16", **dict.fromkeys(("stride_b", "stride_r", "stride_c", "M", "K", "across"), "i32")}
    signature |= dict.fromkeys(("sizes_ptr", "starts_ptr", "tiles_ptr"), "*i32")
    forms: list[cast_tiles.Facts | None] = [None, None]
    for c in (0, 1):
        signature |= {
            f"codes{c}_ptr": "*u8",
            f"scale{c}_ptr": "*fp32",
            f"amax{c}_ptr": "*i32",
            f"given{c}_ptr": "*fp32",
        }
        signature |= dict.fromkeys((f"pitch{c}", f"scale{c}_b", f"scale{c}_r", f"scale{c}_c"), "i32")
    for spec, c in jobs:
        if spec.scale == "e8m0":
            signature[f"scale{c}_ptr"] = "*u8"
        from_tile = not given and cast._holds(spec.block, tile, *shape, None)
        forms[c] = cast.facts(spec, from_tile, given, True, room.room(x.shape, spec, c, None).padding)
    constants = {"CAST1": forms[1], "CAST0": forms[0], "GROUPED": False, "EVEN": 16, "UNIT": True}
    return Variant(name, cast_tiles.cast_kernel, signature, constants | {"TR": tile.rows, "TC": tile.cols}, tile.warps)


def variants() -> list[Variant]:
    """What the recipes use: every kernel of this file in its forms, for bf16."""
    shape = (8192, 4096)
    specs = {
        "1x128": (CastSpec("e4m3", (1, 128)), CastSpec("e4m3", (128, 1))),
        "1x32 e8m0": (CastSpec("e4m3", (1, 32), "e8m0"), CastSpec("e4m3", (32, 1), "e8m0")),
        "row": (CastSpec("e4m3", (1, -1)), CastSpec("e4m3", (-1, 1))),
        "tensor": (CastSpec("e4m3", (-1, -1), "fp32"), CastSpec("e4m3", (-1, -1), "fp32")),
        "tensor e5m2": (CastSpec("e5m2", (-1, -1), "fp32"), CastSpec("e5m2", (-1, -1), "fp32")),
    }
    found = [cast_variant("cast 128x128 rows", [(CastSpec("e4m3", (128, 128)), 1)], shape)]
    for name, (row, col) in specs.items():
        found.append(cast_variant(f"cast {name} both", [(row, 1), (col, 0)], shape))
        found.append(cast_variant(f"cast {name} rows", [(row, 1)], shape))
        found.append(cast_variant(f"cast {name} columns", [(col, 0)], shape))
    found.append(cast_variant("cast row rows, 18944 long", [(specs["row"][0], 1)], (8192, 18944)))
    for name in ("tensor", "tensor e5m2"):
        found.append(cast_variant(f"cast {name} rows, scale given", [(specs[name][0], 1)], shape, given=True))
    ints = dict.fromkeys(("stride_b", "stride_r", "stride_c", "M", "K", "across"), "i32")
    maxima = {"x_ptr": "*bf16", **ints}
    maxima |= dict.fromkeys(("rows_ptr", "cols_ptr", "all_ptr", "sizes_ptr", "starts_ptr", "tiles_ptr"), "*i32")
    for name, rows, cols, all_, tile in (
        ("rows and columns", True, True, False, (64, 128, 2)),
        ("columns", False, True, False, (32, 128, 4)),
        ("tensor", False, False, True, (32, 128, 4)),
    ):
        constants = {"ROWS": rows, "COLS": cols, "ALL": all_, "GROUPED": False, "EVEN": 16, "UNIT": True}
        constants |= {"TR": tile[0], "TC": tile[1], "STEPS": tile[2]}
        found.append(Variant(f"amax {name}", cast_tiles.amax_kernel, maxima, constants, 8 if rows else 4))
    back = {"codes_ptr": "*u8", "scale_ptr": "*fp32", "out_ptr": "*bf16"}
    back |= dict.fromkeys(("stride_r", "scale_c", "M", "K", "across"), "i32")
    constants = {
        "stride_c": 1,
        "scale_r": 1,
        "BR": 1,
        "BC": 128,
        "E5M2": False,
        "E8M0": False,
        "EVEN": 16,
        "TR": 32,
        "TC": 128,
    }
    found.append(Variant("dequantize 1x128", cast_tiles.dequantize_kernel, back, constants, 4))
    relay_ = {"codes_ptr": "*u8", "out_ptr": "*u8"}
    relay_ |= dict.fromkeys(("stride_b", "stride_k", "F", "K", "pitch", "across"), "i32")
    constants = {"stride_f": 1, "EVEN_F": 16, "EVEN_K": 16, "TF": 128, "TK": 128}
    found.append(Variant("relay", cast_tiles.relay_kernel, relay_, constants, 8))
    return found
