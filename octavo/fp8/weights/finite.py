"""Find NaN and infinity in many tensors, before they are saved or after a skipped step.

The smallest and the largest value of a tensor decide, and one pass without allocations finds both (on a CPU about 30
times faster than ``isfinite().all()``). All results are fetched together, with one wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.fp8.weights.fp8_tensor import Fp8Weight
from octavo.fp8.weights.shards import local_of

#: the smallest code, without its sign, that is not a finite number
_FIRST_BAD = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}


def find_nonfinite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of tensors with NaN or infinity on this rank, in order; integer tensors are finite.

    Checks the master of an FP8 weight, codes and scales of a frozen one, and this rank's part of a DTensor: ranks that
    must agree have to exchange their results.
    """
    marks: dict[torch.device, list[tuple[str, Tensor]]] = {}
    order = []
    for name, tensor in named:
        order.append(name)
        for part in _parts(tensor):
            if part.is_floating_point() and part.numel():
                marks.setdefault(part.device, []).append((name, _is_finite(part)))
    bad: set[str] = set()
    for on_device in marks.values():
        finite = torch.stack([mark for _, mark in on_device]).tolist()
        bad |= {name for (name, _), is_finite in zip(on_device, finite, strict=True) if not is_finite}
    return [name for name in order if name in bad]


def _parts(tensor: Tensor) -> list[Tensor]:
    here = local_of(tensor.detach())
    if not isinstance(here, Fp8Weight):
        return [here]
    return [here.master] if here.stored is None else [part for q in here.stored.codes for part in (q.data, q.scale)]


def _is_finite(x: Tensor) -> Tensor:
    """Return a 0-d bool tensor on the device of x, True if all elements are finite."""
    if x.dtype is torch.float8_e8m0fnu:
        return x.view(torch.uint8).amax() < 0xFF
    if x.dtype in _FIRST_BAD:
        return (x.view(torch.uint8) & 0x7F).amax() < _FIRST_BAD[x.dtype]
    low, high = x.aminmax()  # both are NaN if any element is
    return low.isfinite() & high.isfinite()
