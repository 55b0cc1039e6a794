"""Opens the data sets of a configuration: their rows, format, image folder and limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.base.env_vars import cache_home
from octavo.base.hub import is_name
from octavo.config.sections.text_types import is_url, python_name
from octavo.data.errors import BadSample, DataError, QuotingError, quote_value
from octavo.data.formats import json_columns
from octavo.data.formats.arrow_rows import Rows
from octavo.data.formats.media_kinds import KEYS as MEDIA_KEYS
from octavo.data.formats.registry import format_of
from octavo.data.formats.text_files import TextFiles, refuse_mixed_texts
from octavo.data.rows.conversations import ROLES, bad_sample_context, parse
from octavo.data.rows.foreign import parse_turn_lists
from octavo.data.rows.media import is_null_file
from octavo.data.rows.missing_values import clean_cells
from octavo.data.storage.cache import Log, no_log
from octavo.data.storage.fetched import open_fetched
from octavo.data.storage.hub_datasets import open_hub_dataset, stream_hub_dataset
from octavo.data.storage.open_rows import open_rows
from octavo.data.storage.python_rows import open_python_rows
from octavo.data.storage.shards import Shards
from octavo.data.tasks.documents import is_document, parse_document
from octavo.data.tasks.pairs import parse_labelled, parse_pair, row_preference_kind
from octavo.data.tasks.prompts import extra_columns, parse_answered, parse_prompt

if TYPE_CHECKING:
    from octavo.config import Dataset

# The number of first rows that are examined to detect a format. More than one, because a text-only row does not show
# under which key images are listed.
DETECTION_ROWS = 200
SHAREGPT = (*(ROLES["sharegpt"].keys() - ROLES["llava"].keys()),)  # roles that only sharegpt rows have
# kind of rows -> parser
KINDS: dict[str, Callable[..., Any]] = {
    "conversations": parse_answered, "prompts": parse_prompt, "pairs": parse_pair, "labelled": parse_labelled,
    "documents": parse_document,
}  # fmt: skip


class Source:
    """The rows of one data set, parsed as conversations or another of `KINDS`: `len(source)`, `source[i]` (raises
    `BadSample`) and `source.name`. Its order (`octavo.data.order`) reads `source.window`, the number of rows that are
    shuffled together, and `source.shards`, the number of rows in each of its files."""

    def __init__(
        self, rows: Rows, format: str, images: Path, limit: int | None = None, kind: str = "conversations",
        window: int | None = None,
    ) -> None:  # fmt: skip
        self.rows, self.format, self.images, self.kind, self.window = rows, format, images, kind, window
        self.name = str(rows.path)
        # Conversations are parsed directly, except rows with `prompt`, which are parsed as prompts first.
        self._parse = parse if kind == "conversations" and format != "prompt" else KINDS[kind]
        self._cells = _has_cells(rows)
        self._length = len(rows) if limit is None else min(limit, len(rows))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> Any:
        if not 0 <= row < self._length:
            raise IndexError(f"{self.name} has {self._length} rows; row {row} was requested")
        raw = self.raw(row)
        if self._cells:
            with bad_sample_context(raw, self.rows.path, row):
                raw = clean_cells(raw, self.format)
        return self._parse(raw, self.format, file=self.rows.path, row=row, images=self.images)

    def raw(self, row: int) -> Any:
        """Return a row as in its file, without null keys."""
        return drop_nulls(self.rows[row])

    @property
    def shards(self) -> Sequence[int] | None:
        """The number of used rows in each file, or None if the data set has only one file."""
        sizes = getattr(self.rows, "shards", None)
        if sizes is None:
            return None
        ends = np.minimum(np.cumsum(sizes), self._length)
        return np.diff(ends, prepend=0)

    def columns(self) -> list[str]:
        """Return the columns for rewards that any row has, in addition to the columns of every prompt."""
        return extra_columns(self.rows.keys(), self.format)


def _has_cells(rows: Rows) -> bool:
    """Return True if rows come from a format in which every value is a text, such as CSV."""
    rows = getattr(rows, "rows", rows)  # unwrap rows with renamed columns
    suffix = getattr(rows, "suffix", None)  # of `Shards`, whose path is a folder
    return format_of(str(rows.path) if suffix is None else suffix).cells


def drop_nulls(raw: Any) -> Any:
    """Return a row without null keys: JSON may write them, and a table has every column in every row. A file
    with neither bytes nor path counts as null, and turns written as JSON text are parsed."""
    if not isinstance(raw, dict):
        return raw
    return parse_turn_lists({key: value for key, value in raw.items()
                       if value is not None and not (key in MEDIA_KEYS and is_null_file(value))})  # fmt: skip


class RenamedRows:
    """Rows with keys renamed by `columns` (Octavo's key -> key in the file); a key that a renamed one replaces is
    dropped."""

    def __init__(self, rows: Rows, columns: Mapping[str, str]) -> None:
        self.path, self.rows, self._columns = rows.path, rows, columns
        self._new_names = {old_name: new_name for new_name, old_name in columns.items()}
        self.shards: Sequence[int] | None = getattr(rows, "shards", None)
        self.window: int | None = getattr(rows, "window", None)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        with json_columns.use_column_names(self._new_names):
            raw = self.rows[row]
        return {new_name: raw[key] for new_name, key in self._kept_keys(raw).items()} if isinstance(raw, dict) else raw

    def keys(self) -> set[str]:
        return {*self._kept_keys(self.rows.keys())}

    def _kept_keys(self, keys: Iterable[str]) -> dict[str, str]:
        """New name -> key in the file, for each key that remains."""
        replaced = {*self._columns, *self._columns.values()}
        present_keys = [*keys]
        renamed = {new_name: key for new_name, key in self._columns.items() if key in present_keys}
        return {key: key for key in present_keys if key not in replaced} | renamed


def open_dataset(dataset: Dataset, cache: Path | None = None, log: Log = no_log) -> Rows:
    """Open the rows of a data set of the configuration, with renamed columns; `cache` is the folder of the cache (None:
    the default). Raises `DataError`, also if none of the first rows has a column that the data set names."""
    rows: Rows
    if python_name(dataset.path) is not None:
        rows = open_python_rows(dataset.path)
    elif is_name(dataset.path):
        open_hub_rows = stream_hub_dataset if dataset.stream else open_hub_dataset
        rows = open_hub_rows(dataset.path, dataset.revision, dataset.split or "train", dataset.subset)
    elif is_url(dataset.path):
        limit = None if dataset.fetch_gb is None else int(dataset.fetch_gb * 1e9)
        rows = open_fetched(dataset.path, cache, log, limit)
    else:
        rows = open_rows(dataset.path, cache, log, dataset.stream)
    if not dataset.columns:
        return rows
    first = list(_readable_rows(rows))
    keys = {key for raw in first if isinstance(raw, dict) for key in raw}
    if missing := [
        f"{new_name}: {old_name}" for new_name, old_name in dataset.columns.items() if first and old_name not in keys
    ]:
        raise DataError(
            f"{rows.path}: columns names {', '.join(missing)}, but none of its first {len(first)} rows has it; they "
            f"have {quote_value(sorted(map(str, keys)))}"
        )
    return RenamedRows(rows, dataset.columns)


def _readable_rows(rows: Rows) -> Iterator[Any]:
    """Yield the first rows that can be read."""
    for row in range(min(len(rows), DETECTION_ROWS)):
        try:
            yield drop_nulls(rows[row])
        except BadSample:  # reported when the row is used
            continue


def read(dataset: Dataset, kind: str = "conversations", cache: Path | None = None) -> Source:
    """Open a data set of the configuration, with rows parsed as one of `KINDS`. `max_samples` takes the first rows in
    file order; image names are relative to `images`, by default to the folder of the data file, or the data folder (for
    rows of a program: the working directory). Raises `DataError`."""
    rows = open_dataset(dataset, cache)
    _check_texts(rows, kind)
    if dataset.images is not None:
        images = Path(dataset.images)
    elif is_name(dataset.path) or is_url(dataset.path):
        images = (
            cache_home() if cache is None else cache
        )  # file names mean nothing: images of remote data sets are in the rows
        try:
            images.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise DataError(
                f"{images} cannot be created ({cause.strerror}); set data.cache to a folder that can be created"
            ) from cause
    elif python_name(dataset.path) is not None:
        images = Path.cwd()
    else:
        images = Path(rows.path) if Path(rows.path).is_dir() else Path(rows.path).parent
    if not images.is_dir():
        raise DataError(f"{images}: no such folder; check `images` of {rows.path} in the configuration")
    format: str = dataset.format
    if kind in ("pairs", "labelled"):
        if format != "auto":
            raise DataError(f"{rows.path}: format is {format}, but preferences are detected by their keys; remove it")
    elif format == "auto":
        format = detect_format(rows, kind == "prompts", kind == "documents")
    window = dataset.shuffle_buffer or getattr(rows, "window", None)
    return Source(rows, format, images, dataset.max_samples, kind, window)


def _check_texts(rows: Rows, kind: str) -> None:
    """Raise `DataError` for text files in a phase without documents, and for a folder of rows whose text files would be
    left out in the phase with documents."""
    rows = getattr(rows, "rows", rows)  # without renamed columns
    if isinstance(rows, TextFiles) and kind != "documents":
        raise DataError(
            f"{rows.path}: text files ({rows.files[0].name}) are documents of train.phase: pretrain; this phase needs "
            'conversations, such as {"messages": [...]} in the lines of a .jsonl file'
        )
    # The path of a streamed data set of the hub is its name.
    if kind == "documents" and isinstance(rows, Shards) and isinstance(rows.path, Path) and rows.path.is_dir():
        refuse_mixed_texts(rows.path, rows.names())


def detect_preference_kind(dataset: Dataset, cache: Path | None = None) -> str | None:
    """`pairs` or `labelled`, by the first readable row of a data set; None: neither. Raises `DataError`."""
    return next(map(row_preference_kind, _readable_rows(open_dataset(dataset, cache))), None)


def detect_format(rows: Rows, prompts: bool = False, documents: bool = False) -> str:
    """Detect the format from the structure of the first rows; with `prompts` rows may be prompts without answers, with
    `documents` plain text. Raises `DataError` if the rows disagree or have no known structure."""
    evidence: dict[str, int] = {}
    first_plain: int | None = None
    for row in range(min(len(rows), DETECTION_ROWS)):
        try:
            style = _detect_style(drop_nulls(rows[row]), prompts, documents)
        except BadSample:
            continue  # a broken line, reported when the row is used
        if style == "both":
            raise DataError(
                f"{rows.path}: the format is ambiguous (row {row} has turns with from/value and turns with "
                f"role/content); set `format` for this data set"
            )
        if style == "from/value":
            first_plain = row if first_plain is None else first_plain
        elif style is not None:
            evidence.setdefault(style, row)
    if first_plain is not None and evidence.keys() & {"messages", "text"}:
        evidence.setdefault("llava", first_plain)
    if len(evidence) > 1:
        rows_named = ", ".join(f"row {row} reads as {name}" for name, row in sorted(evidence.items()))
        raise DataError(f"{rows.path}: the format is ambiguous ({rows_named}); set `format` for this data set")
    if evidence:
        return next(iter(evidence))
    if first_plain is not None:
        return "llava"  # text-only rows so far, which llava and sharegpt parse alike
    raise QuotingError(
        f"{rows.path}: no row looks like a conversation (the first is {_keys(rows)}); expected LLaVA "
        "('conversations' with from/value), ShareGPT, 'messages' with role/content, alpaca (instruction, output), or "
        f"prompt with answer or completion{_plain_text_hint(rows, documents)}"
    )


def _detect_style(raw: Any, prompts: bool, documents: bool) -> str | None:
    """Return the format of a row; "from/value" if it may be llava or sharegpt, "both" if its turns are mixed, "prompt"
    and "text" if it is one and the phase allows it, or None if it is not a conversation."""
    # The order of the tests matters: a row may have the keys of several formats.
    if prompts and isinstance(raw, dict) and "prompt" in raw:
        return "prompt"
    if isinstance(raw, list):
        return "messages" if raw and isinstance(raw[0], dict) and "role" in raw[0] else None
    if not isinstance(raw, dict):
        return None
    keys = [key for key in ("conversations", "messages", "conversation") if isinstance(raw.get(key), list)]
    if not keys and "prompt" in raw and {"answer", "completion"} & raw.keys():
        return "prompt"
    if not keys and "instruction" in raw and "output" in raw:
        return "alpaca"
    turns = [turn for key in keys for turn in raw[key] if isinstance(turn, dict)]
    has_values = any("from" in turn and "value" in turn for turn in turns)
    has_roles = any("role" in turn and "content" in turn for turn in turns)
    if has_values and has_roles:
        return "both"
    if has_roles:
        return "messages"
    if not has_values:
        return "text" if documents and is_document(raw) else None
    if raw.get("images") or "messages" in keys or any(turn.get("from") in SHAREGPT for turn in turns):
        return "sharegpt"
    if raw.get("image"):
        return "llava"
    return "from/value"


def _plain_text_hint(rows: Rows, documents: bool) -> str:
    """Return the part about plain text of the error for rows that are not conversations."""
    if documents:
        return ", or plain text ('text', or 'texts' with 'images')"
    try:
        return "; plain text is for `train.phase: pretrain`" if is_document(drop_nulls(rows[0])) else ""
    except BadSample:
        return ""


def _keys(rows: Rows) -> str:
    try:
        first = rows[0]
    except BadSample as broken:
        return broken.reason
    return f"an object with the keys {quote_value(sorted(first))}" if isinstance(first, dict) else quote_value(first)
