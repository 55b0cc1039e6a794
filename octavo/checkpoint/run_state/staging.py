"""Copies a snapshot of a run to host memory, so that training can continue while it is written.

The stager of DCP's `async_save` is not used: it copies whole storages, refuses weights of FP8 codes, and keeps separate
shared memory for each tensor. Here a single buffer in host memory, as large as the bytes that this rank writes, takes
all tensors. On a GPU machine it is pinned in place (torch's allocator of pinned memory rounds up to powers of two), so
that the GPU copies at the speed of its bus. The buffer is reused by later saves.

`Staging.copy` returns when everything is copied. If it returned earlier, the next forward could run meanwhile, but the
update of the weights, which happens inside the backward under `optimizer.update: backward`, would have to wait. The
copy takes a tenth of a second for 6 GB, which is not worth that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from octavo.base import accelerator
from octavo.base.byte_size import format_bytes
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.run_state.expert_rows import CopiedShard, ShardedRows
from octavo.checkpoint.run_state.writing import Snapshot
from octavo.fp8.weights import plain

_ALIGN = 256  # bytes; offsets in the buffer are multiples of this, so that any dtype is aligned


class Staging:
    """Host memory for one snapshot. ``device``: the device of most of the run's tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with copied tensors, which stay unchanged until the next call."""
        # Extra tensors are copied separately: they are small, and change in size from save to save.
        shards = {
            name: _local_tensor(value) for name, value in snapshot.tensors.items() if not name.startswith("extra.")
        }
        self._reserve(sum(_padded_size(tensor) for tensor in shards.values()))
        copies: dict[str, Any] = {}
        offset = 0
        for name, value in snapshot.tensors.items():
            if name not in shards:
                copied = value.detach().to("cpu", copy=True)
            else:
                local = shards[name]
                copied = self._buffer[offset : offset + local.nbytes].view(local.dtype).view(local.shape)
                copied.copy_(local, non_blocking=True)
                offset += _padded_size(local)
            copies[name] = _wrap_copy(name, value, copied)
        if accelerator.has_own_memory(self._device):  # the copies above are asynchronous
            accelerator.current_stream(self._device).synchronize()
        return replace(snapshot, tensors=copies)

    def close(self) -> None:
        """Free the memory."""
        if self._pinned:
            accelerator.unpin(self._buffer)
            self._pinned = False
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _reserve(self, size: int) -> None:
        if len(self._buffer) >= size:
            return
        self.close()
        try:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:  # host memory is exhausted
            raise CheckpointError(_allocation_error(size)) from error
        pinned = accelerator.pin_in_place(self._buffer, self._device)
        if pinned is False:
            raise CheckpointError(_allocation_error(size))
        self._pinned = pinned is True


def _allocation_error(size: int) -> str:
    return (
        f"run.save: async keeps a copy of the checkpoint in host memory, and {format_bytes(size)} for this rank's part "
        "could not be allocated. Set run.save: sync"
    )


def _local_tensor(value: Any) -> torch.Tensor:
    """Return the plain tensor with this rank's shard."""
    return value.local if isinstance(value, ShardedRows) else plain(value)


def _padded_size(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN) * _ALIGN


def _wrap_copy(name: str, value: Any, copied: torch.Tensor) -> Any:
    if isinstance(value, ShardedRows):
        return replace(value, local=copied)
    return CopiedShard.of(name, value, copied) if isinstance(value, DTensor) else copied
