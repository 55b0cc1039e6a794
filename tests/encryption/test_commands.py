"""`octavo encrypt` and `octavo decrypt` are atomic and overwrite nothing."""

from __future__ import annotations

import json
import os

import pytest
import torch

from octavo import models
from octavo.base import encryption
from octavo.base.encryption.reader import pop_version_1_files
from octavo.cli.main import main
from octavo.models.tiny import tiny
from tests.encryption import version_1
from tests.encryption.conftest import SECRET


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


def test_folder_round_trip_and_key_change(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(encryption.VALUE, raising=False)
    monkeypatch.setenv(encryption.FILE, "nowhere")  # --key-file wins
    here = {name: str(tmp_path / name) for name in ("k1", "k2", "e1", "e2", "back", "wrong", "copy")}
    for name in ("k1", "k2"):
        assert main(["encrypt", "--new-key", here[name]]) == 0
    assert main(["encrypt", str(folder), here["e1"], "--key-file", here["k1"]]) == 0
    assert main(["encrypt", here["e1"], here["e2"], "--old-key", here["k1"], "--key-file", here["k2"]]) == 0
    assert main(["encrypt", here["e2"], here["copy"], "--key-file", here["k2"]]) == 0
    assert contents(tmp_path / "copy") == contents(tmp_path / "e2")  # what is encrypted is not encrypted twice
    assert all(map(encryption.has_magic, contents(tmp_path / "e2").values()))
    assert main(["decrypt", here["e2"], here["back"], "--key-file", here["k2"]]) == 0
    assert contents(tmp_path / "back") == contents(folder)
    assert main(["decrypt", here["e2"], here["wrong"], "--key-file", here["k1"]]) == 1
    assert "files.octavo was encrypted with another key" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists() and not list(tmp_path.glob(".*"))
    monkeypatch.delenv(encryption.FILE, raising=False)


def test_rejected_command_leaves_no_files(folder, tmp_path, key, capsys):
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
        ([str(folder), str(back)], "already exists, and nothing is overwritten"),
        ([str(folder), str(folder / "in")], "is inside"),
        ([str(tmp_path / "none"), str(tmp_path / "x")], "does not exist"), ([str(folder)], "octavo encrypt SRC DST"),
        (["--new-key", str(tmp_path / "k"), str(folder)], "only creates a key"),
    ):  # fmt: skip
        assert main(["encrypt", *words]) == 2
        assert why in capsys.readouterr().err
    assert contents(back) == {"mine": b"mine"} and not (tmp_path / "k").exists()


@pytest.mark.parametrize("place", ["added", "a.json", encryption.LIST])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_special_files_are_rejected_without_waiting(folder, tmp_path, key, capsys, place, make):
    stored, back = tmp_path / "stored", tmp_path / "back"
    assert main(["encrypt", str(folder), str(stored)]) == 0
    (stored / place).unlink(missing_ok=True)
    make(stored / place)  # opening a pipe that nobody writes to would never return
    for command in ("decrypt", "encrypt"):
        if (place, make) == ("added", os.mkdir):  # an empty folder
            continue
        assert main([command, str(stored), str(back)]) in (1, 2)
        assert place in capsys.readouterr().err
        assert not back.exists() and not list(tmp_path.glob(".*"))


def test_encrypted_lines_are_decrypted_as_lines(tmp_path, key):
    encryption.append_lines(tmp_path / "a.jsonl.aes", [json.dumps({"n": n}) + "\n" for n in range(3)])
    with (tmp_path / "a.jsonl.aes").open("ab") as file:
        file.write(b"j09DVEFFUwEhalf")  # of a kill
    assert main(["decrypt", str(tmp_path / "a.jsonl.aes"), str(tmp_path / "a.jsonl")]) == 0
    assert (tmp_path / "a.jsonl").read_text() == '{"n": 0}\n{"n": 1}\n{"n": 2}\n'


def test_encrypted_lines_can_change_keys(folder, tmp_path, key, other):
    encryption.append_lines(folder / "a.jsonl.aes", ["one\n", "two\n"])
    (old := tmp_path / "old.key").write_text(bytes(range(32)).hex())
    old.chmod(0o600)
    assert main(["encrypt", str(folder), str(tmp_path / "anew"), "--old-key", str(old), "--key-file", str(other)]) == 0
    assert main(["decrypt", str(tmp_path / "anew"), str(tmp_path / "back"), "--key-file", str(other)]) == 0
    assert (tmp_path / "back" / "a.jsonl").read_text() == "one\ntwo\n"


def test_left_out_entries_are_reported(folder, tmp_path, key, capsys):
    """Two files of one name, a folder behind a link, a link to nothing, no folder to write into."""
    encryption.append_lines(folder / "a.jsonl.aes", ["of the encrypted run\n"])
    (folder / "a.jsonl").write_text("of the plain run\n")
    assert main(["decrypt", str(folder), str(tmp_path / "out")]) == 2
    assert "a.jsonl and" in (said := capsys.readouterr().err) and "would both become a.jsonl" in said
    for to, words in ((folder / "inner", "a link to a folder"), (tmp_path / "none", "a link to nothing")):
        (folder / "link").symlink_to(to)
        assert main(["encrypt", str(folder), str(tmp_path / "out")]) == 2 and words in capsys.readouterr().err
        (folder / "link").unlink()
    assert main(["encrypt", str(folder / "a.json"), str(tmp_path / "no" / "out")]) == 2
    assert "create it first" in capsys.readouterr().err and not (tmp_path / "out").exists()


def damaged(file, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("at", [*range(8), 9, 15, 40, 60, -1])
def test_damaged_file_is_rejected_and_not_copied(tmp_path, key, capsys, version, at):
    """Of the mark too, without which a file looks plain: what was written for plain would be ciphertext."""
    write_ten(tmp_path / "plain")
    if version == 1:
        version_1.encrypt_tree(tmp_path / "plain", tmp_path / "stored", SECRET)
    else:
        assert main(["encrypt", str(tmp_path / "plain"), str(tmp_path / "stored")]) == 0
    damaged(tmp_path / "stored/f7", at)
    for source in ("stored", "stored/f7"):
        assert main(["decrypt", str(tmp_path / source), str(tmp_path / "out")]) == 1
        said = capsys.readouterr().err
        assert "stored/f7" in said and "Traceback" not in said
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def write_ten(folder) -> None:
    folder.mkdir()
    for number in range(10):
        (folder / f"f{number}").write_text(f"number {number}")


@pytest.mark.parametrize("left", [0, 1, 5, 7, 8, 30, 69, 84])
def test_file_shorter_than_its_header_is_rejected(tmp_path, key, capsys, left):
    write_ten(tmp_path / "plain")
    assert main(["encrypt", str(tmp_path / "plain"), str(tmp_path / "stored")]) == 0
    assert main(["encrypt", str(tmp_path / "plain/f1"), str(tmp_path / "single")]) == 0
    for source, file in (("stored", "stored/f1"), ("stored/f1", "stored/f1"), ("single", "single")):
        (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:left])
        assert main(["decrypt", str(tmp_path / source), str(tmp_path / "out")]) == 1
        assert file in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_plain_file_is_rejected_by_decrypt(folder, tmp_path, key, capsys):
    """And counted and named in a folder of a run, of which a part is plain."""
    for source, why in (("a.json", "it is not encrypted"), ("", "nothing in it is encrypted")):
        assert main(["decrypt", str(folder / source), str(tmp_path / "out")]) == 1
        assert why in capsys.readouterr().err and not (tmp_path / "out").exists()
    encryption.append_lines(folder / "answers.jsonl.aes", ["one\n"])
    assert main(["decrypt", str(folder), str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "1 decrypted, 3 copied as they are" in said.out and f"{folder}/a.json and 2 more" in said.err
    (folder / "answers.jsonl.aes").write_bytes(b"k" + (folder / "answers.jsonl.aes").read_bytes()[1:])
    (folder / "b").write_bytes(encryption.encrypt(b"b"))
    assert main(["decrypt", str(folder), str(tmp_path / "no")]) == 1
    assert "answers.jsonl.aes is damaged" in capsys.readouterr().err


def test_plain_shard_in_encrypted_checkpoint_is_rejected(tmp_path, key, capsys):
    """Its other files are encrypted: the head of this one was overwritten, or the file exchanged."""
    (tmp_path / "step_2").mkdir()
    for name in ("state.json", "__0_0.distcp"):
        (tmp_path / "step_2" / name).write_bytes(encryption.encrypt(b"{}"))
    (tmp_path / "step_2/__0_0.distcp").write_bytes(bytes(100))
    assert main(["decrypt", str(tmp_path / "step_2"), str(tmp_path / "out")]) == 1
    assert "__0_0.distcp is damaged: state.json of its checkpoint is encrypted" in capsys.readouterr().err


def test_version_1_is_read_and_reported(folder, tmp_path, key, capsys):
    version_1.encrypt_tree(folder, tmp_path / "old", SECRET)
    (tmp_path / "old.key").write_text(SECRET.hex())
    (tmp_path / "old.key").chmod(0o600)
    assert main(["decrypt", str(tmp_path / "old"), str(tmp_path / "back")]) == 0
    assert contents(tmp_path / "back") == contents(folder)
    note = "and 2 more are encrypted in version 1 of the format, which does not bind files to their names"
    assert note in (said := capsys.readouterr().err) and "old/a.json" in said
    assert main(["encrypt", str(tmp_path / "old"), str(tmp_path / "new"), "--old-key", str(tmp_path / "old.key")]) == 0
    assert note in capsys.readouterr().err
    assert main(["decrypt", str(tmp_path / "new"), str(tmp_path / "again")]) == 0
    assert "version 1" not in capsys.readouterr().err and contents(tmp_path / "again") == contents(folder)
    assert main(["encrypt", str(tmp_path / "old"), str(tmp_path / "mixed")]) == 0  # as they are, and listed
    (tmp_path / "mixed/a.json").write_bytes((tmp_path / "old/empty").read_bytes())
    assert main(["decrypt", str(tmp_path / "mixed"), str(tmp_path / "no")]) == 1
    assert "a.json is another encrypted file" in capsys.readouterr().err


def test_model_encrypted_by_0_4_0_is_read(tmp_path, key):
    tiny.write("qwen3", tmp_path / "plain", size="mini")
    version_1.encrypt_tree(tmp_path / "plain", tmp_path / "old", SECRET)
    one, other = models.load(tmp_path / "plain"), models.load(tmp_path / "old")
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    models.load_processor(tmp_path / "old")


def test_file_of_version_1_is_counted_once(tmp_path, key, monkeypatch):
    (tmp_path / "a").write_bytes(version_1.encrypted(b"a", SECRET))
    monkeypatch.chdir(tmp_path)
    pop_version_1_files()
    for path in ("a", tmp_path / "a", "./a"):
        encryption.Reader.of(path).close()
    assert pop_version_1_files() == ["a"]
