"""Values of a launch script's variables, as pieces, and the words that they become.

A piece has the line that it was written on, so that a flag that a variable brings has a line of its own. A piece whose
``open`` is not empty stands for something that only a run would give; it is never split. A piece that is ``unsure`` may
have another value: a line that was not followed assigns it too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: lines that are kept of those which may change a value
LINES = 8
_SPACES = re.compile(r"[ \t\n]+")


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, or a piece of a value. ``line``: 0 is of another file; ``open``: what nothing sets;
    ``unsure``: lines that were not followed and may change it; ``bare``: what followed it was an empty variable;
    ``whole``: it was quoted in a default, so that white space in it ends no word."""

    text: str
    line: int
    open: tuple[str, ...] = ()
    unsure: tuple[int, ...] = ()
    bare: bool = False
    whole: bool = False


@dataclass(slots=True)
class Variable:
    """``pieces`` of a scalar, or ``items`` of an array; neither: it is unset, or (``unknown``) not known; ``lost``: it
    was set to what only a run knows."""

    pieces: list[Word] | None = None
    items: list[Word] | None = None
    unknown: bool = False
    unsure: tuple[int, ...] = ()
    lost: bool = False


class Fields:
    """Words as they are put together from pieces."""

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
        """A piece of an unquoted variable: white space in it ends a word."""
        if piece.open:
            self.add(piece.text, piece.line, piece)
            return
        line, end, count = piece.line, 0, piece.text.count("\n")
        for found in _SPACES.finditer(piece.text):
            if found.start() > end:
                self.add(piece.text[end : found.start()], line, piece)
            self.close()
            if count and line:
                line += found[0].count("\n")
            end = found.end()
        if end < len(piece.text):
            self.add(piece.text[end:], line, piece)

    def close(self) -> None:
        if self.begun:
            self.words.append(merged(self.texts, self.at, self.open, self.unsure))
        self.texts, self.begun, self.open, self.unsure = [], False, [], []


def merged(texts: Sequence[str], line: int, missing: Iterable[str], unsure: Iterable[int]) -> Word:
    return Word("".join(texts), line, tuple(dict.fromkeys(missing)), tuple(dict.fromkeys(unsure))[:LINES])


def joined(pieces: Sequence[Word], line: int) -> Word:
    """Pieces as one word."""
    if len(pieces) == 1:
        return pieces[0]
    at = next((piece.line for piece in pieces if piece.text), line)
    return merged(
        [p.text for p in pieces], at, (n for p in pieces for n in p.open), (n for p in pieces for n in p.unsure)
    )


def flag_words(pieces: Sequence[Word] | None) -> list[Word]:
    """The words of a text of flags (``"--lr 1 --bf16"``); none of any other text."""
    if not pieces or not joined(pieces[:8], 0).text.lstrip().startswith("--"):
        return []
    into = Fields(pieces[0].line)
    for piece in pieces:
        into.split(piece)
    into.close()
    return into.words
