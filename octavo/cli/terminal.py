"""Output: rich tables on a terminal, aligned text in a file or a pipe, JSON with --json."""

from __future__ import annotations

import itertools
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from octavo.base.byte_size import format_bytes
from octavo.base.safe_read import printable, replace_nonfinite
from octavo.base.wording import format_time

#: colors of a status on a terminal
STYLES = {"ok": "green", "pass": "green", "warn": "yellow", "fail": "bold red", "absent": "dim"}


def show_json(data: Any) -> None:
    """Print one JSON document on stdout. NaN and infinities, which JSON does not support, become null."""
    print(json.dumps(replace_nonfinite(data), indent=2, ensure_ascii=False, default=str))


def show_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", right: Sequence[int] = ()
) -> None:
    """Print a table on stdout. ``right`` lists right-aligned columns. Cells with a status are colored on a terminal."""
    if sys.stdout.isatty():
        _rich_table(columns, rows, title, right)
    else:
        print(plain_table(columns, rows, title=title, right=right))


WIDTH = 80  # characters of a table line if stdout is not a terminal
_NARROWEST = 12  # characters that a wrapped column keeps at least


def plain_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", right: Sequence[int] = ()
) -> str:
    """Format a table as aligned text of :data:`WIDTH` characters. Nothing is cut off: the widest text columns are
    wrapped at spaces, and a long word makes the table wider."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    # Shrink the widest wrappable column until the table fits, or no column can shrink further.
    while (over := sum(widths) + 2 * (len(widths) - 1) - WIDTH) > 0:
        wrapped = [i for i in range(len(widths)) if i not in right and widths[i] > _NARROWEST]
        if not wrapped:
            break
        widest = max(wrapped, key=lambda i: widths[i])
        second = max((widths[i] for i in wrapped if i != widest), default=_NARROWEST)
        widths[widest] = max(widths[widest] - over, min(second, widths[widest] - 1), _NARROWEST)
    cells = [[textwrap.wrap(c, w, break_long_words=False) or [""] for c, w in zip(row, widths, strict=True)]
             for row in (columns, *rows)]  # fmt: skip
    widths = [max(w, *(len(line) for row in cells for line in row[i])) for i, w in enumerate(widths)]

    def line(parts: Sequence[str]) -> str:
        padded = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(parts, widths, strict=True))]
        return "  ".join(padded).rstrip()

    head = [title] if title else []
    shown = [[line(parts) for parts in itertools.zip_longest(*row, fillvalue="")] for row in cells]
    return "\n".join([*head, *shown[0], line(["-" * w for w in widths]), *(text for row in shown[1:] for text in row)])


def note(text: str) -> None:
    """Print a line on stderr; stdout is reserved for results."""
    print(_escaped(text), file=sys.stderr)


def say(text: str) -> None:
    """Print a line of the result. Control characters are escaped, because file names in it are untrusted."""
    print(_escaped(text))


def _escaped(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def console(*, stderr: bool = True) -> Any:
    """Return a rich console for progress, by default on stderr. Lines are wrapped only on a terminal."""
    from rich.console import Console

    rich_console = Console(stderr=stderr)
    rich_console.soft_wrap = not rich_console.is_terminal
    return rich_console


LINE_INTERVAL_S = 30.0  # seconds between lines of progress without a terminal


@contextmanager
def progress(
    label: str, *, bytes: bool = True, fallback: Callable[[int, int, str], None] | None = None
) -> Iterator[Callable[..., None]]:
    """Show a progress bar of bytes or items, with the time left, on a terminal. Yields a function of (done, total, name
    of the current item). Without a terminal that function calls ``fallback``, or prints a line on stderr every
    :data:`LINE_INTERVAL_S` seconds, so that short work prints nothing."""
    shown = console()
    if not shown.is_terminal:
        yield PlainProgress(label, bytes).update if fallback is None else _with_name(fallback)
        return
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if bytes else MofNCompleteColumn()
    columns = (TextColumn(label), BarColumn(), count, TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=shown, refresh_per_second=4, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, name="": bar.update(task, completed=done, total=total, description=name)


def _with_name(fallback: Callable[[int, int, str], None]) -> Callable[..., None]:
    return lambda done, total, name="": fallback(done, total, name)


class PlainProgress:
    """Prints a line of progress every :data:`LINE_INTERVAL_S` seconds, with the time left at the speed since the first
    update: work that an earlier process did costs no time now."""

    def __init__(self, label: str, bytes: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.label, self.bytes, self.clock = label, bytes, clock
        self._began = self._last = clock()
        self._first: int | None = None

    def update(self, done: int, total: int, name: str = "") -> None:
        now = self.clock()
        if self._first is None:
            self._first, self._began = done, now
        if now - self._last < LINE_INTERVAL_S:
            return
        self._last = now
        amount = f"{format_bytes(done)} of {format_bytes(total)}" if self.bytes else f"{done} of {total}"
        left = ""
        if self._first < done < total:
            seconds = (now - self._began) / (done - self._first) * (total - done)
            left = f", about {format_time(seconds)} left"
        note(f"{self.label}: {amount}{left}{name and '; now ' + name}")


def number(value: Any) -> str:
    """Format a number for a table: four significant digits, integers unchanged, a dash for None."""
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
