"""The forms of the grouped GEMMs: ``triton_kernels/grouped.py``."""

from __future__ import annotations

from octavo.fp8.kernels.groups import TILE
from octavo.fp8.kernels.triton_kernels.grouped import grouped_rows_kernel, grouped_wgrad_kernel
from tests.fp8.kernels.forms import Variant
from tests.fp8.kernels.forms.gemm import forms


def variants() -> list[Variant]:
    """The forms of both kernels, of every recipe and architecture, with the tiles of large groups."""
    common = {"out": "*bf16", "N": "i32:16", "a_stride_e": "i32:16", "b_stride_e": "i32:16"}
    rows = common | {"experts": "*i32", "rows": "i32", "K": "i32", "b_rows": "i32:16", "b_all": "i32:16"}
    found = forms("grouped", grouped_rows_kernel, ("fwd", "dgrad"), rows, {"BIAS": False, "bias": None, "OWNED": TILE})
    across = common | {"starts": "*i32", "sizes": "*i32", "M": "i32"}
    return found + forms("grouped", grouped_wgrad_kernel, ("wgrad",), across, {"OWNED": TILE})
