"""Formats counts for messages."""

from __future__ import annotations


def count_noun(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless the number is 1: 0 files, 1 tensor, 3 micro-batches."""
    ending = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"
