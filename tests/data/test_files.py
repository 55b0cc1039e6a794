"""Rows of JSON and JSONL files, and what is said about files that are neither."""

import json
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
    with pytest.raises(BadSample, match=r"x\.jsonl, row 1: line 3 is not JSON .*mend or remove it") as bad:
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
        (b'[{"a": "\xff"}]', r"is not UTF-8 \(byte 8, line 1\); save it as UTF-8, for example with `iconv"),
        ('[{"a": 1}]'.encode("utf-16"), r"is not UTF-8 \(byte 0, line 1\)"),
        (b"[" * 100_000, r"nested too deeply"),
    ],
)
def test_files_that_cannot_be_used(folder, content, message):
    path = folder.path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.json.*" + message):
        open_rows(path)


def test_jsonl_that_is_not_utf8_names_the_line(folder):
    path = folder.path / "bad.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "\xe9"}\n')
    with pytest.raises(DataError, match=r"not UTF-8 \(byte 16, line 2\)"):
        open_rows(path)


def test_blank_jsonl_missing_file_and_folder(folder):
    (folder.path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="blank.jsonl"):
        open_rows(folder.path / "blank.jsonl")
    with pytest.raises(DataError, match=r"cannot be read \(No such file or directory\); check data\.path"):
        open_rows(folder.path / "none.json")
    with pytest.raises(DataError, match="is a folder; data.path must name a JSON or JSONL file"):
        open_rows(folder.path)
