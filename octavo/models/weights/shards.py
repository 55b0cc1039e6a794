"""Reads tensors of safetensors files without memory maps, so that memory holds only the requested rows.

The pages of a mapped file count as resident memory once they are read; loading that way needs memory for the checkpoint
in addition to the model. Here rows are read at their offsets into allocated memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from octavo.base import encryption, safe_read
from octavo.models.errors import ModelError
from octavo.models.folder.folder import INDEX, SINGLE, check_weight_files, parts_of, weight_map
from octavo.models.folder.headers import DTYPES, Header

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk: its name, file, dtype and shape, and the offset of its bytes in the file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_codes(self) -> bool:
        """Whether it holds 8-bit floats: codes, which need scales."""
        return self.dtype in CODES

    def __str__(self) -> str:
        return f"{self.name} ({self.file.name})"


class Shards:
    """The tensors of several safetensors files, by name in `stored`. Context manager that closes the files.

    duplicates          tensors that are in two files; `stored` has the later one until `open_weights` decides
    differs_from_stock  whether transformers would have read other files of the folder
    bytes_read          bytes of tensors that were read
    """

    def __init__(self, folder: Path, headers: Iterable[Header]) -> None:
        self.stored: dict[str, StoredTensor] = {}
        self.duplicates: list[tuple[StoredTensor, StoredTensor]] = []
        self.differs_from_stock = False
        self.bytes_read = 0
        self._open: dict[Path, BinaryIO] = {}
        for header in headers:
            start = len(header.head)
            for entry in header.entries:
                dtype, file = DTYPES[entry.dtype], folder / header.file
                stored = StoredTensor(entry.name, file, dtype, entry.shape, start + entry.begin)
                if entry.name in self.stored:
                    self.duplicates.append((self.stored[entry.name], stored))
                self.stored[entry.name] = stored

    @property
    def encrypted(self) -> bool:
        """Whether one of the files is encrypted: transformers cannot open it."""
        return any(map(encryption.is_encrypted, {entry.file for entry in self.stored.values()}))

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for opened in self._open.values():
            opened.close()
        self._open.clear()

    def read(self, stored: StoredTensor, rows: tuple[int, int] | None = None, into: Tensor | None = None) -> Tensor:
        """Return rows [begin, end) of a tensor's first dimension, or all if None, on the CPU in the dtype on disk.

        into: contiguous CPU memory of that dtype and size to read into, instead of new memory. Raises ModelError for a
        file that is too short or, if encrypted, damaged.
        """
        begin, end = rows or (0, stored.shape[0] if stored.shape else 1)
        shape = (end - begin, *stored.shape[1:]) if stored.shape else ()
        out = torch.empty(shape, dtype=stored.dtype) if into is None else into
        row = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        if not out.numel():
            return out
        buffer = memoryview(out.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        if stored.file not in self._open:
            self._open[stored.file] = safe_read.open_file(stored.file, ModelError, buffering=0)  # closed by __exit__
        file = self._open[stored.file]
        file.seek(stored.begin + begin * row)
        self.bytes_read += len(buffer)
        while len(buffer):
            try:
                got = file.readinto(buffer)  # type: ignore[attr-defined]
            except encryption.VaultError as cause:
                raise ModelError(f"{cause}. It contains {stored.name}.") from cause
            if not got:
                raise ModelError(
                    f"{stored.file} ends within {stored.name}: it was truncated or changed while it was read."
                )
            buffer = buffer[got:]
        return out


def has_weights(folder: str | Path) -> bool:
    """Return whether a model folder has a weights file, complete or not."""
    folder = Path(folder)
    homes = [folder / part for part in parts_of(folder)] or [folder]
    return any((home / name).exists() for home in homes for name in (SINGLE, INDEX))


def open_weights(folder: Path, quantized: bool) -> tuple[Shards, tuple[str, ...]]:
    """Return the tensors of a folder, and notes about ambiguities that were resolved.

    A folder with `model.safetensors` and an index has two sets of weights. The one that agrees with config.json
    (`quantized`: FP8 codes or not) is used, and if both or neither do, model.safetensors, as in transformers. A tensor
    that is in two shards, in FP8 and in high precision, is read from the shard that the index names; two in the same
    precision are an error.

    Raises ModelError for files that are missing, damaged or inconsistent with the index.
    """
    if not (folder / INDEX).exists():
        return Shards(folder, check_weight_files(folder)), ()
    if not (folder / SINGLE).exists():
        return _open_indexed(folder, quantized)
    single = Shards(folder, check_weight_files(folder))
    try:
        indexed, notes = _open_indexed(folder, quantized)
    except ModelError as error:
        return single, (
            f"{folder} has {SINGLE} and an index; using {SINGLE}, because the shards are not usable: {error}",
        )
    fits = [s for s in (single, indexed) if any(t.is_codes for t in s.stored.values()) == quantized]
    what = "FP8 codes" if quantized else "no FP8 codes"
    why = f"only it has {what}, as config.json requires" if len(fits) == 1 else "as in transformers"
    if fits[:1] == [indexed]:
        indexed.differs_from_stock = True
        note = f"{folder} has two sets of weights: using the shards of {INDEX}, not {SINGLE} ({why})"
        return indexed, (*notes, note)
    return single, (f"{folder} has two sets of weights: using {SINGLE}, not the shards of {INDEX} ({why})",)


def _open_indexed(folder: Path, strict: bool) -> tuple[Shards, tuple[str, ...]]:
    """Return the shards of an index, with every tensor from the file that the index names. `strict`: raise for tensors
    that it does not name, which transformers reads and other loaders do not."""
    shards = Shards(folder, check_weight_files(folder, indexed=True))
    placed = weight_map(folder / INDEX)
    unlisted = [entry for name, entry in shards.stored.items() if name not in placed]
    if strict and unlisted:
        raise ModelError(
            f"{unlisted[0].file} contains {unlisted[0].name} ({len(unlisted)} such tensors), which {INDEX} does not "
            "list: loaders that follow the index would miss it. Write the index again, or download both again."
        )
    notes = []
    for one, other in shards.duplicates:
        if one.is_codes == other.is_codes or not strict:
            raise ModelError(
                f"{one.name} is in {one.file} and in {other.file.name}, and which one loaders use depends on "
                "their order. Remove one of them from its file, or download the folder again."
            )
        listed = placed.get(one.name)
        chosen, left = (one, other) if one.file.name == listed else (other, one)
        shards.stored[one.name] = chosen
        notes.append(
            f"{folder} has {one.name} twice: using {chosen.dtype} in {chosen.file.name}, which the index names, not "
            f"{left.dtype} in {left.file.name}"
        )
    return shards, tuple(notes)
