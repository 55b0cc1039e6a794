"""NaN at any depth of a row is never learned, and Json columns of `datasets` give the original JSON.

`python -m tests.fuzz.test_rows --cases 10000 --seed 1`
"""

from __future__ import annotations

import copy
import json
import math
import random
import tempfile
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from octavo.config import Dataset
from octavo.data import DataError, read
from octavo.data.tasks.documents import Document
from octavo.data.tasks.pairs import LabelledRow, PairRow
from octavo.data.tasks.prompts import PromptRow
from tests.fuzz import mutate
from tests.fuzz.bounded import Finding, bounds, command

SECONDS, MEGABYTES = 5.0, 300
NUMBERS = (math.nan, math.inf, -math.inf)
SPELLED = ("nan", "NaN", "inf", "Infinity", "NaT", "<NA>", "None")
WORDS = ("a cat", "5", "5.0", "1e400", "true", '{"a":  1}', "[1, 2]", "[]", '[{"name": "f"}]', "né\n\t", "Why?", "-0",
         '"', '{"a"', "0x1", '["x", {"type": "text"}]', "\u2028", "\\u0041", "12 cats", " 7 ")  # fmt: skip


def run(seed: int, cases: int, only: int | None = None) -> list[Finding]:
    """Return the findings, which depend only on the seed and `cases`."""
    found: list[Finding] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a.png").write_bytes(b"")
        for case in range(cases) if only is None else [only]:
            rng = random.Random(f"{seed} {case}")
            kind = rng.choice((_number, _number, _cells, _columns))
            label = f"case {case} of seed {seed} ({kind.__name__[1:]})"
            with bounds(label, found, 12 * SECONDS, MEGABYTES, cpu=SECONDS, forks=False):
                try:
                    wrong = kind(rng, folder)
                except Exception as error:  # a finding
                    wrong = [f"{type(error).__name__}: {error}"[:300]]
                found += [Finding(label, what) for what in wrong]
    return found


def _source(path: Path, kind: str, format: str, folder: Path) -> Any:
    return read(Dataset.model_construct(path=str(path), images=str(folder), format=format), kind)


# Rows of every kind ----------------------------------------------------------------------------------------------


def _content(rng: random.Random) -> Any:
    words = rng.choice(WORDS)
    parts = [{"type": "text", "text": words}, {"type": "image", "image": "a.png"}]
    return rng.choice((words, words, parts[: rng.choice((1, 2))]))


def _turns(rng: random.Random) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "look", "arguments": {"x": [rng.choice((1, "y", None, [2.5]))]}}}
    turns: list[dict[str, Any]] = []
    for _ in range(rng.choice((1, 1, 2))):
        turns.append({"role": "user", "content": _content(rng)})
        if rng.random() < 0.3:
            turns.append({"role": "assistant", "content": rng.choice((None, "so")), "tool_calls": [call]})
            turns.append({"role": "tool", "content": rng.choice(WORDS), "name": "look"})
        turns.append({"role": "assistant", "content": rng.choice(WORDS), "weight": rng.choice((1, 1, True))})
        if rng.random() < 0.3:
            turns[-1]["reasoning_content"] = "so it is"
    return turns


def _row(rng: random.Random, kind: str) -> tuple[dict[str, Any], str]:
    """Make a valid row; returns it with its format."""
    words = rng.choice(WORDS)
    answer = {"role": "assistant", "content": words}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"x": rng.choice((1, {"y": [2]}))}}}]
    pair = {"prompt": rng.choice((words, [{"role": "user", "content": "q"}])), "chosen": rng.choice((words, [answer]))}
    talk = {"messages": _turns(rng), "level": 1.5} | ({"tools": tools} if rng.random() < 0.4 else {})
    value_turns = [{"from": "human", "value": words}, {"from": "gpt", "value": "a"}]
    prompt_row = {"prompt": "q", "answer": rng.choice((words, 7, ["five", 5])), "level": {"deep": [1, 2]}}
    alpaca = {"instruction": "q", "input": words, "output": words, "history": [["q", "a"]], "system": "be"}
    some: dict[str, list[tuple[dict[str, Any], str]]] = {
        "conversations": [(talk, "messages"), ({"conversations": value_turns}, "sharegpt"), (alpaca, "alpaca"),
                          (prompt_row, "prompt")],
        "prompts": [(talk, "messages"), (prompt_row, "prompt"), (alpaca, "alpaca")],
        "pairs": [(pair | {"rejected": "zzz"}, "auto")],
        "labelled": [({"prompt": "q", "completion": rng.choice((words, [answer])), "label": True}, "auto")],
        "documents": [({"text": words, "url": "x"}, "text"),
                      ({"texts": [words, None], "images": [None, "a.png"]}, "text")],
    }  # fmt: skip
    return rng.choice(some[kind])


KINDS = ("conversations", "conversations", "prompts", "pairs", "labelled", "documents")


def _texts(made: Any) -> Iterator[str]:
    """Return all texts of a row that are rendered or compared."""
    if isinstance(made, PairRow):
        yield from _texts(made.chosen)
        yield from _texts(made.rejected)
    elif isinstance(made, LabelledRow):
        yield from _texts(made.conversation)
    elif isinstance(made, PromptRow):
        yield from _texts(made.conversation)
        yield from [made.answer] if isinstance(made.answer, str) else made.answer or ()
    else:
        for turn in made.turns:
            yield turn.text
            yield turn.reasoning or ""
            yield json.dumps(turn.calls)
        yield json.dumps([] if isinstance(made, Document) else made.tools)


def _number(rng: random.Random, folder: Path) -> list[str]:
    """Put a NaN at a random place of a row: the row must be bad, or the place unused."""
    kind = rng.choice(KINDS)
    row, format = _row(rng, kind)
    row = copy.deepcopy(row)
    holder, key = rng.choice(mutate.places(row))
    before, holder[key] = holder[key], rng.choice(NUMBERS)
    file = folder / "r.jsonl"
    file.write_text(json.dumps(row))
    try:
        made = _source(file, kind, format, folder)[0]
    except DataError as refused:
        return [] if str(file) in str(refused) else [f"names no file: {refused}"]
    return [f"{key!r} ({before!r}) of {kind}: {text[:80]!r}" for text in _texts(made) if _spells(text)]


def _spells(text: str) -> bool:
    return text.strip() in SPELLED or any(f"{word}{end}" in text for word in ("NaN", "Infinity") for end in ",]}")


def _cells(rng: random.Random, folder: Path) -> list[str]:
    """Write a CSV with a missing cell, by pandas."""
    missing, column = rng.choice((*SPELLED[:2], *SPELLED[4:], "")), rng.choice(("prompt", "answer", "system"))
    row = {"prompt": "q", "answer": "a", "system": "be"} | {column: missing}
    file = folder / rng.choice(("r.csv", "r.tsv"))
    mark = "\t" if file.suffix == ".tsv" else ","
    file.write_text(f"{mark.join(row)}\n{mark.join(row.values())}\n")
    kind = rng.choice(("conversations", "prompts"))
    try:
        made = _source(file, kind, "prompt", folder)[0]
    except DataError as refused:
        return [] if str(file) in str(refused) else [f"names no file: {refused}"]
    texts = list(_texts(made))
    blank = isinstance(made, PromptRow) and made.answer is not None and not str(made.answer).strip()
    return [f"{missing!r} as {column} of {kind}: {texts}"] if blank or any(map(_spells, texts)) else []


# Json columns ----------------------------------------------------------------------------------------------------


def _stored(value: Any) -> str | None:
    """Convert a value as `datasets` stores it in a Json column: texts that are valid JSON stay unchanged."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError:
            return json.dumps(value, ensure_ascii=False)
        return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _columns(rng: random.Random, folder: Path) -> list[str]:
    """Write rows whose values have several types, as JSONL and as parquet with Json columns at some depth."""
    kind = rng.choice(("conversations", "prompts", "pairs"))
    format = {"conversations": "messages", "prompts": "prompt", "pairs": "auto"}[kind]
    rows = []
    while len(rows) < 3:
        row, found = _row(rng, kind)
        if found == format:
            rows.append(row)
    lines, table = folder / "r.jsonl", folder / "r.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = {key: _column(rng, key, [row.get(key) for row in rows]) for key in keys}
    parquet.write_table(pa.table(columns), table)
    expected, made = (_source(file, kind, format, folder) for file in (lines, table))
    wrong = []
    for row in range(len(rows)):
        first, second = (_told(source, row) for source in (expected, made))
        if first != second.replace("r.parquet", "r.jsonl"):
            wrong.append(f"row {row} of {kind}: {second[:300]} and not {first[:300]}")
    return wrong


def _column(rng: random.Random, key: str, values: list[Any]) -> pa.Array:
    if key == "messages" and rng.random() < 0.7:
        if rng.random() < 0.3:  # List(Json())
            return _listed(values, pa.array([json.dumps(turn) for turns in values for turn in turns], pa.json_()))
        fields = {"role": pa.string(), "content": pa.json_(), "tool_calls": pa.json_(), "name": pa.string(),
                  "weight": pa.json_(), "reasoning_content": pa.string()}  # fmt: skip
        flat = {name: [_stored(turn.get(name)) if kind == pa.json_() else turn.get(name)
                       for turns in values for turn in turns] for name, kind in fields.items()}  # fmt: skip
        arrays = [pa.array(flat[name], kind) for name, kind in fields.items()]
        return _listed(values, pa.StructArray.from_arrays(arrays, list(fields)))
    return pa.array([_stored(value) for value in values], pa.json_())


def _listed(values: list[Any], entries: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays([0, *accumulate(map(len, values))], entries)


def _told(source: Any, row: int) -> str:
    try:
        return repr(source[row])
    except DataError as refused:
        return str(refused)


# ------------------------------------------------------------------------------------------------------------------


def test_row_layouts_keep_their_meaning() -> None:
    assert run(5, 150) == []


@pytest.mark.long
def test_many_row_layouts_keep_their_meaning() -> None:
    assert run(6, 800) == []


if __name__ == "__main__":
    command(run, cases=10_000, seed=1, whole=True)
