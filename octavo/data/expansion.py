"""Where characters of a rendered text stand among the tokens of the processed one, in which images have grown."""

from __future__ import annotations

import re

import numpy as np


class Mismatch(ValueError):
    """Processor and conversation do not go together; becomes a `BadSample`."""


class Expansion:
    """Characters of the rendered text to tokens of the processed one, in which each placeholder has grown.

    Token offsets count in the grown text. Runs of image tokens there and runs of placeholders in the rendered
    text come in the same order; between them the texts are equal, so each run moves what follows by its growth.
    """

    def __init__(
        self, text: str, token: str | None, starts: np.ndarray, stops: np.ndarray, grown: list[tuple[int, int]]
    ) -> None:
        self.starts, self.stops = starts, stops
        before = [m.span() for m in re.finditer(f"(?:{re.escape(token)})+", text)] if token else []
        if len(before) != len(grown):
            raise Mismatch(f"the processor made {len(grown)} groups of image tokens of {len(before)} placeholders")
        self.growth = [
            (end, int(stops[stop - 1] - starts[start]) - (end - begin))
            for (begin, end), (start, stop) in zip(before, grown, strict=True)
        ]

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        """The tokens that hold any of the characters start to end of the rendered text."""
        first, last = self._moved(start), self._moved(end)
        inside = np.flatnonzero((self.starts < last) & (self.stops > first) & (self.stops > self.starts))
        return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)

    def _moved(self, position: int) -> int:
        return position + sum(more for end, more in self.growth if end <= position)


def stretches(mask: np.ndarray, opens: np.ndarray | None = None) -> list[tuple[int, int]]:
    """(start, stop) of each unbroken stretch of True; a new one begins at each position of `opens`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    found = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    if opens is None or not len(opens):
        return found
    parted = []
    for start, stop in found:
        cuts = [start, *(int(o) for o in opens if start < o < stop), stop]
        parted += list(zip(cuts, cuts[1:], strict=False))
    return parted
