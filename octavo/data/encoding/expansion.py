"""Where characters of a rendered text stand among the tokens of the processed one, in which images have grown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Mismatch(ValueError):
    """Processor and conversation do not go together; becomes a `BadSample`."""


class Expansion:
    """Characters of the rendered text to tokens of the processed one, in which each placeholder has grown.

    Token offsets (`starts`, `stops`) count in the grown text. `growth`: (where a placeholder or a run of them ends in
    the rendered text, by how many characters it has grown); between them the texts are equal, so each moves what
    follows.
    """

    def __init__(self, growth: list[tuple[int, int]], starts: np.ndarray, stops: np.ndarray) -> None:
        self.growth, self.starts, self.stops = growth, starts, stops

    @classmethod
    def of_runs(
        cls, text: str, token: str | None, starts: np.ndarray, stops: np.ndarray, grown: list[tuple[int, int]]
    ) -> Expansion:
        """Where placeholders grow into image tokens alone: runs of these (`grown`: their first and last token), and
        runs of placeholders in the rendered text, come in the same order. Raises `Mismatch`."""
        before = [m.span() for m in re.finditer(f"(?:{re.escape(token)})+", text)] if token else []
        if len(before) != len(grown):
            raise Mismatch(f"the processor made {len(grown)} groups of image tokens of {len(before)} placeholders")
        growth = [
            (end, int(stops[stop - 1] - starts[start]) - (end - begin))
            for (begin, end), (start, stop) in zip(before, grown, strict=True)
        ]
        return cls(growth, starts, stops)

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        """The tokens that hold any of the characters start to end of the rendered text."""
        first, last = self._moved(start), self._moved(end)
        return covering(self.starts, self.stops, first, last)

    def _moved(self, position: int) -> int:
        return position + sum(more for end, more in self.growth if end <= position)


def covering(starts: np.ndarray, stops: np.ndarray, first: int, last: int) -> tuple[int, int]:
    """The tokens that hold any of the characters first to last; (0, 0) for none."""
    inside = np.flatnonzero((starts < last) & (stops > first) & (stops > starts))
    return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)


class Replaced(NamedTuple):
    """What stands in for an image or a video (`kind`), as its processor tells: characters of its placeholder in the
    rendered text, and of what that grew into in the grown one."""

    span: tuple[int, int]
    new_span: tuple[int, int]
    kind: str = "image"

    @property
    def growth(self) -> tuple[int, int]:
        """As `Expansion` takes it."""
        (start, end), (begin, stop) = self.span, self.new_span
        return end, (stop - begin) - (end - start)


def replaced(told: Sequence[Mapping[str, Any]]) -> list[Replaced]:
    """`text_replacement_offsets` of one row."""
    return [Replaced(tuple(one["span"]), tuple(one["new_span"]), str(one.get("type", "image"))) for one in told]


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
