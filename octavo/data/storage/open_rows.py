"""Rows of a data file or a folder of files, by number.

All formats except tar are converted to Arrow tables (`arrow_rows.py`); for a tar an index is written. The converted
forms of larger files are in the cache, mapped into memory (`cache.py`). The readers of the formats are in
`registry.py`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from itertools import repeat
from pathlib import Path

import pyarrow as pa

from octavo.base import suffixes
from octavo.base.byte_size import format_bytes
from octavo.base.encryption import is_encrypted
from octavo.base.env_vars import cache_home
from octavo.base.safe_read import open_file, size_of
from octavo.base.wording import count_noun
from octavo.data import file_digests
from octavo.data.errors import DataError
from octavo.data.file_digests import Stat, stat_key
from octavo.data.formats import registry
from octavo.data.formats.arrow_rows import Rows
from octavo.data.formats.registry import Format
from octavo.data.formats.text_files import TextFiles, find_text_files, is_text_file
from octavo.data.storage import cache
from octavo.data.storage.hub_datasets import open_saved
from octavo.data.storage.shards import Shards

EXPECTED = (
    "a JSON, JSONL, CSV, parquet or tar file, a folder of such files or one that `datasets` saved, or text (.txt, .md) "
    "for train.phase: pretrain"
)
MAX_FILES_IN_MEMORY, MAX_BYTES_IN_MEMORY = (
    16,
    64 << 20,
)  # a folder with more files, or more bytes, is not converted in memory
MAX_OPEN_FILES = 128  # cache files and tars that stay open
PARALLEL_INDEX_BYTES = 64 << 20  # from this many bytes on, tars are indexed by several processes
MAX_PROCESSES = 8
MAX_KINDS = 4  # kinds of files that a message lists


def open_rows(
    path: str | Path, folder: Path | None = None, log: cache.Log = cache.no_log, stream: bool = False
) -> Rows:
    """Open a data file by its suffix, JSON and JSONL by their first characters; or a folder that `datasets` saved, or
    one with files of one kind, in the order of their names. `folder` is the cache folder, or None for the default. With
    `stream`, rows are read from the original files, and nothing is written to the cache.

    Raises `DataError` for a file that is missing, not a regular file, empty, or without rows; for a JSON list that is
    not UTF-8 or has a broken structure; for other formats as their entries in :mod:`octavo.data.formats.registry` do;
    and as `cache.cached_file` does.
    """
    path = Path(path)
    rows = _open_folder(path, folder, log, stream) if path.is_dir() else _open_file(path, folder, log, stream)
    if len(rows) == 0:
        raise DataError(f"{path} has no rows; expected a JSON list of rows, one JSON object per line, or a table")
    return rows


def _open_folder(path: Path, folder: Path | None, log: cache.Log, stream: bool) -> Rows:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        if stream:
            raise DataError(f"{path}: folders of `datasets` are never copied; remove `stream`")
        return open_saved(path, folder)
    listed = cache.list_row_files(path)
    if listed and all(is_text_file(file.name) for file in listed):
        return _open_texts(path, listed, stream, log)
    files = [file for file in listed if file.suffix.lower() in registry.row_suffixes()]
    kinds = sorted({file.suffix.lower() for file in files})
    if len(kinds) != 1:
        content = f"files of several kinds ({', '.join(kinds)})" if kinds else _describe_others(path)
        raise DataError(
            f"{path} is a folder with {content}. Check data.path in the configuration: it must name {EXPECTED}"
        )
    fits_in_memory = (
        len(files) <= MAX_FILES_IN_MEMORY and sum(file.stat().st_size for file in files) < MAX_BYTES_IN_MEMORY
    )
    small = cache.SMALL_FILE if fits_in_memory else 0  # files converted in memory stay in memory
    open_file_rows = partial(_open_file, folder=folder, log=log, stream=stream, small=small)
    form = registry.format_of(files[0])
    if form.indexed_only:
        _check_stream(path, form, stream)
        _make_indexes(form, files, folder, log)
        return Shards(path, files, open_file_rows, [len(open_file_rows(file)) for file in files], MAX_OPEN_FILES)
    counts = None if form.count_rows is None else [_count_rows(form, file) for file in files]
    return Shards(path, files, open_file_rows, counts, None if small or stream else MAX_OPEN_FILES)


def _open_texts(path: Path, files: Sequence[Path], stream: bool, log: cache.Log) -> TextFiles:
    """Open text files as documents; files of other kinds in the folder are counted in a line to `log`."""
    if stream:
        raise DataError(f"{path}: text files are never copied; remove `stream`")
    if path.is_dir() and (others := find_text_files(path, registry.row_suffixes())[1]):
        listed = [f"{number} {suffix}" for suffix, number in others.most_common(MAX_KINDS)]
        listed += ["..."] if len(others) > MAX_KINDS else []
        log(f"{path}: {count_noun(len(files), 'document')}; other files are not read ({', '.join(listed)})")
    return TextFiles(path, files)


def _describe_others(path: Path) -> str:
    """Describe a folder without files of rows and texts."""
    others = find_text_files(path, registry.row_suffixes())[1]
    listed = ", ".join(f"{number} {suffix}" for suffix, number in others.most_common(MAX_KINDS))
    return f"none of them, but {listed}" if listed else "none of them"


def _count_rows(form: Format, file: Path) -> int:
    assert form.count_rows is not None
    with open_file(file, DataError, buffering=0) as stream:
        return form.count_rows(file, stream)


def _check_stream(path: Path, form: Format, stream: bool) -> None:
    if stream and form.stream is None:
        kind = form.suffixes[0].removeprefix(".")
        raise DataError(f"{path}: rows of a {kind} are never copied; remove `stream`")


def _open_file(path: Path, folder: Path | None, log: cache.Log, stream: bool, small: int | None = None) -> Rows:
    small = cache.SMALL_FILE if small is None else small
    try:
        with open_file(path, DataError) as file:
            size = size_of(file)
    except DataError as cause:
        raise DataError(f"{cause} Check data.path in the configuration: it must name {EXPECTED}") from cause
    if path.suffix.lower() in suffixes.TEXT:
        return _open_texts(path, [path], stream, log)
    if size == 0:
        raise DataError(f"{path} is empty (0 bytes); expected a JSON list of rows or one JSON object per line")
    form = registry.format_of(path)
    _check_stream(path, form, stream)
    if form.indexed_only:
        _make_indexes(form, [path], folder, log)
        return form.open(path, _index(form, path, folder))
    if stream:
        return _stream(path, stat_key(path.stat()))
    if size < small and (rows := _in_memory(path, form, small)) is not None:
        return rows
    return form.open(path, cache.cached_file(folder, path, partial(form.write, path), log))


class _TooLarge(Exception):
    """The rows of a small file take too much memory once converted."""


def _in_memory(path: Path, form: Format, small: int) -> Rows | None:
    """Return the rows of a small file, converted in memory, or None if they take more than four times `small` bytes."""
    sink = pa.BufferOutputStream()

    def bounded(share: float) -> None:
        if sink.tell() > 4 * small:
            raise _TooLarge

    with contextlib.suppress(_TooLarge):
        form.write(path, sink, bounded)
        return form.open(path, sink.getvalue())
    return None


@lru_cache(maxsize=64)
def _stream(path: Path, stat: Stat) -> Rows:
    """Open the rows of a streamed file. Cached, so that several readers of one version share the positions of its
    rows."""
    stream = registry.format_of(path).stream
    assert stream is not None
    return stream(path)


def _index(form: Format, path: Path, folder: Path | None) -> Path:
    """Return the index of a file that is not converted, from the cache or written now. Raises `DataError` if the file
    is of another kind, and as `cache.cached_file` does."""
    return cache.cached_file(folder, path, partial(form.write, path), cache.no_log, form="index")


def _make_indexes(form: Format, files: Sequence[Path], folder: Path | None, log: cache.Log) -> None:
    """Write the missing indexes, for many bytes in several processes, because the headers are parsed in Python. Raises
    as `_index` does."""
    plain = [file for file in files if not is_encrypted(file)]
    file_digests.compute_digests(plain, cache_home() if folder is None else folder, log)
    missing = [file for file in plain if not cache.path_in_cache(folder, file, form="index").is_file()]
    if not missing:
        return
    size = sum(file.stat().st_size for file in missing)
    kind = form.suffixes[0].removeprefix(".")
    log(f"{missing[0].parent}: the rows of {len(missing)} {kind} file(s) ({format_bytes(size)}) are looked up, once")
    processes = min(len(missing), MAX_PROCESSES, os.cpu_count() or 1)
    if size < PARALLEL_INDEX_BYTES or processes < 2 or "fork" not in multiprocessing.get_all_start_methods():
        for file in missing:
            _index(form, file, folder)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        for _ in pool.map(_index, repeat(form), missing, repeat(folder)):
            pass
