"""The IEEE 754 square root: the fp32 number nearest to the exact root, on every device.

Codes and weights are bit for bit the same on all backends, so every operation must have one rounding. torch's root has
it on CUDA; on the CPU torch uses a vector library, which is off by one in the last place for half a percent of
arguments (torch 2.13 with MKL), and may differ between the body and the end of an array.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from octavo.base import accelerator


def sqrt(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The root of each element of fp32 `x` (0 or more, or NaN), exactly rounded; into `out` if given.

    On the CPU it uses NumPy if installed, which runs the processor's instruction on the tensor's memory. GPUs have an
    exact root. Otherwise it is computed in fp64, four times as slow: the root of a number of 24 bits is never close to
    the middle of two fp32 numbers, so that rounding the fp64 root is exact.
    """
    if x.device.type != "cpu":
        return torch.sqrt(x, out=out) if _has_exact_sqrt(x.device) else _sqrt_via_fp64(x, out)
    out = torch.empty_like(x) if out is None else out
    numpy = _import_numpy()
    if numpy is None:
        return _sqrt_via_fp64(x, out)
    numpy.sqrt(x.detach().numpy(), out=out.numpy())
    return out


def _sqrt_via_fp64(x: Tensor, out: Tensor | None) -> Tensor:
    wide = x.double().sqrt()
    return wide.float() if out is None else out.copy_(wide)


def _has_exact_sqrt(device: torch.device) -> bool:
    """Whether a device's own root is used: CUDA's is exactly rounded, and without fp64 there is no alternative."""
    return accelerator.is_gpu(device) or device.type == "meta" or not accelerator.supports_dtype(device, torch.float64)


@cache
def _import_numpy() -> ModuleType | None:
    """NumPy, or None where it is not installed or torch was built without it."""
    try:
        import numpy

        torch.zeros(1).numpy()
    except (ImportError, RuntimeError):
        return None
    return numpy
