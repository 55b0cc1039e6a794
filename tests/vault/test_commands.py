"""`octavo encrypt` and `octavo decrypt`: whole or not at all, and never over what is there."""

from __future__ import annotations

import json

import pytest

from octavo import vault
from octavo.cli.main import main


@pytest.fixture
def folder(tmp_path):
    """Some files, one empty, one larger than a chunk, one in a folder of its own."""
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    for name, raw in (("a.json", b"{}"), ("empty", b""), ("inner/large.bin", bytes(range(256)) * 3000)):
        (source / name).write_bytes(raw)
    return source


def contents(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_a_folder_there_and_back_and_under_another_key(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(vault.VALUE, raising=False)
    monkeypatch.setenv(vault.FILE, "nowhere")  # --key-file wins
    here = {name: str(tmp_path / name) for name in ("k1", "k2", "e1", "e2", "back", "wrong", "copy")}
    for name in ("k1", "k2"):
        assert main(["encrypt", "--new-key", here[name]]) == 0
    assert main(["encrypt", str(folder), here["e1"], "--key-file", here["k1"]]) == 0
    assert main(["encrypt", here["e1"], here["e2"], "--old-key", here["k1"], "--key-file", here["k2"]]) == 0
    assert main(["encrypt", here["e2"], here["copy"], "--key-file", here["k2"]]) == 0
    assert contents(tmp_path / "copy") == contents(tmp_path / "e2")  # what is encrypted is not encrypted twice
    assert all(map(vault.begins, contents(tmp_path / "e2").values()))
    assert main(["decrypt", here["e2"], here["back"], "--key-file", here["k2"]]) == 0
    assert contents(tmp_path / "back") == contents(folder)
    assert main(["decrypt", here["e2"], here["wrong"], "--key-file", here["k1"]]) == 1
    assert "files.octavo was encrypted with another key" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists() and not list(tmp_path.glob(".*"))
    monkeypatch.delenv(vault.FILE, raising=False)


def test_what_is_refused_leaves_nothing(folder, tmp_path, key, capsys):
    stored, back = tmp_path / "stored", tmp_path / "back"
    assert main(["encrypt", str(folder / "inner/large.bin"), str(stored)]) == 0
    raw = bytearray(stored.read_bytes())
    raw[-1] ^= 1
    stored.write_bytes(raw)
    assert main(["decrypt", str(stored), str(back)]) == 1
    assert not back.exists() and not list(tmp_path.glob(".*"))
    back.mkdir()
    (back / "mine").write_text("mine")
    for words, why in (
        ([str(folder), str(back)], "is there already"), ([str(folder), str(folder / "in")], "lies in"),
        ([str(tmp_path / "none"), str(tmp_path / "x")], "is not there"), ([str(folder)], "octavo encrypt SRC DST"),
        (["--new-key", str(tmp_path / "k"), str(folder)], "nothing else"),
    ):  # fmt: skip
        assert main(["encrypt", *words]) == 2
        assert why in capsys.readouterr().err
    assert contents(back) == {"mine": b"mine"} and not (tmp_path / "k").exists()


def test_a_list_of_lines_is_decrypted_as_one(tmp_path, key):
    vault.append(tmp_path / "a.jsonl.aes", [json.dumps({"n": n}) + "\n" for n in range(3)])
    with (tmp_path / "a.jsonl.aes").open("ab") as file:
        file.write(b"j09DVEFFUwEhalf")  # of a kill
    assert main(["decrypt", str(tmp_path / "a.jsonl.aes"), str(tmp_path / "a.jsonl")]) == 0
    assert (tmp_path / "a.jsonl").read_text() == '{"n": 0}\n{"n": 1}\n{"n": 2}\n'


def test_lists_take_another_key_too(folder, tmp_path, key, other):
    vault.append(folder / "a.jsonl.aes", ["one\n", "two\n"])
    (old := tmp_path / "old.key").write_text(bytes(range(32)).hex())
    old.chmod(0o600)
    assert main(["encrypt", str(folder), str(tmp_path / "anew"), "--old-key", str(old), "--key-file", str(other)]) == 0
    assert main(["decrypt", str(tmp_path / "anew"), str(tmp_path / "back"), "--key-file", str(other)]) == 0
    assert (tmp_path / "back" / "a.jsonl").read_text() == "one\ntwo\n"


def test_nothing_of_a_folder_is_lost_without_a_word(folder, tmp_path, key, capsys):
    """Two files of one name, a folder behind a link, a link to nothing, no folder to write into."""
    vault.append(folder / "a.jsonl.aes", ["of the encrypted run\n"])
    (folder / "a.jsonl").write_text("of the plain run\n")
    assert main(["decrypt", str(folder), str(tmp_path / "out")]) == 2
    assert "a.jsonl and" in (said := capsys.readouterr().err) and "would both be a.jsonl" in said
    for to, words in ((folder / "inner", "a link to a folder"), (tmp_path / "none", "a link to nothing")):
        (folder / "link").symlink_to(to)
        assert main(["encrypt", str(folder), str(tmp_path / "out")]) == 2 and words in capsys.readouterr().err
        (folder / "link").unlink()
    assert main(["encrypt", str(folder / "a.json"), str(tmp_path / "no" / "out")]) == 2
    assert "make it first" in capsys.readouterr().err and not (tmp_path / "out").exists()
