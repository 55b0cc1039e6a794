"""The forms of the casts for experts: ``triton_kernels/grouped_cast.py``."""

from __future__ import annotations

from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.kernels.triton_kernels import cast_tiles
from tests.fp8.kernels.forms import Variant
from tests.fp8.kernels.forms.cast import cast_variant


def variants() -> list[Variant]:
    """What differs from the casts of single matrices: rows of experts, for bf16."""
    shape = (8192, 4096)
    found = []
    for name, block, contract in (
        ("1x128", (1, 128), 1),
        ("128x1", (128, 1), 0),
        ("row", (1, -1), 1),
        ("column", (-1, 1), 0),
        ("tensor", (-1, -1), 1),
    ):
        spec = CastSpec("e4m3", block, "fp32" if name == "tensor" else "pow2")
        v = cast_variant(f"cast of experts' rows, {name}", [(spec, contract)], shape)
        forms = {}
        for key in ("CAST1", "CAST0"):
            form = v.constants[key]
            # The scales of whole columns and experts are written before.
            forms[key] = form if form is None or block[0] != -1 else form._replace(write_scale=False)
        found.append(v._replace(constants={**v.constants, **forms, "GROUPED": True}))
    ints = ("stride_b", "stride_r", "stride_c", "M", "K", "across")
    pointers = ("rows_ptr", "cols_ptr", "all_ptr", "sizes_ptr", "starts_ptr", "tiles_ptr")
    signature = {"x_ptr": "*bf16", **dict.fromkeys(ints, "i32"), **dict.fromkeys(pointers, "*i32")}
    constants = {"ROWS": False, "COLS": True, "ALL": False, "GROUPED": True, "EVEN": 16, "UNIT": True}
    constants |= {"TR": 32, "TC": 128, "STEPS": 4}
    found.append(Variant("amax of experts' columns", cast_tiles.amax_kernel, signature, constants, 4))
    scales = {"amax_ptr": "*i32", "scale_ptr": "*fp32", "n": "i32"}
    constants = {"POW2": True, "E5M2": False, "E8M0": False, "BLOCK": 1024}
    found.append(Variant("scales of experts", cast_tiles.scales_kernel, scales, constants, 4))
    return found
