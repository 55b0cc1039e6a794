"""Cached results depend on the content of files, not on size and mtime, which a copy may set."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from octavo.config import load_config_text
from octavo.data import DataError, file_digests
from octavo.data.storage import cache, remote
from octavo.data.storage.open_rows import open_rows
from octavo.train import TrainError
from octavo.train.run_dir import input_fingerprints


@pytest.fixture(autouse=True)
def _treat_files_as_old(monkeypatch, tmp_path):
    """Treat the files of these tests, which were just written, as old files."""
    monkeypatch.setattr(file_digests, "RECENT", -(10**18))
    monkeypatch.setattr(cache, "SMALL_FILE", 0)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def reads(monkeypatch):
    """Return a list that receives the name of each file whose bytes are read once to compute digests."""
    read, names = file_digests._read, []
    monkeypatch.setattr(file_digests, "_read", lambda file: names.append(file.name) or read(file))
    return names


def write(file: Path, rows: list) -> Path:
    if file.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".csv":
        file.write_text("".join(f"{line}\n" for line in ["n", *(row["n"] for row in rows)]))
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def replace_in_place(old: Path, new: Path) -> None:
    """Replace content and mtime of a file in place, as `cp -p` does; the inode stays."""
    with open(old, "r+b") as out:
        out.write(new.read_bytes())
    shutil.copystat(new, old)


def replace_by_rename(old: Path, new: Path) -> None:
    """Replace a file by a new one with the same name, as `rsync -t` and tar do."""
    aside = shutil.copy2(new, old.with_name("aside"))
    os.replace(aside, old)


@pytest.mark.parametrize("replace", (replace_in_place, replace_by_rename))
@pytest.mark.parametrize(
    ("kind", "how"),
    [("jsonl", "kept"), ("json", "kept"), ("parquet", "folder"), ("csv", "stream"), ("parquet", "stream")],
)
def test_replaced_file_with_equal_size_and_mtime_is_read_again(tmp_path, replace, kind, how):
    (tmp_path / "set").mkdir()
    old, new = write(tmp_path / f"set/a.{kind}", [{"n": 111}] * 3), write(tmp_path / f"b.{kind}", [{"n": 222}] * 3)
    os.utime(new, ns=(0, old.stat().st_mtime_ns))
    before = old.stat()
    path = old.parent if how == "folder" else old
    assert int(open_rows(path, stream=how == "stream")[2]["n"]) == 111
    replace(old, new)
    assert (old.stat().st_size, old.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert int(open_rows(path, stream=how == "stream")[2]["n"]) == 222


@pytest.mark.parametrize("kind", ("jsonl", "parquet"))
def test_stream_stops_when_its_file_is_replaced(tmp_path, kind):
    old, new = (write(tmp_path / f"{name}.{kind}", [{"n": n}] * 3) for name, n in (("a", 111), ("b", 222)))
    os.utime(new, ns=(0, old.stat().st_mtime_ns))
    rows = open_rows(old, stream=True)
    assert rows[0] == {"n": 111}
    replace_in_place(old, new)
    if kind == "parquet":  # of a row group that is not in memory
        from octavo.data.formats import streaming

        streaming.TABLES._kept.clear()
    with pytest.raises(DataError, match=rf"a\.{kind} changed while it was read; start again"):
        rows[1]


def test_digest_is_computed_once_and_equal_content_is_not_converted_again(tmp_path, reads):
    """Also if the file was moved away and back, linked, or copied over itself, so that inode or ctime differ."""
    file = write(tmp_path / "a.jsonl", [{"n": 1}])
    for _ in range(3):
        assert open_rows(file)[0] == {"n": 1} and reads == ["a.jsonl"]
    file_digests._LOCAL_NOTES.clear(), file_digests._LOADED.clear()  # another process
    open_rows(file)
    assert reads == ["a.jsonl"]
    (tmp_path / "link").hardlink_to(file)
    open_rows(file)
    replace_by_rename(file, file)
    open_rows(file)
    assert reads == ["a.jsonl"] * 3 and len([*(tmp_path / "cache").glob("*.arrow")]) == 1


def test_recently_changed_file_gets_no_note(tmp_path, reads, monkeypatch):
    """It could change again with the same time stamp."""
    monkeypatch.setattr(file_digests, "RECENT", 10**18)
    file = write(tmp_path / "a.jsonl", [{"n": 1}])
    open_rows(file), open_rows(file)
    (notes,) = (tmp_path / "cache/contents").glob("*")
    assert reads == ["a.jsonl"] * 2 and '"sha256"' not in notes.read_text()


def test_broken_notes_are_ignored(tmp_path, reads):
    file = write(tmp_path / "a.jsonl", [{"n": 1}])
    home = file_digests._note_location(file, tmp_path / "cache")[0]
    open_rows(file)
    good = home.read_text()
    for broken in ("", "{", "[]\n", good[: len(good) // 2], good.replace('"stat": [', '"stat": ["a", '), "\xff\n" * 9):
        home.write_text(broken)
        file_digests._LOCAL_NOTES.clear(), file_digests._LOADED.clear(), reads.clear()
        assert open_rows(file)[0] == {"n": 1} and reads == ["a.jsonl"]
        file_digests._LOCAL_NOTES.clear(), file_digests._LOADED.clear()
        assert open_rows(file)[0] == {"n": 1} and reads == ["a.jsonl"], "what is appended to a torn line counts"


def test_unwritable_cache_reads_each_file_once_per_process(tmp_path, reads):
    (tmp_path / "cache").write_text("")
    file = write(tmp_path / "a.jsonl", [{"n": 1}])
    assert file_digests.compute_digests([file], tmp_path / "cache") == file_digests.compute_digests(
        [file], tmp_path / "cache"
    )
    assert reads == ["a.jsonl"]


def test_missing_or_changing_file_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        file_digests.compute_digests([tmp_path / "none"], tmp_path)
    file = write(tmp_path / "a.jsonl", [{"n": 1}])
    stat, calls = file_digests.stat_key, []
    monkeypatch.setattr(file_digests, "stat_key", lambda found: (*stat(found)[:3], calls.append(1) or len(calls)))
    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read"):
        file_digests.digest_file(file)


def config(path: Path, tmp_path: Path):
    text = f"model: {{path: {tmp_path}}}\ndata: {{train: [{{path: '{path}'}}], cache: {tmp_path / 'cache'}}}\n"
    return load_config_text(text + "train: {phase: sft, steps: 1}\nrun: {dir: r}\n")


@pytest.mark.parametrize("kind", ("file", "folder", "url"))
def test_run_detects_changes_after_the_first_64_mib(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(file_digests, "HEAD", 64)
    (tmp_path / "set").mkdir()
    file = write(tmp_path / "set/a.jsonl", [{"n": n} for n in range(100)])
    remote.list_files.cache_clear()
    path = {"file": file, "folder": file.parent, "url": f"file://{file}"}[kind]
    cfg = config(path, tmp_path)
    saved = json.loads(json.dumps(input_fingerprints.fingerprints(cfg)))
    input_fingerprints.check_same_inputs(saved, input_fingerprints.fingerprints(cfg), tmp_path / "c", "m")
    new = tmp_path / "new.jsonl"
    new.write_text(file.read_text().replace('{"n": 98}', '{"n": 89}'))
    os.utime(new, ns=(0, file.stat().st_mtime_ns))
    replace_by_rename(file, new)
    remote.list_files.cache_clear()
    with pytest.raises(TrainError, match="was made with different data: .*, and the contents differ"):
        input_fingerprints.check_same_inputs(saved, input_fingerprints.fingerprints(cfg), tmp_path / "c", "m")
    for prints in saved["data"].values():  # of 0.4.0, which compared the first 64 MiB
        del prints["whole"]
    input_fingerprints.check_same_inputs(saved, input_fingerprints.fingerprints(cfg), tmp_path / "c", "m")


def test_run_resumes_with_a_copy_of_its_data(tmp_path):
    """A copy has a different inode, ctime and mtime, but the same bytes."""
    file = write(tmp_path / "a.jsonl", [{"n": 1}])
    cfg = config(file, tmp_path)
    saved = input_fingerprints.fingerprints(cfg)
    shutil.copy(file, tmp_path / "copy")
    os.replace(tmp_path / "copy", file)
    input_fingerprints.check_same_inputs(saved, input_fingerprints.fingerprints(cfg), tmp_path / "c", "m")


def test_replaced_weights_with_equal_mtime_are_detected(tmp_path):
    """Also in a resumed conversion, and in a stored evaluation."""
    from octavo.checkpoint.convert import convert

    old, new = tmp_path / "m/a.safetensors", tmp_path / "b"
    old.parent.mkdir()
    old.write_bytes(b"1"), new.write_bytes(b"2")
    os.utime(new, ns=(0, old.stat().st_mtime_ns))
    before = convert._source_identity(old.parent)
    replace_in_place(old, new)
    assert convert._source_identity(old.parent) != before


def test_files_are_read_in_parallel_and_logged_once(tmp_path, monkeypatch):
    monkeypatch.setattr(file_digests, "HEAD", 1)
    files = [write(tmp_path / f"{n}.jsonl", [{"n": n}]) for n in range(9)]
    log_lines: list[str] = []
    contents = file_digests.compute_digests(files, tmp_path / "cache", log_lines.append)
    assert (
        len(log_lines) == 1
        and "0.jsonl and 8 more: " in log_lines[0]
        and "are read once to compute digests" in log_lines[0]
    )
    assert file_digests.compute_digests(files, tmp_path / "cache", log_lines.append) == contents and len(log_lines) == 1
    assert (
        len({c.sha256 for c in contents}) == 9
        and SimpleNamespace(**contents[3]._asdict()).size == files[3].stat().st_size
    )
