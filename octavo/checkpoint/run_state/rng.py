"""The random number generators of a process as uint8 tensors: Python, NumPy, torch on the CPU, and the accelerator's
generator if it has one, named after the device type.

No pickle: the states of Python and NumPy are written as JSON (integers, and floats in `repr` precision, which is
exact). Each rank stores its states under its own names; DCP writes all of them into one checkpoint.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy
import torch

from octavo.base import accelerator
from octavo.checkpoint.errors import CheckpointError


def collect(rank: int = 0) -> dict[str, torch.Tensor]:
    """Return the states of all generators of this process, {"rng.<rank>.<generator>": uint8 [bytes]}.

    `save` takes them as `extra`.
    """
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    states = {
        "python": _to_bytes(random.getstate()),
        "numpy": _to_bytes([kind, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)]),
        "torch": torch.get_rng_state(),
    }
    device = accelerator.default_device()
    if (device_state := accelerator.rng_state(device)) is not None:
        states[device.type] = device_state
    return {f"rng.{rank}.{name}": state for name, state in states.items()}


def restore(extra: Mapping[str, torch.Tensor], rank: int = 0) -> bool:
    """Set this process's generators from the states that `collect(rank)` returned.

    Returns False, and changes nothing, if the checkpoint has no states of this rank because fewer ranks wrote it; the
    caller then seeds the generators. Raises CheckpointError for a state that its generator rejects.
    """
    device = accelerator.default_device()
    names = ("python", "numpy", "torch", device.type)
    states = {name: extra[key] for name in names if (key := f"rng.{rank}.{name}") in extra}
    if not {"python", "numpy", "torch"} <= set(states):
        return False
    try:
        version, keys, gauss = _from_bytes(states["python"])
        random.setstate((version, tuple(keys), gauss))
        kind, keys, position, has_gauss, gauss = _from_bytes(states["numpy"])
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
        torch.set_rng_state(states["torch"])
        if device.type in states:
            accelerator.set_rng_state(states[device.type], device)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint's random states of rank {rank} do not fit this process's generators ({error}); "
            "they were written by another version, or damaged"
        ) from error
    return True


@contextmanager
def preserve() -> Iterator[None]:
    """Restore the states of all generators after a block, whatever it draws and seeds."""
    states = collect()
    try:
        yield
    finally:
        restore(states)


def _to_bytes(state: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def _from_bytes(tensor: torch.Tensor) -> list:
    return json.loads(bytes(tensor.tolist()))
