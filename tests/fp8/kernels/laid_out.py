"""A cast whose codes and scales have the memory layout of a GEMM."""

from __future__ import annotations

from octavo.fp8.arithmetic.cast import Quantized
from octavo.fp8.kernels.layout import k_major


def laid_out(q: Quantized, contract: int) -> Quantized:
    """The same cast as a kernel would write it for a GEMM that contracts the dimension ``contract``."""
    operand = k_major(q, contract)
    codes, scale = operand.codes[: operand.free, : operand.contracted], operand.scale
    return Quantized(*((codes, scale) if contract == 1 else (codes.t(), scale.t())), q.spec)
