"""Safetensors files that are encrypted as their values come, in the order that was laid out.

An encrypted file is written from its beginning to its end and never gone back in: a chunk that is written twice would
use a nonce twice. So values have one order, a file has one writer, and each rank writes files of its own; elements of
one width to a file, so that every tensor is aligned to its own without another order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from octavo.base import encryption
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.export.files import Planned, names_of, nbytes
from octavo.models.folder.folder import INDEX
from octavo.models.folder.headers import WORDS, Header, compose, index_of


class EncryptedShards:
    """As `export.files.Shards`, for values that come in the order of `tensors`. `owners`: tensor -> the rank that
    writes it; `rank`: this process's; `folder`: that they are bound to."""

    def __init__(
        self, directory: Path, tensors: Iterable[Planned], largest: int, owners: Mapping[str, int], rank: int,
        folder: encryption.Folder,
    ) -> None:  # fmt: skip
        self._directory, self._rank, self._folder = directory, rank, folder
        self._shards: list[list[Planned]] = []
        self._owner: list[int] = []
        begun: dict[tuple[int, int], tuple[int, int]] = {}  # of a rank and a width: the file, and room in it
        for planned in tensors:
            key, size = (owners[planned[0]], planned[1].itemsize), nbytes(planned[1], planned[2])
            number, left = begun.get(key, (0, -1))
            if size > left:
                number, left = len(self._shards), largest
                self._shards.append([])
                self._owner.append(key[0])
            self._shards[number].append(planned)
            begun[key] = number, max(left - size, 0)
        self._names = names_of(len(self._shards))
        self._place = {name: n for n, shard in enumerate(self._shards) for name, _, _ in shard}
        self._headers = [self._header(n) for n in range(len(self._shards))]
        self._next = [0] * len(self._shards)
        self._open: dict[int, encryption.Writer] = {}

    def open(self, create: bool = True) -> None:
        """Nothing yet: each file is made by its writer, with its first tensor."""

    def close(self) -> None:
        for writer in self._open.values():
            writer.out.close()
        self._open.clear()

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor behind the one before it."""
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
        """Raises CheckpointError if a tensor of this rank's never came."""
        for number, shard in enumerate(self._shards):
            if self._owner[number] == self._rank and self._next[number] < len(shard):
                raise CheckpointError(
                    f"{len(shard) - self._next[number]} tensors of the model never came, first "
                    f"{shard[self._next[number]][0]}: the weights are not those of this model's configuration"
                )

    def write_index(self) -> None:
        """The list of what is where, of several files."""
        if len(self._shards) > 1:
            self._folder.put(self._directory / INDEX, index_of(self._headers).encode())

    def _header(self, number: int) -> Header:
        tensors = [(name, WORDS[dtype], shape) for name, dtype, shape in self._shards[number]]
        return compose(self._names[number], tensors)
