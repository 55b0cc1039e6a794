"""Around a layer's casts: the dtype of its GEMMs, requests for casts, and two casts in one pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.kernels.registry import Backend, Borrower


def compute_dtype(x: Tensor) -> torch.dtype:
    """What the GEMMs of x take: autocast's dtype under autocast, which leaves float64 alone, else x's own."""
    lowered = _autocast_enabled(x) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if lowered else x.dtype


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(x.device.type, enabled=False) if _autocast_enabled(x) else nullcontext()


def _autocast_enabled(x: Tensor) -> bool:
    """False also for devices without autocast, such as meta, where asking is an error."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def transformed() -> bool:
    """Whether this runs under a transform of torch.func, which the gradients of FP8 layers do not know."""
    return torch._C._are_functorch_transforms_active()


class Want(NamedTuple):
    """A cast that is asked for: by which backend, under which spec."""

    backend: Backend
    spec: CastSpec


def cast_both(x: Tensor, row: Want, col: Want) -> tuple[Quantized, Quantized]:
    """(x under ``row`` for a contraction of dimension 1, x under ``col`` for one of dimension 0), in one pass over x
    where the first backend, or the one that lends it its casts, can do both: all backends give the same codes."""
    first = row.backend
    one = first is col.backend or isinstance(first, Borrower)
    if one or first.supports("quantize", col.spec, x.device, x.shape) is None:
        return first.quantize_both(x, row.spec, col.spec)
    return first.quantize(x, row.spec, 1), col.backend.quantize(x, col.spec, 0)
