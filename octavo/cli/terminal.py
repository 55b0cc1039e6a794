"""Calm output: rich tables where a person looks on, aligned text where a file or a pipe does, JSON where asked for."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

#: how a status is shown to a person; the word alone must do where there is no colour
STYLES = {"ok": "green", "pass": "green", "warn": "yellow", "fail": "bold red", "absent": "dim"}


def show_json(data: Any) -> None:
    """One JSON document on stdout; NaN and infinities, which JSON lacks, become null."""
    print(json.dumps(_finite(data), indent=2, ensure_ascii=False, default=str))


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def show_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", right: Sequence[int] = ()
) -> None:
    """A table on stdout. ``right`` lists the columns of numbers. A status word as a cell is coloured on a terminal."""
    if sys.stdout.isatty():
        _rich_table(columns, rows, title, right)
    else:
        print(plain_table(columns, rows, title=title, right=right))


def plain_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", right: Sequence[int] = ()
) -> str:
    """Aligned text, two spaces between columns, nothing cut off."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        parts = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(parts).rstrip()

    head = [title] if title else []
    return "\n".join([*head, line(columns), line(["-" * w for w in widths]), *map(line, rows)])


def note(text: str) -> None:
    """A line beside the result: on stderr, so that stdout stays the result alone."""
    print(text, file=sys.stderr)


def console(*, stderr: bool = True) -> Any:
    """A rich console for progress; on stderr unless told otherwise, so that stdout holds results alone. Lines are
    wrapped where a person looks on, and whole in a file or a pipe."""
    from rich.console import Console

    made = Console(stderr=stderr)
    made.soft_wrap = not made.is_terminal
    return made


@contextmanager
def progress(
    label: str, *, bytes: bool = True, elsewhere: Callable[[int, int, str], None] = lambda done, total, name: None
) -> Iterator[Callable[..., None]]:
    """A bar of bytes or of pieces on a terminal: gives what is called with (done, in all, the name of what is at work).
    Where nobody looks on it is ``elsewhere``, which does nothing."""
    shown = console()
    if not shown.is_terminal:
        yield lambda done, total, name="": elsewhere(done, total, name)
        return
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if bytes else MofNCompleteColumn()
    columns = (TextColumn(label), BarColumn(), count, TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=shown, refresh_per_second=4, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, name="": bar.update(task, completed=done, total=total, description=name)


def number(value: Any) -> str:
    """A figure for a table: four significant digits, whole numbers as they are, a dash for none."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str, right: Sequence[int]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell, style=STYLES.get(cell, "")) for cell in row])
    Console().print(table)
