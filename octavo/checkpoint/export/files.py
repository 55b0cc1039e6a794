"""Safetensors files whose layout is known before their values: each value is written to its offset as it arrives.

Names, dtypes and shapes are first divided into shards of a maximum size, and the headers written. Values may then
arrive in any order, and nothing is buffered until a shard is full. Equal contents give equal files. Several processes
may fill the files: one creates them, and each writes its own tensors.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from octavo.base.wording import count_noun
from octavo.checkpoint.errors import CheckpointError
from octavo.models.folder.folder import INDEX, SINGLE
from octavo.models.folder.headers import DTYPE_NAMES, Header, compose, make_index

PlannedTensor = tuple[str, torch.dtype, tuple[int, ...]]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Return the bytes of "5GB", "500MB" or "2GiB"; GB and MB are decimal, as in transformers. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise ValueError(f"expected a size such as 5GB or 500MB, found {text!r}")
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


def nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


def shard_names(count: int) -> list[str]:
    """Return the names of `count` weight files, in order."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


@dataclass
class _Location:
    file: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    written: bool = False


class Shards:
    """The weight files of a model folder that is being written. Use `with`, which closes the files after errors too."""

    def __init__(
        self, directory: Path, tensors: Iterable[PlannedTensor], largest: int, local_names: Iterable[str] | None = None
    ) -> None:
        """Divide `tensors` into files of at most `largest` bytes (a larger tensor gets a separate file).

        local_names   the tensors that this process writes; all of them by default
        """
        self._directory = directory
        self._files: list[BinaryIO] = []
        self._headers: list[Header] = []
        self._places: dict[str, _Location] = {}
        self._local_names = None if local_names is None else set(local_names)
        self.shards: list[list[PlannedTensor]] = []
        left = 0
        for planned in tensors:
            size = nbytes(planned[1], planned[2])
            if not self.shards or size > left:
                self.shards.append([])
                left = largest
            self.shards[-1].append(planned)
            left = max(left - size, 0)
        self.total = sum(nbytes(dtype, shape) for shard in self.shards for _, dtype, shape in shard)

    @property
    def names(self) -> list[str]:
        """The names of the files, in order."""
        return shard_names(len(self.shards))

    def __enter__(self) -> Shards:
        self.open()
        return self

    def open(self, create: bool = True) -> None:
        """Create the files, with their headers, or open those that another process created."""
        for index, (name, shard) in enumerate(zip(self.names, self.shards, strict=True)):
            # Wide elements first, so that every tensor is aligned to its element size.
            ordered = sorted(shard, key=lambda planned: (-planned[1].itemsize, planned[0]))
            header = compose(name, [(tensor, DTYPE_NAMES[dtype], shape) for tensor, dtype, shape in ordered])
            self._headers.append(header)
            for entry, (tensor, dtype, shape) in zip(header.entries, ordered, strict=True):
                self._places[tensor] = _Location(index, len(header.head) + entry.begin, dtype, shape)
            file = open(self._directory / name, "wb" if create else "r+b")  # noqa: SIM115, closed by close()
            self._files.append(file)
            if create:
                file.write(header.head)
                file.flush()  # before other processes write their tensors

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor at its offset."""
        place = self._places.get(name)
        assert place is not None and not place.written, name
        assert tensor.dtype is place.dtype and tuple(tensor.shape) == place.shape, (name, tensor.dtype, tensor.shape)
        file = self._files[place.file]
        file.seek(place.offset)
        data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        file.write(data.numpy().data)
        place.written = True

    def finish(self) -> None:
        """Write the index and force everything to the disk. Raises CheckpointError for tensors that are missing."""
        self.flush()
        self.write_index()

    def flush(self) -> None:
        """Force the files to the disk. Raises CheckpointError if a tensor of this process was not written."""
        local_names = self._places if self._local_names is None else self._local_names
        if missing := [name for name in local_names if not self._places[name].written]:
            raise CheckpointError(
                f"no values for {count_noun(len(missing), 'tensor')} of the model, first {missing[0]}: the weights do "
                "not match this model's configuration"
            )
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def write_index(self) -> None:
        """Write the index if there are several files."""
        if len(self.shards) > 1:
            (self._directory / INDEX).write_text(make_index(self._headers), encoding="utf-8")
