"""Concatenated rows of several files, each opened when one of its rows is read."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from octavo.data.formats.arrow_rows import Rows


class Shards:
    """The rows of several files, concatenated; a file is opened when one of its rows is read. `counts` is the number of
    rows in each file, or None to open all files and count them; `max_open` limits the files that stay open, None keeps
    all open."""

    def __init__(
        self, path: Path | str, files: Sequence[Any], open_file: Callable[[Any], Rows],
        counts: Sequence[int] | None = None, max_open: int | None = None,
    ) -> None:  # fmt: skip
        self.path, self._files, self._open, self._max_open = path, files, open_file, max_open
        self._rows: OrderedDict[int, Rows] = OrderedDict()
        self._ends = list(accumulate((len(self._part(n)) for n in range(len(files))) if counts is None else counts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> Any:
        part = bisect_right(self._ends, row)
        return self._part(part)[row - (self._ends[part - 1] if part else 0)]

    @property
    def shards(self) -> list[int]:
        """The number of rows in each file."""
        return [end - start for start, end in pairwise([0, *self._ends])]

    @property
    def suffix(self) -> str:
        """The suffix of its files; "" if they are not paths."""
        return str(getattr(self._files[0], "suffix", "")) if self._files else ""

    def names(self) -> list[str]:
        """Return the names of its files; none if they are not paths."""
        return [file.name for file in self._files if isinstance(file, Path)]

    def keys(self) -> set[str]:
        return set[str]().union(*(self._part(number).keys() for number in range(len(self._files))))

    def _part(self, number: int) -> Rows:
        if number not in self._rows:
            self._rows[number] = self._open(self._files[number])
            if self._max_open is not None and len(self._rows) > self._max_open:
                self._rows.popitem(last=False)
        self._rows.move_to_end(number)
        return self._rows[number]

    def __getstate__(self) -> dict[str, object]:
        """Without open files, if they can be opened again."""
        return {**self.__dict__, "_rows": self._rows if self._max_open is None else OrderedDict()}
