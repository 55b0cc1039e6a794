"""Encrypted data gives the same rows in every format, and writes nothing to the cache or the disk."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from octavo.base import encryption
from octavo.data import DataError
from octavo.data.rows.image_refs import load
from octavo.data.storage import cache
from octavo.data.storage.open_rows import open_rows
from tests.data.test_tar import make_tar

SECRET = "the owl flies at midnight"
ROWS = [{"messages": f"{n} {SECRET}", "id": f"{n}"} for n in range(40)]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(encryption.FILE, raising=False)
    monkeypatch.setenv(encryption.VALUE, bytes(range(32)).hex())


def image(color: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 3), color).save(out, "PNG")
    return out.getvalue()


def write_plain(folder: Path, kind: str) -> Path:
    """Write the rows to a plain file of this format."""
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            out = csv.DictWriter(file, ["messages", "id"])
            out.writeheader()
            out.writerows(ROWS)
    elif kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    else:
        make_tar(path, *((f"{n}.json", row) for n, row in enumerate(ROWS)), ("3.png", image("red")))
    return path


def encrypted(path: Path) -> Path:
    target = path.parent / "encrypted" / path.name
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(encryption.encrypt(path.read_bytes(), 4096))
    return target


@pytest.mark.parametrize(
    ("kind", "how"),
    [(kind, how) for kind in ("jsonl", "json", "csv", "parquet", "tar") for how in ("small", "large", "folder")]
    + [(kind, "stream") for kind in ("jsonl", "csv", "parquet")],
)
def test_encrypted_rows_equal_plain_rows_without_cache_files(tmp_path, monkeypatch, kind, how):
    if how != "small":
        monkeypatch.setattr(cache, "SMALL_FILE", 0)
    plain = write_plain(tmp_path, kind)
    path = encrypted(plain)
    place = path.parent if how == "folder" else path
    cache_folder = tmp_path / "cache"
    rows = open_rows(place, cache_folder, stream=how == "stream")
    expected = open_rows(plain, tmp_path / "other", stream=how == "stream")
    assert [rows[n] for n in range(len(rows))] == [expected[n] for n in range(len(expected))]
    assert rows.keys() == expected.keys()
    assert not cache_folder.exists() or not [file for file in cache_folder.rglob("*") if file.is_file()]
    assert SECRET.encode() not in path.read_bytes()


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "tar"])
def test_damaged_file_and_missing_key_are_named(tmp_path, monkeypatch, kind):
    path = encrypted(write_plain(tmp_path, kind))
    raw = bytearray(path.read_bytes())
    raw[68 + 100] ^= 1  # in the first chunk
    path.write_bytes(raw)
    with pytest.raises((DataError, encryption.Damaged), match=f"{path.name} is damaged: chunk 0 of"):
        rows = open_rows(path, tmp_path / "cache")
        [rows[n] for n in range(len(rows))]
    monkeypatch.delenv(encryption.VALUE)
    with pytest.raises(DataError, match="there is no key"):
        open_rows(path, tmp_path / "cache")


def test_encrypted_image_is_decoded_and_damage_stops_the_run(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encryption.encrypt(image("red")))
    assert load(path).getpixel((0, 0)) == (255, 0, 0)
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.png is damaged: chunk 0 of 1"):
        load(path)


@pytest.mark.parametrize(("name", "codec"), [("a.mp4", "libx264"), ("b.webm", "libvpx-vp9")])
def test_encrypted_video_is_decoded_and_damage_stops_the_run(tmp_path, monkeypatch, name, codec):
    pytest.importorskip("av")
    from tests.data.test_video import greys, write_video

    plain = write_video(tmp_path / name, codec=codec)
    path = encrypted(plain)
    assert greys(path, 7, 20) == greys(plain, 7, 20)
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=f"{name} is damaged: chunk 0 of"):
        greys(path)
    monkeypatch.delenv(encryption.VALUE)
    with pytest.raises(DataError, match="there is no key"):
        greys(path)


def test_encrypted_data_requires_files_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SMALL_FILE", 0)
    path = encrypted(write_plain(tmp_path, "jsonl"))
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(
        DataError,
        match=r"rows\.jsonl is encrypted and would have to be written to a disk in plain: this system has no in-memory",
    ):
        open_rows(path, tmp_path / "cache")
    assert open_rows(path, tmp_path / "cache", stream=True)[3] == ROWS[3]
