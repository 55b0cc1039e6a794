"""FP8 operations and their backends: a registry, one file per backend, and the memory layout of codes."""

from octavo.fp8.kernels.backends import BACKENDS
from octavo.fp8.kernels.capture import CudaGraph, Graph, assume_constant_weights, forbid_synchronization
from octavo.fp8.kernels.groups import Groups
from octavo.fp8.kernels.layout import ALIGN, PAGED_CHUNK, padded_sizes
from octavo.fp8.kernels.other_gpus import backends_on
from octavo.fp8.kernels.registry import Backend, BackendError, Selection, get, names, select
from octavo.fp8.kernels.triton_backend import (
    PagedKernels,
    paged_kernels,
    quantize_both_by_warps,
    why_not_paged,
    why_not_rows,
)

__all__ = [
    "ALIGN", "BACKENDS", "Backend", "BackendError", "CudaGraph", "Graph", "Groups", "PAGED_CHUNK", "PagedKernels",
    "Selection", "assume_constant_weights", "backends_on", "forbid_synchronization", "get", "names", "padded_sizes",
    "paged_kernels", "quantize_both_by_warps", "select", "why_not_paged", "why_not_rows",
]  # fmt: skip
