"""Rows of a tensor that is distributed over ranks: DCP writes each row once and reads them on any number of ranks.

DTensor covers FSDP2's shards, which divide a dimension as `torch.chunk` does. Two kinds of tensor are divided
differently: the scales of an optimizer's groups of 128 elements, of which a rank holds those that its shard touches (a
group that a shard boundary cuts is on both ranks, and the rank with its first element writes it), and the master values
of a weight that keeps FP8 codes. Both are rows `start` to `start + n` of a tensor of `total` rows.

DCP calls `__create_write_items__` and `__create_chunk_list__` on any object that has them; `TensorSavePlanner` and
`dcp_safe.TensorLoadPlanner` then look up the tensor in it. `CopiedShard` replaces a DTensor in a copy that is written
later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class ShardedRows:
    """The rows of a tensor on this rank, and how many of them it writes.

    local         [n, ...], a plain tensor: rows start to start + n of the full tensor. Saves read it, loads fill it
    start        index of the first row in the full tensor
    total        number of rows of the full tensor
    writes       number of rows that this rank writes, its last ones; the previous rank writes the others
    """

    local: torch.Tensor
    start: int
    total: int
    writes: int

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the full tensor."""
        return torch.Size((self.total, *self.local.shape[1:]))

    def size(self) -> torch.Size:
        return self.shape

    def shard(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor of an item that this object put into a plan (`SavePlanner.lookup_object`)."""
        first = self.start if index.offset is None else index.offset[0]
        return self.local[first - self.start :]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        if not self.writes:
            return []
        chunk = self._chunk(len(self.local) - self.writes)
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.shape)
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(0)] if len(self.local) else []

    def _chunk(self, skipped: int) -> ChunkStorageMetadata:
        inner = self.local.shape[1:]
        offsets = torch.Size((self.start + skipped, *(0 for _ in inner)))
        return ChunkStorageMetadata(offsets, torch.Size((len(self.local) - skipped, *inner)))


@dataclass(frozen=True)
class CopiedShard:
    """A copy of this rank's shard of a DTensor, which DCP writes as it would write the DTensor.

    local   the copy, in host memory
    items  the items that DCP writes for the DTensor from this rank
    """

    local: torch.Tensor
    items: tuple[WriteItem, ...]

    @classmethod
    def of(cls, name: str, original: DTensor, local: torch.Tensor) -> CopiedShard:
        in_mesh = original.device_mesh.get_coordinate() is not None  # a mesh may leave ranks out
        return cls(local, tuple(original.__create_write_items__(name, original)) if in_mesh else ())

    def shard(self, index: MetadataIndex) -> torch.Tensor:
        return self.local

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        return list(self.items)


class TensorSavePlanner(DefaultSavePlanner):
    """DCP's save planner for a flat dict of tensors, `ShardedRows` and `CopiedShard`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.shard(index) if isinstance(value, ShardedRows | CopiedShard) else super().lookup_object(index)
