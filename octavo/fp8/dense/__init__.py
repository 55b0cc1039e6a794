"""The FP8 linear layer. Read linear.py first."""

from octavo.fp8.dense.gemms import high_addmm, high_mm, select_layer_backends
from octavo.fp8.dense.inputs import Input, Recomputable, get_recomputable
from octavo.fp8.dense.wire import WIRE_FORMAT_KEY, WireFormat

__all__ = [
    "WIRE_FORMAT_KEY",
    "WireFormat",
    "Input",
    "Recomputable",
    "select_layer_backends",
    "get_recomputable",
    "high_addmm",
    "high_mm",
]
