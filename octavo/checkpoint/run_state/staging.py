"""A moment of a run, copied into host memory, so that the run may go on while it is written.

Why not the stager that comes with DCP's `async_save`: it copies whole storages, refuses weights of FP8 codes, and keeps
shared memory of its own for each tensor. Here one piece of host memory, of just the bytes that this rank writes, takes
everything; on a GPU machine it is pinned as it is (torch's own pinned memory comes in powers of two), which lets the
GPU copy at the speed of its bus. It is kept from save to save.

`Staging.copy` returns when all is copied. It could return earlier and let the next forward run meanwhile; then the
update of the weights, which under `optimizer.update: backward` happens inside the backward, would have to wait for it.
Bytes of a save over the bus's bytes a second, a tenth of a second for 6 GB, are not worth that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from octavo.base import accelerator
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.run_state.expert_rows import Copied, Rows
from octavo.checkpoint.run_state.writing import Moment
from octavo.fp8.weights import plain

_ALIGN = 256  # bytes: where a tensor may begin


class Staging:
    """Host memory for one moment. ``device``: where most of the run's tensors are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def copy(self, moment: Moment) -> Moment:
        """The same moment, of tensors that nobody writes to until the next call."""
        lasting = {name: _here(value) for name, value in moment.tensors.items() if not name.startswith("extra.")}
        self._reserve(sum(_size(tensor) for tensor in lasting.values()))
        found: dict[str, Any] = {}
        at = 0
        for name, value in moment.tensors.items():
            if name not in lasting:  # of other sizes from save to save, and small
                copied = value.detach().to("cpu", copy=True)
            else:
                here = lasting[name]
                copied = self._room[at : at + here.nbytes].view(here.dtype).view(here.shape)
                copied.copy_(here, non_blocking=True)
                at += _size(here)
            found[name] = _in_place_of(name, value, copied)
        if accelerator.has_own_memory(self._device):
            accelerator.current_stream(self._device).synchronize()
        return replace(moment, tensors=found)

    def close(self) -> None:
        """Give the memory back."""
        if self._pinned:
            accelerator.unpin(self._room)
            self._pinned = False
        self._room = torch.empty(0, dtype=torch.uint8)

    def _reserve(self, size: int) -> None:
        if len(self._room) >= size:
            return
        self.close()
        try:
            self._room = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:  # of host memory
            raise CheckpointError(_no_room(size)) from error
        pinned = accelerator.pin_in_place(self._room, self._device)
        if pinned is False:
            raise CheckpointError(_no_room(size))
        self._pinned = pinned is True


def _no_room(size: int) -> str:
    return (
        f"run.save: async keeps a copy of what a checkpoint holds in host memory, and {size / 1e9:.3g} GB for this "
        "rank's part could not be had. Set run.save: sync"
    )


def _here(value: Any) -> torch.Tensor:
    """The ordinary tensor with what lies on this rank."""
    return value.here if isinstance(value, Rows) else plain(value)


def _size(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN) * _ALIGN


def _in_place_of(name: str, value: Any, copied: torch.Tensor) -> Any:
    if isinstance(value, Rows):
        return replace(value, here=copied)
    return Copied.of(name, value, copied) if isinstance(value, DTensor) else copied
