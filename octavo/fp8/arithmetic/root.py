"""The IEEE 754 square root, correctly rounded to fp32 on every device.

Codes and weights must be equal bit for bit on all backends, so every operation must round exactly once. torch's square
root does so on CUDA. On the CPU torch uses a vector library that is off by one unit in the last place for 0.5 % of
arguments (torch 2.13 with MKL), and whose results may differ between the body and the end of an array.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from octavo.base import accelerator


def sqrt(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the correctly rounded square root of each element of fp32 `x` (>= 0 or NaN), in `out` if passed.

    On the CPU this uses NumPy if installed, which runs the processor's instruction on the tensor's memory. GPUs round
    correctly. Otherwise the root is computed in fp64, which takes four times as long: the square root of a 24-bit
    number is never close to the midpoint of two fp32 numbers, so that rounding the fp64 root is correct.
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
    """True if torch's square root is used: CUDA rounds correctly, and devices without fp64 have no alternative."""
    return accelerator.is_gpu(device) or device.type == "meta" or not accelerator.supports_dtype(device, torch.float64)


@cache
def _import_numpy() -> ModuleType | None:
    """Return NumPy, or None if it is not installed or torch was built without it."""
    try:
        import numpy

        torch.zeros(1).numpy()
    except (ImportError, RuntimeError):
        return None
    return numpy
