"""The kernels: one registry, one file per backend."""

from octavo.fp8.kernels.reference import ReferenceBackend
from octavo.fp8.kernels.registry import register

register(ReferenceBackend())
