"""A data set as the configuration names it: a file, a folder of images, a format, a limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.data.conversations import parse, shown
from octavo.data.errors import BadSample, DataError
from octavo.data.files import Rows, open_rows
from octavo.data.pairs import parse_labelled, parse_pair, told_by
from octavo.data.prompts import parse_answered, parse_prompt

if TYPE_CHECKING:
    from octavo.config import Dataset

# Rows looked at to recognise a format. A text-only row says nothing about where images are listed.
LOOKED_AT = 200
# What a row is taken for; each reads it as its file says.
KINDS: dict[str, Callable[..., Any]] = {
    "conversations": parse, "prompts": parse_prompt, "answered": parse_answered, "pairs": parse_pair,
    "labelled": parse_labelled,
}  # fmt: skip


class Source:
    """The rows of one data set, read as conversations or another of `KINDS`: `len(source)`, `source[i]` (raises
    `BadSample`), `source.name`."""

    def __init__(
        self, rows: Rows, format: str, images: Path, limit: int | None = None, kind: str = "conversations"
    ) -> None:
        self.rows, self.format, self.images, self.kind = rows, format, images, kind
        self.name = str(rows.path)
        self._length = len(rows) if limit is None else min(limit, len(rows))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> Any:
        if not 0 <= row < self._length:
            raise IndexError(f"{self.name} has {self._length} rows, asked for row {row}")
        return KINDS[self.kind](self.rows[row], self.format, file=self.rows.path, row=row, images=self.images)


def read(dataset: Dataset, kind: str = "conversations") -> Source:
    """Open a data set of the configuration, its rows as one of `KINDS`. `max_samples` takes the first rows in file
    order; image names are relative to `images`, or to the folder of the data file where that is not given. Raises
    `DataError`."""
    rows = open_rows(dataset.path)
    images = Path(dataset.images) if dataset.images is not None else rows.path.parent
    if not images.is_dir():
        raise DataError(f"{images}: no such folder; check `images` of {rows.path} in the configuration")
    format: str = dataset.format
    if kind in ("pairs", "labelled"):
        if format != "auto":
            raise DataError(f"{rows.path}: format is {format}, and preferences are told by their keys; leave it out")
    elif format == "auto":
        format = recognise(rows, kind in ("prompts", "answered"))
    return Source(rows, format, images, dataset.max_samples, kind)


def preferences(dataset: Dataset) -> str | None:
    """`pairs` or `labelled`, which the first rows of a data set are that can be read; None: neither. Raises
    `DataError`."""
    rows = open_rows(dataset.path)
    for row in range(min(len(rows), LOOKED_AT)):
        try:
            return told_by(rows[row])
        except BadSample:
            continue
    return None


def recognise(rows: Rows, prompts: bool = False) -> str:
    """Tell the format from the structure of the first rows; with `prompts` rows may be prompts alone. Raises
    `DataError` where they disagree or say nothing."""
    evidence: dict[str, int] = {}
    plain: int | None = None
    for row in range(min(len(rows), LOOKED_AT)):
        try:
            style = _style_of(rows[row], prompts)
        except BadSample:
            continue  # a broken line; it is reported when its turn comes
        if style == "both":
            raise DataError(
                f"{rows.path}: the format is ambiguous (row {row} has turns with from/value and turns with "
                f"role/content); set `format` for this data set"
            )
        if style == "from/value":
            plain = row if plain is None else plain
        elif style is not None:
            evidence.setdefault(style, row)
    if plain is not None and "messages" in evidence:
        evidence.setdefault("llava", plain)
    if len(evidence) > 1:
        rows_named = ", ".join(f"row {row} reads as {name}" for name, row in sorted(evidence.items()))
        raise DataError(f"{rows.path}: the format is ambiguous ({rows_named}); set `format` for this data set")
    if evidence:
        return next(iter(evidence))
    if plain is not None:
        return "llava"  # text only so far: llava and sharegpt read such rows alike
    raise DataError(
        f"{rows.path}: no row looks like a conversation (the first is {_keys(rows)}); expected LLaVA "
        f"('conversations' with from/value), ShareGPT, or 'messages' with role/content"
        f"{', or prompt with answer' if prompts else ''}"
    )


def _style_of(raw: Any, prompts: bool) -> str | None:
    """llava, sharegpt or messages where a row proves it; "from/value" where it could be either of the first two,
    "both" where its turns are mixed, "prompt" where that may be and is there, None where it is no conversation."""
    if prompts and isinstance(raw, dict) and "prompt" in raw:
        return "prompt"
    if isinstance(raw, list):
        return "messages" if raw and isinstance(raw[0], dict) and "role" in raw[0] else None
    if not isinstance(raw, dict):
        return None
    keys = [key for key in ("conversations", "messages", "conversation") if isinstance(raw.get(key), list)]
    turns = [turn for key in keys for turn in raw[key] if isinstance(turn, dict)]
    spoken = any("from" in turn and "value" in turn for turn in turns)
    chatted = any("role" in turn and "content" in turn for turn in turns)
    if spoken and chatted:
        return "both"
    if chatted:
        return "messages"
    if not spoken:
        return None
    if raw.get("images") or "messages" in keys or any(turn.get("from") in ("user", "assistant") for turn in turns):
        return "sharegpt"
    if raw.get("image"):
        return "llava"
    return "from/value"


def _keys(rows: Rows) -> str:
    try:
        first = rows[0]
    except BadSample as broken:
        return broken.reason
    return f"an object with the keys {shown(sorted(first))}" if isinstance(first, dict) else shown(first)
