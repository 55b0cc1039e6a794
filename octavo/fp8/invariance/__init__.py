"""Results of a row that depend on neither batch nor length: products, attention and functions of one element."""

from octavo.fp8.invariance.attention import TILE, attention
from octavo.fp8.invariance.mode import Rows, active, again
from octavo.fp8.invariance.products import ROWS, InvarianceError
from octavo.fp8.invariance.products import linear as row_linear
from octavo.fp8.invariance.products import mm as row_mm

__all__ = [
    "InvarianceError",
    "ROWS",
    "Rows",
    "TILE",
    "active",
    "again",
    "attention",
    "row_linear",
    "row_mm",
]
