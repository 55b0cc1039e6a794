"""Register the backends in increasing order of preference: the last one that supports an operation is chosen."""

from __future__ import annotations

from octavo.fp8.kernels.deepgemm_backend import DeepGemmBackend
from octavo.fp8.kernels.reference import ReferenceBackend
from octavo.fp8.kernels.registry import Backend, register
from octavo.fp8.kernels.torch_backend import TorchBackend
from octavo.fp8.kernels.triton_backend import TritonBackend

BACKENDS: tuple[Backend, ...] = (ReferenceBackend(), TritonBackend(), TorchBackend(), DeepGemmBackend())

for backend in BACKENDS:
    register(backend)
