"""Weights on their way from a trainer to an engine: a list of tensors with their SHA-256, and the bytes in pieces.

A piece is a uint8 array with the bytes of several tensors, each at a multiple of 64, so that it can be read as any
dtype. A manifest lists all tensors of a version; those that did not change are in pieces of earlier versions. Equal
digests of two manifests mean equal tensors.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from octavo.generation.errors import GenerationError

PIECE_BYTES = 1 << 28
"""Bytes of a piece, unless one tensor is larger."""
_ALIGNMENT = 64

Pieces = Mapping[str, np.ndarray]
"""Name of a piece -> its bytes, uint8."""


@dataclass(frozen=True)
class ManifestEntry:
    """A tensor: its name, dtype (as in torch) and shape, the SHA-256 of its bytes, and where these are: a piece and the
    offset in it. `piece` is "" for a tensor that is not sent, because the engine has it from another source."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    piece: str = ""
    offset: int = 0

    @property
    def size(self) -> int:
        """Its bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Manifest:
    """All tensors of a version of the weights."""

    entries: tuple[ManifestEntry, ...]

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of names, dtypes, shapes and SHA-256 of all tensors."""
        return digest_of((entry.name, entry.dtype, entry.shape, entry.sha256) for entry in self.entries)

    @property
    def pieces(self) -> tuple[str, ...]:
        """The names of all pieces that hold tensors."""
        return tuple(dict.fromkeys(entry.piece for entry in self.entries if entry.piece))


def digest_of(entries: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Return the digest of tensors (name, dtype, shape, SHA-256), in any order."""
    lines = sorted(f"{name} {dtype} {list(shape)} {sha256}" for name, dtype, shape, sha256 in entries)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor, uint8, without a copy if it is contiguous and in host memory."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def sha256_of(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(bytes_of(tensor).data).hexdigest()


class Weights:
    """The weights of a trainer, as a manifest and pieces for each version.

    Tensors that never change are hashed once and sent once; with ``sends_fixed`` False not at all, because the engine
    reads them from the model's folder.
    """

    def __init__(self, sends_fixed: bool) -> None:
        self._sends_fixed = sends_fixed
        self._fixed: tuple[ManifestEntry, ...] | None = None

    def pack(self, version: int, tensors: Callable[[bool], Iterator[tuple[str, Tensor]]]) -> tuple[Manifest, Pieces]:
        """Return the manifest of a version, and the pieces that were not returned before. `tensors(is_fixed)` yields
        the tensors that never change or all others, by name."""
        pieces: dict[str, np.ndarray] = {}
        if self._fixed is None:
            self._fixed = tuple(_pack(tensors(True), "fixed" if self._sends_fixed else "", pieces))
        changing = tuple(_pack(tensors(False), str(version), pieces))
        return Manifest((*self._fixed, *changing)), pieces

    def skip(self, tensors: Callable[[bool], Iterator[tuple[str, Tensor]]]) -> None:
        """Take the tensors that :meth:`pack` takes, and drop them: where they are gathered from several ranks, the
        others must gather the same ones."""
        for is_fixed in (True, False) if self._fixed is None else (False,):
            for _ in tensors(is_fixed):
                pass
        self._fixed = ()


def _pack(tensors: Iterator[tuple[str, Tensor]], label: str, pieces: dict[str, np.ndarray]) -> Iterator[ManifestEntry]:
    """Yield the entries of tensors, whose bytes are appended to `pieces` under names that begin with `label`; "" sends
    nothing."""
    parts, filled, number = list[np.ndarray](), 0, 0
    for name, tensor in tensors:
        values = bytes_of(tensor)
        entry = ManifestEntry(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            hashlib.sha256(values.data).hexdigest(),
            f"{label}.{number}" if label else "",
            filled,
        )
        yield entry
        if not label:
            continue
        padding = np.zeros(-len(values) % _ALIGNMENT, dtype=np.uint8)
        parts += [values, padding]
        filled += len(values) + len(padding)
        if filled >= PIECE_BYTES:
            pieces[entry.piece] = np.concatenate(parts)
            parts, filled, number = [], 0, number + 1
    if parts:
        pieces[f"{label}.{number}"] = np.concatenate(parts)


def read_tensors(manifest: Manifest, pieces: Pieces) -> Iterator[tuple[ManifestEntry, Tensor]]:
    """Yield the tensors of a manifest that are in `pieces`, as views of the bytes. Raises GenerationError for a piece
    that is too short and for bytes with another SHA-256 than the manifest's."""
    for entry in manifest.entries:
        if entry.piece not in pieces:
            continue
        values = pieces[entry.piece][entry.offset : entry.offset + entry.size]
        if len(values) != entry.size:
            raise GenerationError(f"the weights are incomplete: {entry.name} has {len(values)} of {entry.size} bytes.")
        if hashlib.sha256(values.data).hexdigest() != entry.sha256:
            raise GenerationError(f"the weights are damaged: {entry.name} has another SHA-256 than its manifest.")
        yield entry, _as_tensor(values, entry)


def _as_tensor(values: np.ndarray, entry: ManifestEntry) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, for read-only memory; the view is only read
        return torch.from_numpy(values).view(getattr(torch, entry.dtype)).view(entry.shape)
