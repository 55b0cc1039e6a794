"""Rows of JSON and JSONL files, and what is said about files that are neither."""

import json
import os
import pickle

import pytest

from octavo.data import BadSample, DataError
from octavo.data.files import JsonlRows, JsonRows, open_rows


def test_json_and_jsonl_give_the_same_rows(folder):
    rows = [{"n": n, "text": "é" * n} for n in range(5)]
    lines = folder.json(rows, "rows.jsonl")
    assert list(map(dict, open_rows(folder.json(rows)))) == rows
    assert isinstance(open_rows(lines), JsonlRows) and [open_rows(lines)[n] for n in (4, 0, 2)] == [
        rows[4], rows[0], rows[2]]  # fmt: skip


def test_structure_decides_not_the_name(folder):
    lines = folder.json([{"n": 1}, {"n": 2}], "x.jsonl").rename(folder.path / "lines.json")
    assert isinstance(open_rows(lines), JsonlRows)
    pretty = folder.path / "pretty.json"
    pretty.write_text(json.dumps([{"n": 1}], indent=2))
    assert isinstance(open_rows(pretty), JsonRows)


def test_blank_lines_last_line_without_end_and_bom(folder):
    path = folder.path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\n\n   \r\n{"n": 2}\r\n{"n": 3}')
    rows = open_rows(path)
    assert [rows[n]["n"] for n in range(len(rows))] == [1, 2, 3] and rows.line(1) == 4
    path.with_suffix(".json").write_bytes(b'\xef\xbb\xbf[{"n": 1}]')
    assert len(open_rows(path.with_suffix(".json"))) == 1


def test_jsonl_survives_pickling_and_names_the_broken_line(folder):
    path = folder.path / "x.jsonl"
    path.write_text('{"n": 1}\n\n{"n": \n{"n": 3}\n')
    rows = open_rows(path)
    assert rows[0] == {"n": 1}
    rows = pickle.loads(pickle.dumps(rows))
    assert rows[2] == {"n": 3}
    with pytest.raises(BadSample, match=r"x\.jsonl, row 1: line 3 is not JSON: .*Mend or remove the row") as bad:
        rows[1]
    assert (bad.value.row, bad.value.file) == (1, str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"[]", r"holds no rows"),
        (b"\n  \n", r"is not JSON"),
        (b'{"data": [1], "info": 2}', r"top level is an object with the keys 'data', 'info'; it must be a list"),
        (b'"text"', r"top level is a str; it must be a list"),
        (b'[{"a": 1},\n {"b" 2}]', r"is not JSON: .* at line 2, column 7; mend it there"),
        (b'[{"a": "\xff"}]', r"is not UTF-8 text: byte 8 \(line 1\) is 0xff\. Save it as UTF-8"),
        ('[{"a": 1}]'.encode("utf-16"), r"is not UTF-8 text: byte 0 \(line 1\)"),
        (b"[" * 100_000, r"Nested too deeply, and never closed at line 1, column 2"),
        (b'{"a": ' * 100_000, r"top level is nested too deeply"),
    ],
)
def test_files_that_cannot_be_used(folder, content, message):
    path = folder.path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.json.*" + message):
        open_rows(path)


GOOD = b'{"n": 1}'
BAD_ROWS = {
    "half a character": (rb'{"a": ["\ud83d \ud800"]}', r"holds half a character \(.ud83d alone\)"),
    "digits": (b'{"id": -' + b"7" * 5000 + b"}", r"holds a number of 5000 digits"),
    "deep": (b'{"a": ' * 70 + b"1" + b"}" * 70, r"nests brackets deeper than 64"),
    "deeper than Python": (
        b'{"a": "]", "b": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        r"nests brackets deeper than 64",
    ),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("name", ("rows.json", "rows.jsonl", "lines.json"))
def test_a_bad_row_is_one_bad_row(folder, kind, name):
    """In a list, in lines, and in lines whose file's name does not say so."""
    row, message = BAD_ROWS[kind]
    parts = [row, GOOD, b'"x"'] if name == "lines.json" else [GOOD, row, b'"x"']
    bad = parts.index(row)
    path = folder.path / name
    path.write_bytes(b"[" + b" ,\n".join(parts) + b"]" if name == "rows.json" else b"\n".join(parts))
    rows = open_rows(path)
    assert len(rows) == 3 and rows[1 - bad] == {"n": 1} and rows[2] == "x"
    with pytest.raises(BadSample, match=rf"{name}, row {bad}: .*{message}.*Mend or remove the row") as refused:
        rows[bad]
    assert str(refused.value).isprintable()


def test_lines_that_are_not_utf8_too_long_or_gone(folder, monkeypatch):
    path = folder.path / "x.jsonl"
    path.write_bytes(b'{"n": 1}\n{"a": "\xe9"}\n{"a": "' + b"z" * 99 + b'"}\n{"n": 4}')
    monkeypatch.setattr("octavo.data.files.ROW_BYTES", 40)
    rows = open_rows(path)
    assert (len(rows), rows[0], rows[3]) == (4, {"n": 1}, {"n": 4})
    with pytest.raises(
        BadSample, match=r"row 1: line 2 is not UTF-8 \(its byte 7\); save it as UTF-8, for example with `i"
    ):
        rows[1]
    with pytest.raises(BadSample, match=r"row 2: line 3 has 109 bytes, and 40 are the most; split or remove it"):
        rows[2]
    path.write_bytes(GOOD)
    with pytest.raises(DataError, match=r"x\.jsonl is shorter than when it was opened \(line 4 is gone\)"):
        rows[3]


def test_blank_jsonl_missing_file_and_folder(folder):
    (folder.path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="blank.jsonl"):
        open_rows(folder.path / "blank.jsonl")
    with pytest.raises(DataError, match=r"none\.json is missing\. Check data\.path in the"):
        open_rows(folder.path / "none.json")
    with pytest.raises(DataError, match="is a folder, not a file.*must name a JSON or JSONL file"):
        open_rows(folder.path)
    os.mkfifo(folder.path / "pipe.jsonl")
    with pytest.raises(DataError, match="pipe.jsonl is a named pipe, not a file"):
        open_rows(folder.path / "pipe.jsonl")
