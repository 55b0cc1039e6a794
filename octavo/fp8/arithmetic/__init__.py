"""The numeric specification: FP8 formats, casts, recipes and the AdamW step. Needs only torch."""

from octavo.fp8.arithmetic.cast import (
    CastSpec,
    Quantized,
    dequantize,
    layout,
    quantize,
    quantize_with_scale,
    scale_fp32,
    scale_from_amax,
)
from octavo.fp8.arithmetic.formats import E4M3, NAN_CODE, decode
from octavo.fp8.arithmetic.master import join as join_master
from octavo.fp8.arithmetic.master import split as split_master
from octavo.fp8.arithmetic.moments import GROUP, LAYOUT
from octavo.fp8.arithmetic.moments import decode as decode_moments
from octavo.fp8.arithmetic.philox import blocks as random_blocks
from octavo.fp8.arithmetic.recipe import GEMMS, RECIPES, CastTable, Recipe

__all__ = [
    "CastSpec", "CastTable", "E4M3", "GEMMS", "GROUP", "LAYOUT", "NAN_CODE", "Quantized", "RECIPES", "Recipe", "decode",
    "decode_moments", "dequantize", "join_master", "layout", "quantize", "quantize_with_scale", "random_blocks",
    "scale_fp32", "scale_from_amax", "split_master",
]  # fmt: skip
