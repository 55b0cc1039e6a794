"""The kernels: one registry, one file per backend. The last registered is preferred where it can serve."""

from octavo.fp8.kernels.deepgemm_backend import DeepGemmBackend
from octavo.fp8.kernels.reference import ReferenceBackend
from octavo.fp8.kernels.registry import register
from octavo.fp8.kernels.torch_backend import TorchBackend
from octavo.fp8.kernels.triton_backend import TritonBackend

register(ReferenceBackend())
register(TritonBackend())
register(TorchBackend())
register(DeepGemmBackend())
