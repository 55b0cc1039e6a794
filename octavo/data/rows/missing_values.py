"""Missing values: NaN, which pandas uses for an empty cell, and the words that it writes for it in CSV.

JSON written by Python may have NaN and Infinity, and so may columns of floats. Neither is a valid text: a number is an
answer only if it is finite, and JSON that a chat template writes (tools, arguments of calls) must have neither.
"""

from __future__ import annotations

import math
from typing import Any

from octavo.data.errors import RowProblem, quote_value

#: CSV cells that mean a missing value: the words that pandas writes for NaN, NaT, NA and None
CELLS = frozenset(("nan", "NaN", "NaT", "<NA>", "None"))
_ALPACA = ("system", "instruction", "input", "output", "answer")
_PROMPT = ("system", "prompt", "answer", "completion")
#: format -> keys whose cells are read as texts; preferences have the format "auto", and all keys of it
_TEXTS = {"text": ("text",), "prompt": _PROMPT, "alpaca": _ALPACA, "auto": (*_PROMPT, *_ALPACA, "chosen", "rejected")}


def is_missing(value: object) -> bool:
    """Return True if a value is NaN or infinite."""
    return isinstance(value, float) and not math.isfinite(value)


def clean_cells(raw: Any, format: str) -> Any:
    """Return a CSV row without blank answers, which pandas writes for a missing one. Raises `RowProblem` for other
    missing values that would be read as text."""
    if not isinstance(raw, dict):
        return raw
    for key in _TEXTS.get(format, ("system",)):
        if isinstance(raw.get(key), str) and raw[key].strip() in CELLS:
            raise RowProblem(
                f"{key!r} is the cell {raw[key].strip()}, as pandas writes a missing value; fill it or remove the row, "
                "or write the rows as JSONL if the word is intended"
            )
    blank = {key for key in ("answer", "completion") if isinstance(raw.get(key), str) and not raw[key].strip()}
    return {key: value for key, value in raw.items() if key not in blank} if blank else raw


def check_numbers(value: object, where: str) -> None:
    """Check that a JSON value has no NaN and no Infinity, at any depth. Raises `RowProblem`."""
    level: list[object] = [value]
    while level:
        below: list[object] = []
        for entry in level:
            if is_missing(entry):
                raise RowProblem(
                    f"{where} has the number {quote_value(entry)}, which JSON does not have; write null or a text"
                )
            below += entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ()
        level = below
