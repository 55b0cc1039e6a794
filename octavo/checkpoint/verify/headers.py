"""Reads and checks the weight files of a folder: headers, index, and stray files.

Tensors are read in pieces of rows, so that none has to fit into memory. Nothing is unpickled: pickles are recognized by
their first bytes.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from octavo.base import safe_read
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.verify.findings import Findings
from octavo.models.folder.folder import find_pickles, weight_map
from octavo.models.folder.headers import DTYPES, HeaderError, is_pickle, read

PIECE = 1 << 25
"""Maximum bytes of a tensor that are read at once (a single row may be longer)."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file.

    name   name on disk
    path   the file; the tensor's `size` bytes begin at `start`
    dtype  safetensors' name of the dtype
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def file(self) -> str:
        return self.path.name

    @property
    def fp8(self) -> bool:
        return self.dtype in ("F8_E4M3", "F8_E5M2")

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns) with leading dimensions folded into rows; a scalar is (1, 1)."""
        return (math.prod(self.shape[:-1]), self.shape[-1]) if self.shape else (1, 1)

    @property
    def width(self) -> int:
        """Bytes of a row of the matrix."""
        return self.matrix[1] * DTYPES[self.dtype].itemsize

    def read(self) -> Tensor:
        """Read the whole tensor in its own dtype: for scales and other small tensors."""
        return self._bytes(0, self.size).view(DTYPES[self.dtype]).view(self.shape)

    def rows(self, step: int = 1) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows of the matrix) from top to bottom, about PIECE bytes at a time, in multiples of `step`
        rows."""
        count, width = self.matrix[0], self.width
        if not width or not count:
            return
        rows_at_once = max(1, PIECE // (width * step)) * step
        for first in range(0, count, rows_at_once):
            last = min(first + rows_at_once, count)
            yield first, self.window(first, last)

    def window(self, first: int, last: int) -> Tensor:
        """Read the rows `first` to `last` (exclusive) of the matrix."""
        raw = self._bytes(first * self.width, last * self.width)
        return raw.view(DTYPES[self.dtype]).view(last - first, self.matrix[1])

    def _bytes(self, begin: int, end: int) -> Tensor:
        if end == begin:
            return torch.empty(0, dtype=torch.uint8)
        buffer = bytearray(end - begin)
        with safe_read.open_file(self.path, CheckpointError) as file:
            file.seek(self.start + begin)
            count = cast(io.BufferedIOBase, file).readinto(buffer)  # BinaryIO does not declare readinto
        if count != end - begin:
            raise CheckpointError(f"{self.path} was truncated or changed while it was read; verify it again.")
        return torch.frombuffer(buffer, dtype=torch.uint8)


@dataclass
class Headers:
    """All tensors of a folder's weight files by name; `doubles` lists pairs of tensors with one name in two files."""

    folder: Path
    tensors: dict[str, FileTensor] = field(default_factory=dict)
    doubles: list[tuple[FileTensor, FileTensor]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())


def read_folder(folder: Path, findings: Findings, stem: str = "model") -> Headers:
    """Read the weight files that loaders take: `stem`.safetensors, else the shards of its index.

    Problems are added to `findings`; everything that could be read is returned.
    """
    headers = Headers(folder)
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    placed: dict[str, str] | None = None
    with findings.collect_errors(index.name, "index"):
        placed = weight_map(index) if os.path.lexists(index) else None
    _check_pickles(folder, findings, any(folder.glob("*.safetensors")))
    if os.path.lexists(single):
        missing = sorted(file for file in set((placed or {}).values()) if not os.path.lexists(folder / file))
        if missing:
            findings.fail("index-stale", index.name, single=single, count=len(missing), first=missing[0])
        elif placed is not None:
            findings.warn("two-layouts", index.name, folder=folder, single=single)
        read_file(headers, single, findings)
    elif placed is not None:
        _read_shards(folder, index, placed, headers, findings)
    elif not any(f.kind in ("only-pickles", "index") for f in findings):
        findings.fail("no-weights", folder=folder, single=single, index=index)
    listed = {path.name for path in headers.files} | set((placed or {}).values())
    for path in sorted(folder.glob("*.safetensors")):
        if path.name in listed or not listed:
            continue
        # What vLLM does with these two kinds depends on more than the files: `servers.files`.
        if path.name.startswith("."):
            findings.warn("extra-shard/hidden", path.name)
        elif path.name.startswith("consolidated") and stem == "model":
            (findings.warn if placed else findings.fail)("extra-shard/consolidated", path.name)
        elif placed:
            findings.warn("extra-shard/unnamed", path.name, index=index)
        elif path.name.startswith(stem) or stem == "model":
            findings.fail("extra-shard/beside", path.name, single=single)
    return headers


def _check_pickles(folder: Path, findings: Findings, safetensors: bool) -> None:
    candidates = [name for name in find_pickles(folder) if name.endswith(".bin") or "model" in name]
    weights = [name for name in candidates if is_pickle(folder / name)]
    if weights and not safetensors:
        findings.fail("only-pickles", weights[0])
    elif weights:
        findings.warn("pickle-beside", weights[0], count=len(weights))


def _read_shards(folder: Path, index: Path, placed: dict[str, str], headers: Headers, findings: Findings) -> None:
    missing: set[str] = set()
    for file in sorted(set(placed.values())):
        if os.path.lexists(folder / file):
            read_file(headers, folder / file, findings)
        else:
            tensors = sorted(name for name, shard in placed.items() if shard == file)
            findings.fail("missing-shard", file, tensors[0], index=index, others=len(tensors) - 1)
            missing.add(file)
    files_read = {path.name for path in headers.files}
    for name, shard in placed.items():
        tensor = headers.tensors.get(name)
        if shard in missing or (shard not in files_read and tensor is None):
            continue
        if tensor is None:
            findings.fail("index-tensor", shard, name, index=index)
        elif tensor.file != shard and not any(tensor.name == second.name for _, second in headers.doubles):
            findings.fail("index-entry/elsewhere", index.name, name, shard=shard, file_with_it=tensor.file)
    for name, tensor in headers.tensors.items():
        if name not in placed:
            findings.fail("index-entry/none", tensor, index=index)
    for first, second in headers.doubles:
        findings.fail("duplicate", second, first=first)


def read_file(headers: Headers, path: Path, findings: Findings) -> None:
    headers.files.append(path)
    try:
        header = read(path)
    except HeaderError as error:
        kind = "header" if error.kind == "unread" else error.kind
        state = {"truncated": "truncated", "unread": "unreadable"}.get(error.kind, "damaged")
        findings.fail(kind, path.name, text=f"{path.name} is {state}: {error}.")
        return
    start = len(header.head)
    for entry in header.entries:
        tensor = FileTensor(entry.name, path, entry.dtype, entry.shape, start + entry.begin, entry.size)
        if tensor.name in headers.tensors:
            headers.doubles.append((headers.tensors[tensor.name], tensor))
        else:
            headers.tensors[tensor.name] = tensor
