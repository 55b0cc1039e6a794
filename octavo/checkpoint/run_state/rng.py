"""The random number generators of a process as uint8 tensors: python, numpy, torch's of the CPU, and the
accelerator's own where it has one, under its type of device.

No pickle: python's and numpy's states are written as JSON (integers, and floats in `repr` precision, so exactly).
Each rank stores its own under its own names; DCP then writes all of them into one checkpoint.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import numpy
import torch

from octavo.base import accelerator
from octavo.checkpoint.errors import CheckpointError


def collect(rank: int = 0) -> dict[str, torch.Tensor]:
    """All generators of this process, {"rng.<rank>.<generator>": uint8 [bytes]}, for `save`'s `extra`."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    states = {
        "python": _to_bytes(random.getstate()),
        "numpy": _to_bytes([kind, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)]),
        "torch": torch.get_rng_state(),
    }
    device = accelerator.here()
    if (own := accelerator.rng_state(device)) is not None:
        states[device.type] = own
    return {f"rng.{rank}.{name}": state for name, state in states.items()}


def restore(extra: Mapping[str, torch.Tensor], rank: int = 0) -> bool:
    """Set this process's generators from what `collect(rank)` gave. False, and nothing changed, if the checkpoint
    has none for this rank (it was written by fewer ranks): the caller seeds anew.

    Raises CheckpointError for a state that its generator does not take.
    """
    device = accelerator.here()
    names = ("python", "numpy", "torch", device.type)
    mine = {name: extra[key] for name in names if (key := f"rng.{rank}.{name}") in extra}
    if not {"python", "numpy", "torch"} <= set(mine):
        return False
    try:
        version, keys, gauss = _from_bytes(mine["python"])
        random.setstate((version, tuple(keys), gauss))
        kind, keys, position, has_gauss, gauss = _from_bytes(mine["numpy"])
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
        torch.set_rng_state(mine["torch"])
        if device.type in mine:
            accelerator.set_rng_state(mine[device.type], device)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint's random states of rank {rank} do not fit the generators here ({error}); "
            "they were written by another version, or damaged"
        ) from error
    return True


def _to_bytes(state: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def _from_bytes(tensor: torch.Tensor) -> list:
    return json.loads(bytes(tensor.tolist()))
