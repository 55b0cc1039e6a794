"""Batch-invariant operations, whose results for a row depend on neither batch nor length: products, attention, sums of
rows and elementwise functions."""

from octavo.fp8.invariance.attention import TILE
from octavo.fp8.invariance.attention import attention as batch_invariant_attention
from octavo.fp8.invariance.devices import KERNELS, TRIAL_ROWS, InvarianceError, RowKernels, kernels_for, prove
from octavo.fp8.invariance.mode import BatchInvariantMode, checkpoint_contexts, is_active
from octavo.fp8.invariance.products import ROWS
from octavo.fp8.invariance.products import linear as row_linear
from octavo.fp8.invariance.products import mm as row_mm

__all__ = [
    "InvarianceError",
    "KERNELS",
    "ROWS",
    "TRIAL_ROWS",
    "RowKernels",
    "BatchInvariantMode",
    "TILE",
    "is_active",
    "checkpoint_contexts",
    "batch_invariant_attention",
    "kernels_for",
    "prove",
    "row_linear",
    "row_mm",
]
