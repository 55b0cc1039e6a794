"""Rows of tar files: member names as in WebDataset, media from the tar, bad rows."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.config import Dataset
from octavo.data import BadSample, DataError, Encoder, Loader, Mixture, read
from octavo.data.formats.tar import TarRows, write_index
from octavo.data.storage import cache
from octavo.data.storage.open_rows import open_rows


def make_tar(path: Path, *files: tuple[str, Any]) -> Path:
    """Make a tar from (name, bytes, text or JSON value)."""
    with tarfile.open(path, "w") as archive:
        for name, content in files:
            data = content if isinstance(content, bytes) else content.encode() if isinstance(content, str) else \
                json.dumps(content).encode()  # fmt: skip
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def error_of(rows, row: int) -> str:
    with pytest.raises(BadSample) as bad:
        rows[row]
    return str(bad.value)


def talk(*words: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(words)]}


def test_member_names_determine_keys(tmp_path):
    path = make_tar(
        tmp_path / "a.tar",
        ("d/7.json", {"caption": "x", "id": 3}), ("d/7.JPG", b"jpg"), ("d/8.txt", "a cat\n"), ("d/8.png", b"png"),
        ("9.cls", "12\n"), ("9.cls2", "no"), ("9.caption.txt", "é"), ("9.seg.png", b"seg"), ("9.10.png", b"ten"),
        ("9.2.png", b"two"), ("README", "no row"), (".hidden.txt", "no"), ("__index__.json", "[]"), ("d/8.cls", "big"),
    )  # fmt: skip
    rows = open_rows(path)
    image = {"bytes": b"png", "path": "d/8.png"}
    assert len(rows) == 3 and rows.keys() >= {"caption", "image", "text", "images", "seg.png"}
    assert rows[0] == {"id": 3, "caption": "x", "image": {"bytes": b"jpg", "path": "d/7.jpg"}}
    assert rows[1] == {"id": "d/8", "text": "a cat\n", "image": image, "cls": "big"}  # the last one is far behind
    assert rows[2] == {
        "id": "9", "cls": 12, "caption.txt": "é", "seg.png": {"bytes": b"seg", "path": "9.seg.png"},
        "images": [{"bytes": b"two", "path": "9.2.png"}, {"bytes": b"ten", "path": "9.10.png"}],
    }  # fmt: skip


def test_files_replace_their_names_in_the_json(tmp_path):
    parts = [{"type": "image", "image": "1.b.png"}, {"type": "text", "text": "?"}, {"type": "image", "image": "a.png"}]
    path = make_tar(
        tmp_path / "a.tar",
        ("1.a.png", b"A"), ("1.b.png", b"B"), ("1.json", [{"role": "user", "content": parts}]),
        ("x/2.0.png", b"0"), ("x/2.1.png", b"1"), ("x/2.json", {"images": ["2.1.png", "x/2.0.png", "elsewhere.png"]}),
        ("3.wav", b"W"), ("3.json", talk("<audio>", "yo")), ("4.a.flac", b"F"), ("4.json", {"audios": ["a.flac"]}),
        ("5.wav", b"W"), ("5.txt", "a text alone hears nothing"),
    )  # fmt: skip
    rows = open_rows(path)
    content = rows[0]["messages"][0]["content"]
    assert [content[n]["image"]["bytes"] for n in (0, 2)] == [b"B", b"A"] and "image" not in rows[0]
    assert [image if isinstance(image, str) else image["bytes"] for image in rows[1]["images"]] == [
        b"1", b"0", "elsewhere.png"]  # fmt: skip
    assert rows[2]["audio"] == {"bytes": b"W", "path": "3.wav"} and rows[3]["audios"][0]["bytes"] == b"F"
    assert rows[4] == {"id": "5", "text": "a text alone hears nothing"}


def test_tars_and_json_give_equal_batches(folder, models, monkeypatch):
    """Compares tokens, pixels and order, with reopened files and after pickling; the index is written once."""
    monkeypatch.setenv("OCTAVO_CACHE", str(folder.path / "cache"))
    monkeypatch.setattr("octavo.data.storage.open_rows.MAX_OPEN_FILES", 1)
    names = [folder.image(f"{n}.png", color=(20 * n, 80, 200)) for n in range(9)]
    rows = [{"images": [name], **talk("<image>What?", name)} for name in names]
    (folder.path / "tars").mkdir()
    for part in range(3):
        files = [entry for n in range(3 * part, 3 * part + 3)
                 for entry in ((f"{n}.json", talk("<image>What?", f"{n}.png")),
                               (f"{n}.png", (folder.path / names[n]).read_bytes()))]  # fmt: skip
        make_tar(folder.path / "tars" / f"part-{part}.tar", *files)
    (folder.path / "tars" / "index.json").write_text("{}")  # as WebDataset's tools write it
    log_lines: list[str] = []
    monkeypatch.setattr("octavo.data.storage.open_rows.PARALLEL_INDEX_BYTES", 0)  # with processes
    assert len(open_rows(folder.path / "tars", log=log_lines.append)) == 9
    assert len(log_lines) == 1 and "tars: the rows of 3 tar file(s) (30.7 KB) are looked up, once" in log_lines[0]
    source, log_lines = pickle.loads(pickle.dumps(folder.read(folder.path / "tars"))), []
    assert len(open_rows(folder.path / "tars", log=log_lines.append)) == 9 and log_lines == []
    assert [file.name for file in cache.list_row_files(folder.path / "tars")] == [f"part-{n}.tar" for n in range(3)]
    assert source.shards.tolist() == [3, 3, 3]
    truth = folder.read(rows)
    encoder = Encoder(models("qwen3_vl"), 64)
    made, wanted = (Loader(Mixture([s], seed=3), encoder, 9, 9) for s in (source, truth))
    for _ in range(2):
        [a], [b] = next(made), next(wanted)
        assert (a["input_ids"] == b["input_ids"]).all() and (a["pixel_values"] == b["pixel_values"]).all()
    windowed = read(Dataset(path=str(folder.path / "tars"), shuffle_buffer=3, max_samples=7))
    assert windowed.shards.tolist() == [3, 3, 1]
    batches = [Mixture([windowed], seed=1).row(n)[1] for n in range(7)]
    assert sorted(batches) == list(range(7)) and {row // 3 for row in batches[:3]} != {0, 1, 2}


def test_captions_are_documents(tmp_path, models):
    path = make_tar(tmp_path / "a.tar", ("0.txt", "A cat."), ("0.png", b"x"), ("1.txt", "A dog."), ("1.png", b"y"))
    source = read(Dataset(path=str(path)), "documents")
    assert source.format == "text" and source[1].images[0].data == b"y" and source[1].text.endswith("A dog.")


def test_truncated_member_is_one_bad_row(tmp_path):
    files = [(f"{n}.json", talk("q", "a" * 600)) for n in range(4)]
    path = make_tar(tmp_path / "a.tar", *files)
    data = path.read_bytes()
    whole = open_rows(path)
    third = whole[2]
    path.write_bytes(data[: 3 * 1536 + 700])  # a header has 512 bytes, and one of 686 takes 1024
    rows = open_rows(path)
    assert len(rows) == 4 and rows[2] == third
    assert f"{path}, row 3 (id 3): its 3.json has 686 bytes, and a.tar ends after 188 of them" in error_of(rows, 3)
    with pytest.raises(DataError, match=r"a\.tar changed while it was read; start again"):
        whole[0]
    for rest in (b"x" * 512, data[3 * 1536 :][:100], b""):
        path.write_bytes(data[: 3 * 1536] + rest)
        rows = open_rows(path)
        assert len(rows) == 4 and rows[2] == third
        assert "a.tar is broken after 2.json, byte 4608 of" in error_of(rows, 3)
    path.write_bytes(data + data)
    assert "data follows its end, as in concatenated tars" in error_of(open_rows(path), 4)
    (tmp_path / "b.tar").symlink_to(tmp_path / "gone.tar")
    with pytest.raises(DataError, match=r"b\.tar is a link to a missing file"):
        open_rows(tmp_path)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([("1.json", "{")], "its 1.json is not JSON: Expecting"),
        ([("1.json", "3")], "its 1.json is neither an object nor a list of turns"),
        ([("1.json", b'"\xff"')], "its 1.json is not UTF-8"),
        ([("1.txt", b"\xff")], r"its 1.txt is not UTF-8 (its byte 0)"),
        ([("1.npy", b"x"), ("1.pkl", b"y")], "holds 1.npy, 1.pkl; a row has a json, a txt or an image"),
        ([("1.txt", "a"), ("1.TXT", "b")], "has two files 1.TXT; rename one"),
    ],
)
def test_bad_rows_are_named(tmp_path, files, reason):
    rows = open_rows(make_tar(tmp_path / "a.tar", *files, ("2.txt", "good")))
    assert f"{tmp_path}/a.tar, row 0" in (message := error_of(rows, 0)) and reason in message
    assert rows[1]["text"] == "good"


def test_videos_without_json_and_links_are_rejected(tmp_path):
    path = make_tar(tmp_path / "a.tar", ("1.json", talk("q", "a")), ("1.mp4", b"x"))
    with pytest.raises(BadSample, match="video"):
        read(Dataset(path=str(path)))[0]
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("1.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert "its 1.txt is a link or not a regular file" in error_of(open_rows(path), 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x1f\x8b\x08rest", r"a\.tar is compressed \(gzip\), but rows of a tar are read by position; decompress"),
        (b"no tar" * 200, r"a\.tar is not a readable tar file"),
        (bytes(1024), "has no rows"),
    ],
)
def test_invalid_tars_are_rejected(tmp_path, content, message):
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_rows(tmp_path / "a.tar")


def test_damaged_tar_index_is_named(tmp_path):
    rows = open_rows(make_tar(tmp_path / "a.tar", ("1.txt", "a")), tmp_path / "cache")
    (index,) = (tmp_path / "cache").glob("*.index")
    index.write_bytes(index.read_bytes()[:50])
    with pytest.raises(DataError, match=r"\.index is not a valid Arrow file .*; delete it"):
        open_rows(tmp_path / "a.tar", tmp_path / "cache")
    assert rows.path.name == "a.tar"


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 9000))
def test_damaged_tar_is_read_or_named(tmp_path, damage, end):
    """Changed or truncated bytes give rows, named bad rows, or a `DataError`, and no other exception."""
    files = [(f"{n}.{kind}", content) for n in range(3) for kind, content in (("json", talk("q", "a")), ("png", b"x"))]
    path = make_tar(tmp_path / "a.tar", *files)
    data = bytearray(path.read_bytes())
    for at, value in damage:
        data[at % len(data)] = value
    path.write_bytes(data[: end or None])
    sink = pa.BufferOutputStream()
    try:
        write_index(path, sink)
        rows = TarRows(path, sink.getvalue())
    except DataError as wrong:
        assert "a.tar" in str(wrong)
        return
    for row in range(len(rows)):
        try:
            assert isinstance(rows[row], dict)
        except BadSample as bad:
            assert f"a.tar, row {row}" in str(bad)


def test_tars_reject_stream(tmp_path):
    path = make_tar(tmp_path / "a.tar", ("0.json", talk("q", "a")))
    for named in (path, tmp_path):
        with pytest.raises(DataError, match="are never copied; remove `stream`"):
            open_rows(named, stream=True)
