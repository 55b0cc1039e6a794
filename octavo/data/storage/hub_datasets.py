"""Data sets of the Hugging Face hub, by name: fetched by `datasets` into its own cache, or read where they lie.

Which files are a split's is that library's word in both cases. Streamed, they must be parquet: row groups are read
through the network as they are asked for, in the order that a file here would have, so that rows, losses and resume
are the same.
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

from octavo.base.safe_read import first_line
from octavo.data.errors import DataError
from octavo.data.formats.arrow_rows import Rows
from octavo.data.formats.streaming import Groups
from octavo.data.storage.tables import DatasetRows, Shards


def open_named(name: str, revision: str | None, split: str, subset: str | None) -> Rows:
    """The rows of a split, out of the library's cache or fetched now. Raises DataError where they cannot be had."""
    import datasets

    try:
        return DatasetRows(Path(name), datasets.load_dataset(name, subset, split=split, revision=revision))
    except DataError:  # of a file in the library's cache
        raise
    except Exception as cause:  # of a network, of names, of whatever lies in a stranger's repository
        raise _lost(name, revision, split, subset, cause) from cause


@lru_cache(maxsize=64)
def stream_named(name: str, revision: str | None, split: str, subset: str | None) -> Rows:
    """The same rows without a copy. Raises DataError as :func:`open_named`, and where files are no parquet."""
    import datasets
    import huggingface_hub

    try:
        found = datasets.load_dataset_builder(name, subset, revision=revision).config.data_files or {}
        files = [str(file) for file in found[split]]
    except Exception as cause:
        raise _lost(name, revision, split, subset, cause) from cause
    if other := next((file for file in files if not file.endswith(".parquet")), None):
        raise DataError(f"{name} cannot be streamed: {other} is no parquet file. Leave `stream` out")
    system = huggingface_hub.HfFileSystem()
    return Shards(Path(name), files, lambda file: Groups(Path(name), partial(system.open, file, "rb")))


def _lost(name: str, revision: str | None, split: str, subset: str | None, cause: Exception) -> DataError:
    asked = f"split {split}" if subset is None else f"subset {subset}, split {split}"
    return DataError(
        f"the data set {name}, {asked}, revision {revision}, cannot be had from the Hugging Face hub "
        f"({first_line(cause)[:300]})"
    )
