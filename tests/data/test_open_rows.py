"""Rows of JSON and JSONL files, conversion into the cache, and errors for unusable files."""

import json
import multiprocessing
import os
import pickle
import struct
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from octavo.data import BadSample, DataError
from octavo.data.formats import arrow_rows, registry
from octavo.data.storage import cache
from octavo.data.storage.open_rows import open_rows
from octavo.train.run_dir import input_fingerprints


def test_json_and_jsonl_give_equal_rows(folder):
    rows = [{"n": n, "text": "é" * n} for n in range(5)]
    lines = folder.json(rows, "rows.jsonl")
    assert list(map(dict, open_rows(folder.json(rows)))) == rows
    assert [open_rows(lines)[n] for n in (4, 0, 2)] == [rows[4], rows[0], rows[2]]


def test_json_structure_takes_precedence_over_the_suffix(folder):
    lines = folder.json([{"n": 1}, {"n": 2}], "x.jsonl").rename(folder.path / "lines.json")
    assert (len(open_rows(lines)), open_rows(lines).line(1)) == (2, 2)
    pretty = folder.path / "pretty.json"
    pretty.write_text(json.dumps([{"n": 1}], indent=2))
    assert (len(open_rows(pretty)), open_rows(pretty).line(0)) == (1, 0)


def test_blank_lines_missing_line_end_and_bom_are_accepted(folder):
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
    with pytest.raises(BadSample, match=r"x\.jsonl, row 1: line 3 is not JSON: .*Fix or remove the row") as bad:
        rows[1]
    assert (bad.value.row, bad.value.file) == (1, str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"[]", r"has no rows"),
        (b"\n  \n", r"is not JSON"),
        (b'{"data": [1], "info": 2}', r"top level is an object with the keys 'data', 'info'; it must be a list"),
        (b'"text"', r"top level is a str; it must be a list"),
        (b'[{"a": 1},\n {"b" 2}]', r"is not JSON: .* at line 2, column 7; fix it there"),
        (b'[{"a": "\xff"}]', r"is not UTF-8 text: byte 8 \(line 1\) is 0xff\. Save it as UTF-8"),
        ('[{"a": 1}]'.encode("utf-16"), r"is not UTF-8 text: byte 0 \(line 1\)"),
        (b"[" * 100_000, r"Nested too deeply, and never closed at line 1, column 2"),
        (b'{"a": ' * 100_000, r"top level is nested too deeply"),
    ],
)
def test_unusable_files_are_rejected(folder, content, message):
    path = folder.path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.json.*" + message):
        open_rows(path)


GOOD = b'{"n": 1}'
BAD_ROWS = {
    "half a character": (rb'{"a": ["\ud83d \ud800"]}', r"holds half a character \(a lone .ud83d\)"),
    "digits": (b'{"id": -' + b"7" * 5000 + b"}", r"contains a number of 5000 digits"),
    "deep": (b'{"a": ' * 70 + b"1" + b"}" * 70, r"nests brackets deeper than 64"),
    "deeper than Python": (
        b'{"a": "]", "b": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        r"nests brackets deeper than 64",
    ),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("name", ("rows.json", "rows.jsonl", "lines.json", "streamed.jsonl", "streamed.json"))
def test_bad_row_does_not_affect_others(folder, kind, name):
    """In a list, in lines, and in lines of a file with another suffix."""
    row, message = BAD_ROWS[kind]
    parts = [row, GOOD, b'"x"'] if name in ("lines.json", "streamed.json") else [GOOD, row, b'"x"']
    bad = parts.index(row)
    path = folder.path / name
    path.write_bytes(b"[" + b" ,\n".join(parts) + b"]" if name == "rows.json" else b"\n".join(parts))
    rows = open_rows(path, stream="streamed" in name)
    assert len(rows) == 3 and rows[1 - bad] == {"n": 1} and rows[2] == "x"
    with pytest.raises(BadSample, match=rf"{name}, row {bad}: .*{message}.*Fix or remove the row") as refused:
        rows[bad]
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("stream", (False, True))
def test_invalid_lines_and_changed_files_are_reported(folder, monkeypatch, stream):
    path = folder.path / "x.jsonl"
    path.write_bytes(b'{"n": 1}\n{"a": "\xe9"}\n{"a": "' + b"z" * 99 + b'"}\n{"n": 4}')
    monkeypatch.setattr("octavo.data.formats.json_files.ROW_BYTES", 40)
    rows = open_rows(path, stream=stream)
    assert (len(rows), rows[0], rows[3]) == (4, {"n": 1}, {"n": 4})
    with pytest.raises(
        BadSample, match=r"row 1: line 2 is not UTF-8 \(its byte 7\); save it as UTF-8, for example with `i"
    ):
        rows[1]
    with pytest.raises(BadSample, match=r"row 2: line 3 has 109 bytes, over the limit of 40; split or remove it"):
        rows[2]
    path.write_bytes(GOOD)
    if stream:
        with pytest.raises(DataError, match=r"x\.jsonl changed while it was read; start again"):
            rows[3]
        assert open_rows(path, stream=True)[0] == {"n": 1}
    else:
        assert rows[3] == {"n": 4}, "what was opened stays as it was"


def test_unstreamable_files_are_rejected(folder):
    with pytest.raises(
        DataError, match=r"rows\.json: `stream` needs rows that can be read one by one, and this is one"
    ):
        open_rows(folder.json([{"n": 1}]), stream=True)
    (folder.path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"blank\.jsonl"):
        open_rows(folder.path / "blank.jsonl", stream=True)


def test_blank_and_missing_files_are_rejected(folder):
    (folder.path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="blank.jsonl"):
        open_rows(folder.path / "blank.jsonl")
    with pytest.raises(DataError, match=r"none\.json is missing\. Check data\.path in the"):
        open_rows(folder.path / "none.json")
    (folder.path / "empty").mkdir()
    with pytest.raises(
        DataError, match="empty is a folder with none of them.*must name a JSON, JSONL, CSV, parquet or tar"
    ):
        open_rows(folder.path / "empty")
    os.mkfifo(folder.path / "pipe.jsonl")
    with pytest.raises(DataError, match="pipe.jsonl is a named pipe, not a file"):
        open_rows(folder.path / "pipe.jsonl")


ROWS = [{"n": n, "text": "é" * (n % 50)} if n % 7 else [n, None, {"x": 1.5}] for n in range(3000)]


@pytest.fixture
def logged_lines(monkeypatch):
    """Put every file into the cache; return the logged lines."""
    monkeypatch.setattr(cache, "SMALL_FILE", 0)
    monkeypatch.setattr(cache, "PROGRESS_SECONDS", -1.0)
    return []


@pytest.mark.parametrize("kind", ("jsonl", "parquet"))
def test_damaged_offset_in_cache_is_named(folder, kind, monkeypatch):
    """Arrow trusts the offsets of a file, and one that points outside would end the process. So a changed file is
    validated when it is opened, and each row when it is read, because a disk may fail later."""
    monkeypatch.setattr(cache, "SMALL_FILE", 0)
    rows = [{"text": f"{n:04}" * 100} for n in range(8)]
    if kind == "jsonl":
        path, size = folder.json(rows, "rows.jsonl"), len(json.dumps(rows[0])) + 1
        sizes, wrong = struct.pack("<qq", size, 2 * size), struct.pack("<qq", size, 1 << 40)
    else:
        path = folder.path / "rows.parquet"
        sizes, wrong = struct.pack("<ii", 400, 800), struct.pack("<ii", 400, 1 << 30)
        parquet.write_table(pa.Table.from_pylist(rows), path)
    open_rows(path, folder.path / "cache")
    (cache_file,) = (folder.path / "cache").glob("*.arrow")
    whole = cache_file.read_bytes()
    assert whole.count(sizes) == 1
    cache_file.write_bytes(whole.replace(sizes, wrong))
    message = rf"{cache_file.name} is not a valid Arrow file \(ArrowInvalid: .*\); delete it"
    with pytest.raises(DataError, match=message):
        open_rows(path, folder.path / "cache")
    monkeypatch.setattr("octavo.data.formats.columnar.check_file", lambda *file: None)
    found = open_rows(path, folder.path / "cache")
    assert found[0] == rows[0] and found[7] == rows[7]
    for row in (1, 2):
        with pytest.raises(DataError, match=message) as caught:
            found[row]
        assert not isinstance(caught.value, BadSample)


def test_damaged_key_file_is_recomputed(folder, monkeypatch):
    monkeypatch.setattr(cache, "SMALL_FILE", 0)
    found = open_rows(folder.json([{"a": 1}, {"b": 2}], "rows.jsonl"), folder.path / "cache")
    found.keys()
    (key_file,) = (folder.path / "cache").glob("*.keys")
    for damaged in (b"", b'["a', b"\xff", b"5", b"[5]", b'"ab"'):
        key_file.write_bytes(damaged)
        assert found.keys() == {"a", "b"} and json.loads(key_file.read_text()) == ["a", "b"]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_large_file_is_converted_once(folder, name, logged_lines, monkeypatch):
    path, where = folder.json(ROWS, name), folder.path / "cache"
    rows = open_rows(path, where, logged_lines.append)
    assert [rows[n] for n in range(len(rows))] == ROWS
    assert "is converted to Arrow, once" in logged_lines[0] and any("% converted" in line for line in logged_lines)
    assert pickle.loads(pickle.dumps(rows))[2999] == ROWS[2999] and len(pickle.dumps(rows)) < 500
    monkeypatch.setattr("octavo.data.formats.registry.write_texts", None)  # the file must not be read again
    again, cache_files = open_rows(path, where), list(where.glob("*.arrow"))
    assert again[5] == ROWS[5] and len(cache_files) == 1 and not list(where.glob(".*"))
    cache_files[0].write_bytes(cache_files[0].read_bytes()[:-9])
    with pytest.raises(DataError, match=r"arrow is not a valid Arrow file .*; delete it"):
        open_rows(path, where)


def test_changed_file_is_converted_again(folder, logged_lines):
    path, where = folder.json(ROWS[:2]), folder.path / "cache"
    first = open_rows(path, where)
    path.write_text("[1, 2, 3]")
    assert (len(first), len(open_rows(path, where)), len(list(where.glob("*.arrow")))) == (2, 3, 2)


def test_concurrent_conversions_wait_for_each_other(folder, logged_lines):
    path, where = folder.json(ROWS), folder.path / "cache"
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: open_rows(path, where, logged_lines.append)[2999], range(4)))
    assert found == [ROWS[2999]] * 4 and sum("once" in line for line in logged_lines) == 1


def _convert_with_other(path, where, meet, locks):
    """In a separate process: convert at the same time as the other one, map the file, and read it again after both."""
    if not locks:

        class FileLock:
            def __init__(self, file):
                pass

            def acquire(self):
                raise NotImplementedError("no flock here")

        cache.FileLock = FileLock
    cache.SMALL_FILE, log_lines, writes = 0, [], arrow_rows.write_texts

    def together(sink, rows, done):
        writes(sink, rows, done)
        if not locks:
            meet.wait(60)  # both have written the file, and neither has published it

    registry.write_texts = together
    meet.wait(60)
    rows = open_rows(path, where, log_lines.append)
    before = os.stat(next(where.glob("*.arrow"))).st_ino
    meet.wait(60)
    return rows[2999], rows[0], before == os.stat(next(where.glob("*.arrow"))).st_ino, len(log_lines)


@pytest.mark.parametrize("locks", (True, False))
def test_concurrent_processes_convert_once(folder, locks):
    """Simulates two machines with one mount, with and without locks between them."""
    path, where = folder.json(ROWS), folder.path / "cache"
    where.mkdir()
    with multiprocessing.Manager() as manager, ProcessPoolExecutor(2) as pool:
        meet = manager.Barrier(2)
        found = [
            job.result(60) for job in [pool.submit(_convert_with_other, path, where, meet, locks) for _ in range(2)]
        ]
    assert all(one[:3] == (ROWS[2999], ROWS[0], True) for one in found), "what is mapped is not exchanged"
    assert sorted(one[3] > 0 for one in found) == [not locks, True]
    assert len(list(where.glob("*.arrow"))) == 1 and not list(where.glob(".*"))


def test_conversion_works_without_hard_links(folder, logged_lines, monkeypatch):
    def link(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", link)
    assert open_rows(folder.json(ROWS), folder.path / "cache")[2999] == ROWS[2999]


def test_images_in_a_data_folder_are_not_listed(folder, monkeypatch):
    """Neither the cache nor the fingerprints of a run stat images next to shards or in subfolders."""
    shards = folder.path / "shards"
    folder.image("shards/a.png"), folder.image("shards/deep/b.png")
    folder.json(ROWS[:9], "shards/one.jsonl")
    before, prints = cache._identity(shards), input_fingerprints._data_fingerprint(shards, folder.path)
    folder.image("shards/deep/c.png"), folder.image("shards/a.png", color=0)
    assert (before, prints) == (cache._identity(shards), input_fingerprints._data_fingerprint(shards, folder.path))
    assert [file.name for file in cache.list_row_files(shards)] == ["one.jsonl"]
    folder.json(ROWS[:8], "shards/one.jsonl")
    assert before != cache._identity(shards) and prints != input_fingerprints._data_fingerprint(shards, folder.path)


def test_failed_conversion_leaves_no_files(folder, logged_lines, monkeypatch):
    broken, where = folder.path / "broken.json", folder.path / "cache"
    broken.write_text(json.dumps(ROWS)[:-1])
    with pytest.raises(DataError, match=r"broken\.json is not JSON"):
        open_rows(broken, where)
    path = folder.json(ROWS)
    with pytest.raises(DataError, match=r"blocked cannot keep rows\.json as Arrow: .*data\.cache \(or OCTAVO_CACHE\)"):
        (folder.path / "blocked").write_text("")
        open_rows(path, folder.path / "blocked")
    writes = arrow_rows.write_texts

    def slow(sink, rows, done):
        writes(sink, rows, done)
        path.write_text("[1]")

    monkeypatch.setattr("octavo.data.formats.registry.write_texts", slow)
    with pytest.raises(DataError, match=r"rows\.json changed while it was read; start again"):
        open_rows(path, where)
    assert not [*where.glob("*.arrow"), *where.glob(".*")]
