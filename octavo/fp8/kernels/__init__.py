"""The FP8 operations and their backends: one registry, one file per backend, and the memory layout of codes."""

from octavo.fp8.kernels.backends import BACKENDS
from octavo.fp8.kernels.capture import CudaGraph, Graph, weights_stay, without_waits
from octavo.fp8.kernels.groups import Groups
from octavo.fp8.kernels.layout import ALIGN, PAGED_CHUNK, padded_sizes
from octavo.fp8.kernels.registry import Backend, BackendError, Selection, get, names, select
from octavo.fp8.kernels.self_check import TESTED, SelfCheckError, adamw_checks, ensure, installed, newer
from octavo.fp8.kernels.triton_backend import PagedKernels, paged, why_not_paged, why_not_rows

__all__ = [
    "ALIGN",
    "BACKENDS",
    "Backend",
    "BackendError",
    "CudaGraph",
    "Graph",
    "Groups",
    "PAGED_CHUNK",
    "PagedKernels",
    "Selection",
    "SelfCheckError",
    "TESTED",
    "adamw_checks",
    "ensure",
    "get",
    "installed",
    "names",
    "newer",
    "padded_sizes",
    "paged",
    "select",
    "weights_stay",
    "why_not_paged",
    "why_not_rows",
    "without_waits",
]
