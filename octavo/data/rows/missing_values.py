"""Missing values: NaN, which pandas writes for an empty cell, and what it writes in CSV.

JSON as Python writes it has NaN and Infinity, and so have columns of floats. Neither is a text: a number is an answer
only if it is finite, and JSON that a chat template writes out (tools, arguments of calls) has neither.
"""

from __future__ import annotations

import math
from typing import Any

from octavo.data.errors import RowProblem, shown

#: cells of CSV that stand for a missing value: what pandas writes for NaN, NaT, NA and None
CELLS = frozenset(("nan", "NaN", "NaT", "<NA>", "None"))
_ALPACA = ("system", "instruction", "input", "output", "answer")
_PROMPT = ("system", "prompt", "answer", "completion")
#: format -> the keys whose cells are read as texts; of preferences, which are "auto", all
_TEXTS = {"text": ("text",), "prompt": _PROMPT, "alpaca": _ALPACA, "auto": (*_PROMPT, *_ALPACA, "chosen", "rejected")}


def is_missing(value: Any) -> bool:
    """Whether a value is NaN or infinite, which no text is."""
    return isinstance(value, float) and not math.isfinite(value)


def clean_cells(raw: Any, format: str) -> Any:
    """A row of CSV without answers that are blank, as pandas writes none. Raises `RowProblem` for another missing value
    that is read as a text."""
    if not isinstance(raw, dict):
        return raw
    for key in _TEXTS.get(format, ("system",)):
        if isinstance(raw.get(key), str) and raw[key].strip() in CELLS:
            raise RowProblem(
                f"{key!r} is the cell {raw[key].strip()}, as pandas writes a missing value; fill it or remove the row, "
                "and if the word is meant, write the rows as JSONL"
            )
    blank = {key for key in ("answer", "completion") if isinstance(raw.get(key), str) and not raw[key].strip()}
    return {key: value for key, value in raw.items() if key not in blank} if blank else raw


def check_numbers(value: Any, where: str) -> None:
    """That JSON which a template writes out has no NaN and no Infinity, at any depth. Raises `RowProblem`."""
    level: list[Any] = [value]
    while level:
        below: list[Any] = []
        for one in level:
            if is_missing(one):
                raise RowProblem(f"{where} has the number {shown(one)}, which JSON does not have; write null or a text")
            below += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        level = below
