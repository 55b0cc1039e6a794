"""Rows of a tensor that lies over several ranks, as DCP can write each once and read them back on any number of ranks.

DTensor covers FSDP2's shards, which divide a dimension as `torch.chunk` does. Two things here are divided otherwise:
the scales of an optimizer's groups of 128 elements, of which a rank holds those that its shard touches (a group cut by
a border lies on both sides of it, and the side with its first element writes it), and the values behind a weight that
keeps FP8 codes. Both are rows `start` to `start + n` of a tensor of `total` rows.

DCP asks any object for `__create_write_items__` and `__create_chunk_list__`; `EachOnce` here and `dcp_safe.TensorsOnly`
then find the tensor in it. `Copied` is what such an object, or a DTensor, becomes in a copy that is written later.
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
class Rows:
    """What of a tensor lies on this rank, and what of that this rank writes.

    here         [n, ...], a plain tensor: rows start to start + n of the whole; it is read from and written into
    start        the first of them in the whole
    total        rows of the whole
    writes       how many of them this rank writes, the last ones: those before are written by the rank before
    """

    here: torch.Tensor
    start: int
    total: int
    writes: int

    @property
    def dtype(self) -> torch.dtype:
        return self.here.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        return torch.Size((self.total, *self.here.shape[1:]))

    def size(self) -> torch.Size:
        return self.shape

    def shard(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor behind an item that this object put into a plan (`SavePlanner.lookup_object`)."""
        first = self.start if index.offset is None else index.offset[0]
        return self.here[first - self.start :]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        if not self.writes:
            return []
        chunk = self._chunk(len(self.here) - self.writes)
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.shape)
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(0)] if len(self.here) else []

    def _chunk(self, skipped: int) -> ChunkStorageMetadata:
        inner = self.here.shape[1:]
        offsets = torch.Size((self.start + skipped, *(0 for _ in inner)))
        return ChunkStorageMetadata(offsets, torch.Size((len(self.here) - skipped, *inner)))


@dataclass(frozen=True)
class Copied:
    """What of a DTensor lay on this rank, in a copy, to be written as the DTensor would have been.

    here   the copy, in host memory
    items  what DCP writes of the DTensor from this rank
    """

    here: torch.Tensor
    items: tuple[WriteItem, ...]

    @classmethod
    def of(cls, name: str, original: DTensor, here: torch.Tensor) -> Copied:
        there = original.device_mesh.get_coordinate() is not None  # a mesh may leave ranks out
        return cls(here, tuple(original.__create_write_items__(name, original)) if there else ())

    def shard(self, index: MetadataIndex) -> torch.Tensor:
        return self.here

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        return list(self.items)


class EachOnce(DefaultSavePlanner):
    """DCP's save planner for a flat dict of tensors, `Rows` and `Copied`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.shard(index) if isinstance(found, Rows | Copied) else super().lookup_object(index)
