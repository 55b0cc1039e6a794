"""The operations and who runs them: one registry, one file a backend, and how codes lie in memory."""

from octavo.fp8.kernels.backends import BACKENDS
from octavo.fp8.kernels.groups import Groups
from octavo.fp8.kernels.registry import Backend, BackendError, Selection, get, names, select

__all__ = ["BACKENDS", "Backend", "BackendError", "Groups", "Selection", "get", "names", "select"]
