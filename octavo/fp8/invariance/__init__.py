"""Results of a row that depend on neither batch nor length: products, attention and functions of one element."""

from octavo.fp8.invariance.attention import TILE, attention
from octavo.fp8.invariance.mode import Rows, active
from octavo.fp8.invariance.products import ROWS, InvarianceError

__all__ = ["InvarianceError", "ROWS", "Rows", "TILE", "active", "attention"]
