"""Rows from Hugging Face's `datasets`: data sets of the hub, downloaded into the cache of that library or streamed, and
folders that it saved.

In both cases the library decides which files belong to a split. Streamed files must be parquet: row groups are read
over the network on demand, in the same order as from a local file, so that rows, losses and resume are the same.
"""

from __future__ import annotations

import os
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from octavo.base import suffixes
from octavo.base.encryption import is_encrypted
from octavo.base.env_vars import cache_home
from octavo.base.safe_read import first_line
from octavo.data import file_digests
from octavo.data.errors import BadSample, DataError
from octavo.data.formats import columnar
from octavo.data.formats.arrow_rows import Rows, decode_row
from octavo.data.formats.columnar import find_large_rows
from octavo.data.formats.streaming import Groups
from octavo.data.storage.shards import Shards


def open_hub_dataset(name: str, revision: str | None, split: str, subset: str | None) -> Rows:
    """Open the rows of a split, from the library's cache or downloaded now. Raises DataError if they are not
    available."""
    import datasets

    try:
        return DatasetRows(Path(name), datasets.load_dataset(name, subset, split=split, revision=revision))
    except DataError:  # a damaged file in the library's cache
        raise
    except Exception as cause:  # errors of many classes: the network, wrong names, the content of the repository
        raise _unavailable_error(name, revision, split, subset, cause) from cause


@lru_cache(maxsize=64)
def stream_hub_dataset(name: str, revision: str | None, split: str, subset: str | None) -> Rows:
    """Open the rows of a split as a stream. Raises DataError as :func:`open_hub_dataset` does, and for files that are
    not parquet."""
    import datasets
    import huggingface_hub

    try:
        by_split = datasets.load_dataset_builder(name, subset, revision=revision).config.data_files or {}
        files = [str(file) for file in by_split[split]]
    except Exception as cause:
        raise _unavailable_error(name, revision, split, subset, cause) from cause
    if other := next((file for file in files if not file.endswith(suffixes.PARQUET)), None):
        raise DataError(f"{name} cannot be streamed: {other} is not a parquet file. Remove `stream`")
    system = huggingface_hub.HfFileSystem()
    return Shards(Path(name), files, lambda file: Groups(Path(name), partial(system.open, file, "rb")))


def _unavailable_error(name: str, revision: str | None, split: str, subset: str | None, cause: Exception) -> DataError:
    part = f"split {split}" if subset is None else f"subset {subset}, split {split}"
    return DataError(
        f"the data set {name}, {part}, revision {revision}, could not be loaded from the Hugging Face hub "
        f"({first_line(cause)[:300]})"
    )


class DatasetRows:
    """The rows of a `datasets.Dataset`, memory-mapped by that library. Its files are validated first, once. `path` is
    its folder, its name on the hub, or `python:NAME` for rows of a program; `folder` is the cache folder with the notes
    of valid files, or None for the default. Raises DataError for a damaged file."""

    def __init__(self, path: Path | str, dataset: Any, folder: Path | None = None) -> None:
        for file in dataset.cache_files:
            validate(Path(file["filename"]), folder)
        self.path, self._dataset = path, dataset.with_format("arrow")
        self._repeats = any(columnar.may_share_bytes(field.type) for field in dataset.data.schema)

    def __len__(self) -> int:
        return len(self._dataset)

    def keys(self) -> set[str]:
        return {*self._dataset.column_names}

    def __getitem__(self, row: int) -> Any:
        table = self._dataset[row : row + 1]
        if (self._repeats or table.nbytes > columnar.TEXT_BYTES) and (problems := find_large_rows(table)):
            raise BadSample(self.path, row, problems[0])
        return decode_row(self.path, row, table)


def validate(file: Path, folder: Path | None) -> None:
    """Check an Arrow file that `datasets` wrote, by reading it once for each version. Raises DataError."""

    def damaged(cause: Exception) -> DataError:
        return DataError(f"{file} is damaged ({columnar.error_line(cause)}); copy it again, or save the data set again")

    try:
        file_digests.check_once(
            file, cache_home() if folder is None else folder, lambda: columnar.check_file(file, damaged)
        )
    except OSError as cause:
        raise damaged(cause) from cause


def open_saved(path: Path, folder: Path | None = None) -> DatasetRows:
    """Open the rows of a folder that `Dataset.save_to_disk` wrote. Raises DataError if it cannot be read or has
    several splits."""
    import datasets

    if encrypted := next(filter(is_encrypted, sorted(path.iterdir())), None):
        raise DataError(f"{encrypted} is encrypted, but folders of `datasets` are memory-mapped. Save it as parquet "
                        "(Dataset.to_parquet) and encrypt that")  # fmt: skip
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if (entry / "state.json").is_file())
        raise DataError(f"{path} has several splits; name the folder of one of them, such as {path / splits[0]}"
                        if splits else f"{path} names splits, but has none of them")  # fmt: skip
    for file in sorted(path.glob("*.arrow")):
        validate(file, folder)
    try:
        return DatasetRows(path, datasets.load_from_disk(os.fspath(path)), folder)
    except DataError:
        raise
    except Exception as cause:  # the library raises errors of many classes for damaged files
        raise DataError(f"{path} is not a readable folder of `datasets` ({type(cause).__name__}: {cause})") from cause
