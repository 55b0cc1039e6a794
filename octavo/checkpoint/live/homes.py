"""The weight files of a model that is being written, in one folder or in three.

Tensors of a model in three folders are named after the folder that they belong to; inside it they have the names that
are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from octavo.base import encryption
from octavo.checkpoint.export.encrypted import EncryptedShards
from octavo.checkpoint.export.files import Planned, Shards


class Homes:
    """As `Shards`, for the folders `parts` of a directory, or without them for itself. `owners`: tensor -> the rank
    that writes it; `encrypted`: then values come in the order of `tensors`."""

    def __init__(
        self, directory: Path, tensors: Iterable[Planned], largest: int, owners: Mapping[str, int], rank: int,
        parts: Sequence[str] = (), encrypted: encryption.Folder | None = None,
    ) -> None:  # fmt: skip
        self._named = bool(parts)
        planned: dict[str, list[Planned]] = {part: [] for part in parts or ("",)}
        for name, dtype, shape in tensors:
            part, name = self._place(name)
            planned[part].append((name, dtype, shape))
        own: dict[str, dict[str, int]] = {part: {} for part in planned}
        for tensor, owner in owners.items():
            part, name = self._place(tensor)
            own[part][name] = owner
        self._shards: dict[str, Shards | EncryptedShards] = {}
        for part, named in own.items():
            if encrypted is not None:
                self._shards[part] = EncryptedShards(directory / part, planned[part], largest, named, rank, encrypted)
            else:
                mine = [name for name, owner in named.items() if owner == rank]
                self._shards[part] = Shards(directory / part, planned[part], largest, mine)
        self._folders = [directory / part for part in parts]

    def _place(self, name: str) -> tuple[str, str]:
        """(folder, name in it) of a tensor."""
        part, _, inside = name.partition(".")
        return (part, inside) if self._named else ("", name)

    def open(self, create: bool = True) -> None:
        """Make the files, with their headers, or open those that another process made."""
        for folder in self._folders:
            folder.mkdir(exist_ok=True)
        for shards in self._shards.values():
            shards.open(create)

    def close(self) -> None:
        for shards in self._shards.values():
            shards.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into its place."""
        part, inside = self._place(name)
        self._shards[part].write(inside, tensor)

    def flush(self) -> None:
        """Force what this process wrote to the disk. Raises CheckpointError if a tensor never came."""
        for shards in self._shards.values():
            shards.flush()

    def write_index(self) -> None:
        """The list of what is where, in each folder with several files."""
        for shards in self._shards.values():
            shards.write_index()
