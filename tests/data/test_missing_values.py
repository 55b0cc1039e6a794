"""NaN, Infinity and pandas' missing values are never learned, and never accepted as a reference answer."""

import math

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from octavo.data import BadSample
from octavo.data.storage.open_rows import open_rows

NAN, INF = math.nan, math.inf
USER, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def offered(default):
    return [{"type": "function", "function": {"name": "f", "parameters": {"default": default}}}]


def called(argument):
    return [{"type": "function", "function": {"name": "f", "arguments": {"x": [argument]}}}]


@pytest.mark.parametrize(
    ("row", "kinds"),
    [
        ({"prompt": "q", "answer": NAN}, "conversations prompts"),
        ({"prompt": "q", "completion": -INF}, "conversations prompts"),
        ({"prompt": "q", "answer": ["5", NAN]}, "conversations prompts"),
        ({"prompt": NAN, "answer": "5"}, "conversations prompts"),
        ({"prompt": "q", "completion": [{"role": "assistant", "content": NAN}]}, "conversations prompts"),
        ({"prompt": "q", "chosen": NAN, "rejected": "b"}, "pairs"),
        ({"prompt": "q", "chosen": "a", "rejected": [{"role": "assistant", "content": INF}]}, "pairs"),
        ({"prompt": "q", "completion": NAN, "label": True}, "labelled"),
        ({"messages": [USER, {**SAID, "content": NAN}]}, "conversations prompts"),
        ({"messages": [USER, {**SAID, "content": [{"type": "text", "text": NAN}]}]}, "conversations"),
        ({"messages": [USER, {**SAID, "reasoning_content": NAN}]}, "conversations"),
        ({"messages": [USER, {**SAID, "weight": NAN}]}, "conversations"),
        ({"messages": [USER, SAID], "tools": offered(INF)}, "conversations prompts"),
        ({"messages": [USER, {**SAID, "tool_calls": called({"y": NAN})}]}, "conversations"),
        ({"messages": [USER, {**SAID, "tool_calls": '[{"name": "f", "arguments": "{\\"x\\": NaN}"}]'}]},
         "conversations"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": NAN}]}, "conversations prompts"),
        ({"instruction": "q", "input": NAN, "output": "a"}, "conversations"),
        ({"instruction": "q", "output": "a", "history": [["q", NAN]]}, "conversations"),
        ({"text": NAN}, "documents"),
        ({"texts": [NAN], "images": [None]}, "documents"),
    ],
)  # fmt: skip
def test_nan_makes_a_bad_row(folder, row, kinds):
    for kind in kinds.split():
        with pytest.raises(BadSample, match=r"rows\.jsonl, row 0: .*(NaN|Infinity|nan|inf)"):
            folder.read([row], "rows.jsonl", kind, format="auto" if kind in ("pairs", "labelled") else FORMATS[
                next(key for key in FORMATS if key in row)])[0]  # fmt: skip


FORMATS = {"prompt": "prompt", "messages": "messages", "conversations": "sharegpt", "instruction": "alpaca",
           "text": "text", "texts": "text"}  # fmt: skip


def test_nan_is_accepted_in_other_columns(folder):
    row = {"prompt": "q", "answer": 5, "level": NAN, "tests": [INF]}
    found = folder.read([row], "rows.jsonl", "prompts")[0]
    assert found.answer == "5" and math.isnan(found.columns["level"]) and found.columns["tests"] == [INF]


@pytest.mark.parametrize("cell", ("nan", "NaN", "NaT", "<NA>", "None", " nan "))
@pytest.mark.parametrize("stream", (False, True))
def test_missing_value_cells_of_pandas_are_rejected(folder, cell, stream):
    """Only for a whole cell that is read as text; the word may occur in longer texts, other columns and JSON."""
    (folder.path / "rows.csv").write_text(f"question,reply,note\nq,{cell},x\nq,is {cell}?,{cell}\n")
    source = folder.read(folder.path / "rows.csv", stream=stream, columns={"prompt": "question", "answer": "reply"})
    with pytest.raises(BadSample, match=rf"row 0: 'answer' is the cell {cell.strip()}, as pandas writes"):
        source[0]
    assert source[1].turns[-1].text == f"is {cell}?"
    assert folder.read([{"prompt": "q", "answer": cell}], "rows.jsonl")[0].turns[-1].text == cell


def test_empty_cell_is_not_an_answer(folder):
    (folder.path / "shards").mkdir()
    (folder.path / "shards" / "rows.tsv").write_text("prompt\tanswer\nq\t\nq\t5\n")
    source = folder.read(folder.path / "shards", kind="prompts")
    assert [source[row].answer for row in (0, 1)] == [None, "5"]
    with pytest.raises(BadSample, match="row 0: has a prompt without an answer"):
        folder.read(folder.path / "shards")[0]


def test_missing_time_is_not_a_text(folder):
    """pandas' NaT stored as a value, which Arrow prints as the text NaT."""
    none = pa.Array.from_buffers(
        pa.timestamp("ns"), 1, [None, pa.py_buffer((-(2**63)).to_bytes(8, "little", signed=True))]
    )
    parquet.write_table(
        pa.table({"prompt": ["q"], "answer": none}), folder.path / "rows.parquet", coerce_timestamps=None
    )
    assert open_rows(folder.path / "rows.parquet")[0].get("answer") != "NaT"
    with pytest.raises(BadSample):
        folder.read(folder.path / "rows.parquet")[0]
