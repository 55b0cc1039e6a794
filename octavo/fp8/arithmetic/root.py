"""The square root that IEEE 754 asks for: the nearest fp32 number to the exact root, on every device.

Codes and weights are bit for bit the same on all backends, so every operation must be rounded in one way. torch's
root is, on CUDA; on the CPU it is a vector library's, which misses the nearest number by one in the last place for
half a percent of arguments (torch 2.13 with MKL), and may differ between the body and the end of an array.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from octavo.base import accelerator


def root(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The root of each element of fp32 `x` (0 or more, or NaN), exactly rounded; into `out` where one is given.

    On the CPU NumPy takes it where NumPy is there: it uses the processor's instruction, on the tensor's own memory.
    A GPU has an exact one. Elsewhere it goes through fp64, four times as slow: of a root of 24 bits, which is never
    close to the middle of two fp32 numbers, fp64 knows enough to round it right.
    """
    if x.device.type != "cpu":
        return torch.sqrt(x, out=out) if _exact(x.device) else _by_fp64(x, out)
    out = torch.empty_like(x) if out is None else out
    numpy = _numpy()
    if numpy is None:
        return _by_fp64(x, out)
    numpy.sqrt(x.detach().numpy(), out=out.numpy())
    return out


def _by_fp64(x: Tensor, out: Tensor | None) -> Tensor:
    wide = x.double().sqrt()
    return wide.float() if out is None else out.copy_(wide)


def _exact(device: torch.device) -> bool:
    """Whether a device's own root is taken at its word: CUDA's is exactly rounded, and there is no other way without
    fp64."""
    return accelerator.is_gpu(device) or device.type == "meta" or not accelerator.holds(device, torch.float64)


@cache
def _numpy() -> Any:
    """NumPy, or None where it is not installed or torch was built without it."""
    try:
        import numpy

        torch.zeros(1).numpy()
    except (ImportError, RuntimeError):
        return None
    return numpy
