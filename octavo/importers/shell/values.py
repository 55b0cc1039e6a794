"""Values of a launch script's variables, as pieces, and the words that they become.

A piece has the line that it was written on, so that a flag from a variable is reported with its own line. A piece with
a non-empty ``open`` is only known when the script runs; it is never split. An ``unsure`` piece may have another value,
because a line that was not followed assigns it too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: maximum number of recorded lines that may change a value
MAX_UNSURE_LINES = 8
_SPACES = re.compile(r"[ \t\n]+")


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, or a piece of a value.

    line    0: a line of another file
    open    variables in it that nothing sets
    unsure  lines that were not followed and may change it
    bare    whether an empty variable followed it
    whole   whether it was quoted in a default, so that white space does not split it
    """

    text: str
    line: int
    open: tuple[str, ...] = ()
    unsure: tuple[int, ...] = ()
    bare: bool = False
    whole: bool = False


@dataclass(slots=True)
class Variable:
    """``pieces`` of a scalar, or ``items`` of an array; neither: it is unset, or its value is ``unknown``; ``lost``: it
    was set to a value that is only known when the script runs."""

    pieces: list[Word] | None = None
    items: list[Word] | None = None
    unknown: bool = False
    unsure: tuple[int, ...] = ()
    lost: bool = False


class WordSplitter:
    """Builds words from pieces."""

    def __init__(self, line: int) -> None:
        self.words: list[Word] = []
        self.line = line
        self.texts: list[str] = []
        self.begun = False
        self.at = line
        self.open: list[str] = []
        self.unsure: list[int] = []

    def add(self, text: str, line: int, piece: Word | None = None) -> None:
        if not self.begun or not any(self.texts):
            self.at = line
        self.begun = True
        self.texts.append(text)
        if piece is not None:
            self.open += piece.open
            self.unsure += piece.unsure

    def split(self, piece: Word) -> None:
        """Add a piece of an unquoted variable, in which white space separates words."""
        if piece.open:
            self.add(piece.text, piece.line, piece)
            return
        line, end, count = piece.line, 0, piece.text.count("\n")
        for match in _SPACES.finditer(piece.text):
            if match.start() > end:
                self.add(piece.text[end : match.start()], line, piece)
            self.close()
            if count and line:
                line += match[0].count("\n")
            end = match.end()
        if end < len(piece.text):
            self.add(piece.text[end:], line, piece)

    def close(self) -> None:
        if self.begun:
            self.words.append(merge_word(self.texts, self.at, self.open, self.unsure))
        self.texts, self.begun, self.open, self.unsure = [], False, [], []


def merge_word(texts: Sequence[str], line: int, missing: Iterable[str], unsure: Iterable[int]) -> Word:
    return Word("".join(texts), line, tuple(dict.fromkeys(missing)), tuple(dict.fromkeys(unsure))[:MAX_UNSURE_LINES])


def join_pieces(pieces: Sequence[Word], line: int) -> Word:
    """Join pieces to one word."""
    if len(pieces) == 1:
        return pieces[0]
    at = next((piece.line for piece in pieces if piece.text), line)
    return merge_word(
        [p.text for p in pieces], at, (n for p in pieces for n in p.open), (n for p in pieces for n in p.unsure)
    )


def flag_words(pieces: Sequence[Word] | None) -> list[Word]:
    """Return the words of a text of flags (``"--lr 1 --bf16"``); [] for any other text."""
    if not pieces or not join_pieces(pieces[:8], 0).text.lstrip().startswith("--"):
        return []
    into = WordSplitter(pieces[0].line)
    for piece in pieces:
        into.split(piece)
    into.close()
    return into.words
