"""Safetensors files that are encrypted while their values arrive, in a fixed order.

An encrypted file is written sequentially and nothing in it is written twice, because a chunk written twice would reuse
its nonce. So values must come in the order of the layout, and each rank writes separate files. All tensors of a file
have the same element size, so that they are aligned without sorting.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from octavo.base import encryption
from octavo.base.wording import count_noun
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.export.files import PlannedTensor, nbytes, shard_names
from octavo.models.folder.folder import INDEX
from octavo.models.folder.headers import DTYPE_NAMES, Header, compose, make_index


class EncryptedShards:
    """Like `export.files.Shards`, for values that come in the order of `tensors`.

    owners  tensor -> the rank that writes it
    rank    the rank of this process
    folder  the encrypted folder that the files belong to
    """

    def __init__(
        self, directory: Path, tensors: Iterable[PlannedTensor], largest: int, owners: Mapping[str, int], rank: int,
        folder: encryption.Folder,
    ) -> None:  # fmt: skip
        self._directory, self._rank, self._folder = directory, rank, folder
        self._shards: list[list[PlannedTensor]] = []
        self._owner: list[int] = []
        open_files: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # (rank, element size) -> (its open file, bytes left in it)
        for planned in tensors:
            key, size = (owners[planned[0]], planned[1].itemsize), nbytes(planned[1], planned[2])
            number, left = open_files.get(key, (0, -1))
            if size > left:
                number, left = len(self._shards), largest
                self._shards.append([])
                self._owner.append(key[0])
            self._shards[number].append(planned)
            open_files[key] = number, max(left - size, 0)
        self._names = shard_names(len(self._shards))
        self._place = {name: n for n, shard in enumerate(self._shards) for name, _, _ in shard}
        self._headers = [self._header(n) for n in range(len(self._shards))]
        self._next = [0] * len(self._shards)
        self._open: dict[int, encryption.Writer] = {}

    def open(self, create: bool = True) -> None:
        """Do nothing: the writing rank creates each file with its first tensor."""

    def close(self) -> None:
        for writer in self._open.values():
            writer.out.close()
        self._open.clear()

    def write(self, name: str, tensor: Tensor) -> None:
        """Append a tensor. Raises AssertionError if it is not the next one of its file."""
        number = self._place[name]
        shard = self._shards[number]
        planned = shard[self._next[number]]
        assert planned == (name, tensor.dtype, tuple(tensor.shape)), (planned, name, tensor.dtype, tensor.shape)
        assert self._owner[number] == self._rank, (name, self._owner[number])
        if number not in self._open:
            path = self._directory / self._names[number]
            self._open[number] = encryption.Writer(open(path, "wb"), place=self._folder.place(path))  # noqa: SIM115
            self._open[number].write(self._headers[number].head)
        writer = self._open[number]
        data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        writer.write(data.numpy().data)
        self._next[number] += 1
        if self._next[number] == len(shard):
            writer.finish()
            writer.out.flush()
            os.fsync(writer.out.fileno())
            self._open.pop(number).out.close()

    def flush(self) -> None:
        """Raise CheckpointError if a tensor of this rank was not written."""
        for number, shard in enumerate(self._shards):
            if self._owner[number] == self._rank and self._next[number] < len(shard):
                raise CheckpointError(
                    f"no values for {count_noun(len(shard) - self._next[number], 'tensor')} of the model, first "
                    f"{shard[self._next[number]][0]}: the weights do not match this model's configuration"
                )

    def write_index(self) -> None:
        """Write the index if there are several files."""
        if len(self._shards) > 1:
            self._folder.put(self._directory / INDEX, make_index(self._headers).encode())

    def _header(self, number: int) -> Header:
        tensors = [(name, DTYPE_NAMES[dtype], shape) for name, dtype, shape in self._shards[number]]
        return compose(self._names[number], tensors)
