"""Columns of JSON text, as `datasets` and parquet store them, give the same rows as the original JSON."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from octavo.data import BadSample
from octavo.data.storage import cache
from octavo.data.storage.open_rows import open_rows

CALL = {"type": "function", "function": {"name": "look", "arguments": {"x": [1, None]}}}
TALKS = [
    {"messages": [{"role": "user", "content": "Colour?"}, {"role": "assistant", "content": "green"}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]},
                  {"role": "assistant", "content": "red"}]},
    # texts that are JSON themselves, which datasets stores as they are
    {"messages": [{"role": "user", "content": '{"a":  1}'}, {"role": "assistant", "content": "5"}]},
    {"messages": [{"role": "user", "content": "[]"}, {"role": "assistant", "content": "1e400"}]},
    {"messages": [{"role": "user", "content": '[{"name": "f"}]'}, {"role": "assistant", "content": "true"}]},
]  # fmt: skip
CALLS = [
    {"tools": [{"type": "function", "function": {"name": "look", "parameters": {"x": default}}}],
     "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [
         {**CALL, "function": {"name": "look", "arguments": {"x": default}}}]}]}
    for default in ([1, None], {"y": 2.5}, "z")
]  # fmt: skip
ANSWERS = [{"prompt": "?", "answer": answer, "level": level} for answer, level in
           (("five", 1), (["5", 7], {"a": [1]}), ("5.0", "x"), ('{"a": 1}', [2]))]  # fmt: skip
PAIRS = [{"prompt": "p", "chosen": chosen, "rejected": "no"} for chosen in
         ("yes", [{"role": "assistant", "content": "sure"}], "[1, 2]", "17")]  # fmt: skip


def stored(folder, rows, kind: str):
    """Let `datasets` read and write the rows; "bare" removes the metadata that it writes."""
    path = folder.json(rows, "from.jsonl")
    table = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder.path / "hf"))
    assert "Json" in str(table.features)
    target = folder.path / f"rows.{kind}"
    if kind == "saved":
        table.save_to_disk(target)
    elif kind == "parquet":
        table.to_parquet(target)
    else:  # the same from the metadata only, or from the types only
        whole = table.with_format("arrow")[:]
        if kind == "metadata.parquet":
            plain = pa.Table.from_pylist(whole.to_pylist())
            whole = plain.replace_schema_metadata(whole.schema.metadata)
            parquet.write_table(whole, target)
        else:
            parquet.write_table(whole.replace_schema_metadata({}), target, store_schema=False)
    return target


@pytest.fixture(autouse=True)
def no_log():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


KINDS = ("saved", "parquet", "metadata.parquet", "types.parquet")


@pytest.mark.parametrize(
    ("rows", "kind", "of"),
    [*((TALKS, kind, "conversations") for kind in KINDS), (CALLS, "saved", "conversations"),
     (CALLS, "parquet", "conversations"), (ANSWERS, "parquet", "prompts"), (PAIRS, "saved", "pairs")],
)  # fmt: skip
def test_rows_equal_their_source_json(folder, monkeypatch, rows, kind, of):
    folder.image()
    expected = folder.read(rows, "rows.jsonl", of)
    path = stored(folder, rows, kind)
    monkeypatch.setenv("OCTAVO_CACHE", str(folder.path / "cache"))
    for small, stream in ((cache.SMALL_FILE, False), (0, False), *([(0, True)] if kind != "saved" else [])):
        monkeypatch.setattr(cache, "SMALL_FILE", small)
        source = folder.read(path, kind=of, images=str(folder.path), stream=stream)
        for row in range(len(rows)):
            text = repr(source[row]).replace(str(path), expected.name)
            assert text == repr(expected[row])


def test_turns_in_one_json_column_are_parsed(folder):
    """As a JSON type, in a CSV cell, and as JSON text in any file."""
    expected = folder.read(TALKS[:1], "rows.jsonl")[0].turns
    text = json.dumps(TALKS[0]["messages"])
    whole = pa.table({"messages": pa.array([text], pa.json_())})
    parquet.write_table(whole, folder.path / "typed.parquet")
    parquet.write_table(pa.table({"messages": [text]}), folder.path / "text.parquet")
    quoted = text.replace('"', '""')
    (folder.path / "rows.csv").write_text(f'messages,n\n"{quoted}",1\n')
    for name in ("typed.parquet", "text.parquet", "rows.csv"):
        assert folder.read(folder.path / name)[0].turns == expected


def test_invalid_json_value_affects_only_its_row(folder):
    rows = pa.table({"prompt": pa.array(['"a"', '{"b', '"c"'], pa.json_()), "answer": ["1", "2", "3"]})
    parquet.write_table(rows, folder.path / "rows.parquet")
    source = folder.read(folder.path / "rows.parquet")
    assert [source[row].turns[0].text for row in (0, 2)] == ["a", "c"]
    with pytest.raises(BadSample, match=r"rows\.parquet, row 1: its JSON column 'prompt' is not JSON"):
        source[1]


@pytest.mark.parametrize("stream", (False, True))
def test_renamed_columns_keep_their_texts(folder, monkeypatch, stream):
    """Under the name that `columns` gives. `datasets` takes 007 and 5. for JSON, JSON parsers do not."""
    texts = ["1.50", "007", "5.", "true", '{"a": 1}', "[1, 2]", "-0", " 7", '["x", "y"]', "five"]
    rows = pa.table(
        {"q": pa.array([*texts[:-1], '"five"'], pa.json_()), "a": pa.array([*texts[:-1], '"5"'], pa.json_())}
    )
    parquet.write_table(rows, folder.path / "rows.parquet")
    monkeypatch.setattr(cache, "SMALL_FILE", 0 if stream else cache.SMALL_FILE)
    monkeypatch.setenv("OCTAVO_CACHE", str(folder.path / "cache"))
    source = folder.read(folder.path / "rows.parquet", columns={"prompt": "q", "answer": "a"}, stream=stream)
    assert [[turn.text for turn in source[row].turns] for row in range(len(texts))] == [
        [text, "5" if text == "five" else text] for text in texts
    ]


def test_damaged_metadata_is_ignored(folder):
    for damaged in (b"", b"[]", b'{"info": 3}', b'{"info": {"features": {"text": []}}}', b"[" * 100_000):
        rows = pa.table({"text": ["[1]"]}).replace_schema_metadata({b"huggingface": damaged})
        parquet.write_table(rows, folder.path / "rows.parquet")
        assert open_rows(folder.path / "rows.parquet")[0] == {"text": "[1]"}
