"""Untrusted files are read correctly, or rejected at once with an error that names the file."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from octavo.base import safe_read
from octavo.base.safe_read import MAX_DEPTH, Unreadable
from tests.fuzz import mutate


class OwnError(ValueError):
    pass


PLACES = {
    "pipe": "a named pipe", "device": "a device", "folder": "a folder", "socket": "a socket", "empty": "is empty",
    "broken link": "leads nowhere", "loop": "symbolic links", "outside": "is not JSON", "missing": "is missing",
}  # fmt: skip


@pytest.mark.parametrize("what", mutate.PLACES)
def test_special_files_are_reported(tmp_path: Path, what: str) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    mutate.replace_file(random.Random(0), file, what)
    with pytest.raises(OwnError, match=PLACES[what]) as raised:
        safe_read.read_json(file, OwnError)
    assert str(file) in str(raised.value)


TEXTS = {
    "{": "line 1, column 2",
    "": "is empty",
    "[]": "contains a list; expected an object",
    '{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}": f"deeper than {MAX_DEPTH}",
    '{"a": ' + "[" * 100_000: f"deeper than {MAX_DEPTH}",
    '{"a": ' + "1" * 301 + "}": "301 digits",
    '{"a": -' + "1" * 5000 + "}": "5000 digits",
    r'{"a": ["\ud800"]}': r"half a character \(a lone \\ud800",
    r'{"\uDFFFx": 1}': r"half a character \(a lone \\udfff",
    "{} x": "line 1, column 4",
}


@pytest.mark.parametrize("text", TEXTS)
def test_unsafe_json_is_rejected(text: str) -> None:
    with pytest.raises(Unreadable, match=TEXTS[text]):
        safe_read.parse_json(text, "x.json")


def test_valid_json_is_read() -> None:
    good = {
        "max": 10**30,
        "limit": [0.0, float("inf")],
        "pair": "\U0001f600 é",
        "deep": json.loads("[" * 60 + "]" * 60),
    }
    assert safe_read.parse_json(json.dumps(good), "x.json") == good
    assert safe_read.parse_json(json.dumps([good], ensure_ascii=False), "x.json", wanted=list) == [good]


def test_size_is_limited_and_text_is_utf8(tmp_path: Path) -> None:
    file = tmp_path / "big"
    file.write_bytes(b"12345678\n\xffx")
    assert safe_read.read_bytes(file, limit=11) == b"12345678\n\xffx"
    with pytest.raises(Unreadable, match="11 bytes or more; the limit is 10"):
        safe_read.read_bytes(file, limit=10)
    with pytest.raises(Unreadable, match=r"byte 9 \(line 2\) is 0xff"):
        safe_read.read_text(file)
    file.write_bytes(b"\xef\xbb\xbfyes")
    assert safe_read.read_text(file, encoding="utf-8-sig") == "yes"
    with open(file, "r+b") as grown:
        grown.truncate(1 << 40)  # a hole: a terabyte that takes no room, refused unread
    with pytest.raises(Unreadable, match=str(1 << 40)):
        safe_read.read_bytes(file)
    for path in ("a\0b", "\ud800"):
        with pytest.raises(Unreadable, match=r"\\x00|\\ud800"):
            safe_read.read_bytes(path)


def test_control_characters_are_escaped() -> None:
    assert safe_read.printable("é\x1b[2J\n\ud800\u202e") == r"é\x1b[2J\n\ud800\u202e"


def test_outside_links_are_detected_except_in_hub_snapshots(tmp_path: Path) -> None:
    snapshot = tmp_path / "repo" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blob, other = tmp_path / "repo" / "blobs" / "123", tmp_path / "secret"
    blob.parent.mkdir()
    blob.touch(), other.touch()
    (snapshot / "own").touch()
    for name, target in (("a", blob), ("b", other), ("c", snapshot / "own")):
        (snapshot / name).symlink_to(target)
    assert [safe_read.link_target_outside(snapshot / name, snapshot) for name in ("own", "a", "b", "c")] == [
        None,
        None,
        other,
        None,
    ]
