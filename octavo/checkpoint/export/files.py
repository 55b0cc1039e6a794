"""Safetensors files whose contents are known before their values: each value goes to its place as it comes.

Names, dtypes and shapes are laid out first, into shards of a size, and the headers written; values may then come in any
order, and nothing is held back until a shard is full. Equal contents give equal files. The format: eight bytes with
the length of a JSON header, the header (dtype, shape and begin and end of each tensor), the bytes of the tensors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from octavo.checkpoint.errors import CheckpointError
from octavo.models.shards import DTYPES

Planned = tuple[str, torch.dtype, tuple[int, ...]]

_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_of(text: str) -> int:
    """Bytes of "5GB", "500MB", "2GiB"; decimal units as transformers reads them. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise ValueError(f"expected a size such as 5GB or 500MB, found {text!r}")
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


def nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count * dtype.itemsize


@dataclass
class _Place:
    file: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    written: bool = False


class Shards:
    """The weight files of a model folder, being written. Use `with`: files are closed whatever happens."""

    def __init__(self, directory: Path, tensors: Iterable[Planned], largest: int) -> None:
        """Lay out `tensors` in files of at most `largest` bytes (a tensor above that has a file of its own)."""
        self._directory = directory
        self._files: list[BinaryIO] = []
        self._places: dict[str, _Place] = {}
        self.shards: list[list[Planned]] = []
        room = 0
        for planned in tensors:
            size = nbytes(planned[1], planned[2])
            if not self.shards or size > room:
                self.shards.append([])
                room = largest
            self.shards[-1].append(planned)
            room = max(room - size, 0)
        self.total = sum(nbytes(dtype, shape) for shard in self.shards for _, dtype, shape in shard)

    @property
    def names(self) -> list[str]:
        """The files, in order."""
        count = len(self.shards)
        if count == 1:
            return ["model.safetensors"]
        return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]

    def __enter__(self) -> Shards:
        for index, shard in enumerate(self.shards):
            header: dict[str, object] = {"__metadata__": {"format": "pt"}}
            offset = 0
            # Wide elements first, so that every tensor is aligned to its own.
            for name, dtype, shape in sorted(shard, key=lambda planned: (-planned[1].itemsize, planned[0])):
                end = offset + nbytes(dtype, shape)
                header[name] = {"dtype": _WORDS[dtype], "shape": list(shape), "data_offsets": [offset, end]}
                self._places[name] = _Place(index, offset, dtype, shape)
                offset = end
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            file = open(self._directory / self.names[index], "wb")
            self._files.append(file)
            file.write(len(text).to_bytes(8, "little") + text)
            for place in self._places.values():
                if place.file == index:
                    place.offset += 8 + len(text)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into its place."""
        place = self._places.get(name)
        assert place is not None and not place.written, name
        assert tensor.dtype is place.dtype and tuple(tensor.shape) == place.shape, (name, tensor.dtype, tensor.shape)
        file = self._files[place.file]
        file.seek(place.offset)
        data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        file.write(data.numpy().data)
        place.written = True

    def finish(self) -> None:
        """Write the index and force everything to the disk. Raises CheckpointError if a tensor never came."""
        missing = [name for name, place in self._places.items() if not place.written]
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors of the model never came, first {missing[0]}: the weights are not those of "
                "this model's configuration"
            )
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        if len(self.shards) > 1:
            weight_map = {name: self.names[place.file] for name, place in sorted(self._places.items())}
            document = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            path = self._directory / "model.safetensors.index.json"
            path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
