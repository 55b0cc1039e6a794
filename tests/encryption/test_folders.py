"""Encrypted folders: files are bound to their paths, and a list names them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from octavo import data, models
from octavo.base import encryption, safe_read
from octavo.base.encryption import folders
from octavo.base.encryption.errors import Replaced
from octavo.base.encryption.file_format import Place
from octavo.cli.main import main
from octavo.data.storage.cache import list_row_files
from octavo.data.storage.open_rows import open_rows
from octavo.models.tiny import tiny

PLAIN = {"a.json": b'{"a": 1}', "b.json": b'{"b": 2}', "inner/a.json": b"{}", "inner/deep/c.bin": bytes(5000)}


def write(folder: Path, contents: dict[str, bytes] = PLAIN) -> Path:
    for name, raw in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    return folder


@pytest.fixture
def stored(tmp_path, key) -> Path:
    """An encrypted folder."""
    assert main(["encrypt", str(write(tmp_path / "plain")), str(tmp_path / "stored")]) == 0
    return tmp_path / "stored"


def read(folder: Path) -> dict[str, bytes]:
    return {name: safe_read.read_bytes(folder / name) for name in PLAIN}


def test_files_are_bound_and_listed(stored):
    with encryption.Reader.of(stored / encryption.LIST) as opened:
        identity = opened.place.folder
    for name in PLAIN:
        with encryption.Reader.of(stored / name) as opened:
            assert opened.place == Place(identity, name.encode()) and opened.version == 2
    assert set(folders.read_list(stored)) == {name.encode() for name in PLAIN}
    assert read(stored) == PLAIN


def test_folder_may_be_renamed_and_moved(stored, tmp_path, monkeypatch):
    moved = stored.rename(tmp_path / "elsewhere")
    assert read(moved) == PLAIN
    (tmp_path / "link").symlink_to(moved)
    assert read(tmp_path / "link") == PLAIN
    (tmp_path / "single.json").symlink_to(moved / "inner" / "a.json")
    assert safe_read.read_bytes(tmp_path / "single.json") == b"{}"
    monkeypatch.chdir(moved / "inner")
    assert safe_read.read_bytes("../b.json") == PLAIN["b.json"]
    assert main(["decrypt", str(moved / "inner"), str(tmp_path / "part")]) == 0  # a part of it too
    assert (tmp_path / "part/deep/c.bin").read_bytes() == bytes(5000)


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def of_another_encryption(stored: Path) -> Path:
    assert main(["encrypt", str(stored.parent / "plain"), str(stored.parent / "again")]) == 0
    return stored.parent / "again"


def by_itself(stored: Path) -> Path:
    assert main(["encrypt", str(stored.parent / "plain/a.json"), str(stored.parent / "single")]) == 0
    return stored.parent / "single"


OF_VERSION_1 = bytes.fromhex(
    "8f4f43544145530100001000eeeacf5d17c307225134f9a2ca28ab769a53a317f36232ed7afd8384872ed10e08134f71f8319118bddf12cb"
    "f22dc22e71a3e9ee5e54483ba45e9432d4b3ef052cff6fa8156831465b7de91ce6b4"
)
CHANGES = {
    "two exchanged": lambda s: swap(s / "a.json", s / "b.json"),
    "exchanged with one of its name below": lambda s: swap(s / "a.json", s / "inner/a.json"),
    "copied over another": lambda s: shutil.copy(s / "b.json", s / "a.json"),
    "of another encryption": lambda s: shutil.copy(of_another_encryption(s) / "a.json", s / "a.json"),
    "of a file by itself": lambda s: shutil.copy(by_itself(s), s / "a.json"),
    "of version 1": lambda s: (s / "a.json").write_bytes(OF_VERSION_1),
    "plain": lambda s: (s / "a.json").write_bytes(b"{}"),
    "empty": lambda s: (s / "a.json").write_bytes(b""),
    "cut within its head": lambda s: os.truncate(s / "a.json", 40),
    "cut within its mark": lambda s: os.truncate(s / "a.json", 5),
    "a link to another file": lambda s: ((s / "a.json").unlink(), (s / "a.json").symlink_to(s / "b.json")),
    "a link to its twin": lambda s: (
        (s / "a.json").unlink(),
        (s / "a.json").symlink_to(of_another_encryption(s) / "a.json"),
    ),
    "the list gone": lambda s: (s / encryption.LIST).unlink(),
    "the list of another encryption": lambda s: shutil.copy(
        of_another_encryption(s) / encryption.LIST, s / encryption.LIST
    ),
    "the list another file": lambda s: shutil.copy(s / "b.json", s / encryption.LIST),
    "the list plain": lambda s: (s / encryption.LIST).write_bytes(b"octavo files 1\0= a.json\0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_swapped_files_are_rejected(stored, tmp_path, capsys, change):
    """By a reader of one file, by one of the folder, and by the command."""
    CHANGES[change](stored)
    with pytest.raises(safe_read.Unreadable, match=r"a\.json|files\.octavo"):
        safe_read.read_bytes(stored / "a.json")
    for source in (stored, stored / "a.json"):
        assert main(["decrypt", str(source), str(tmp_path / "out")]) in (1, 2)
        assert "a.json" in (said := capsys.readouterr().err) or encryption.LIST in said
        assert "Traceback" not in said and not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("change", "why"), [
    (lambda s: (s / "inner/a.json").unlink(), r"inner/a\.json is missing"),
    (lambda s: (s / "more.json").write_bytes(b"{}"), r"more\.json is added"),
    (lambda s: shutil.copy(s / "a.json", s / "inner/b.json"), r"inner/b\.json is added"),
    (lambda s: (s / "a.json").rename(s / "c.json"), r"a\.json is missing"),
    (lambda s: shutil.rmtree(s / "inner"), r"inner/a\.json and 1 more are missing"),
    (lambda s: write(s / "new", {"x": b"", "y": b""}), r"new/x and 1 more are added"),
])  # fmt: skip
def test_missing_and_added_files_are_rejected(stored, tmp_path, capsys, change, why):
    encryption.check_folder(stored)
    change(stored)
    with pytest.raises(Replaced, match=why):
        encryption.check_folder(stored)
    for command in ("decrypt", "encrypt"):  # the latter would copy it as it is
        assert main([command, str(stored), str(tmp_path / "out")]) == 1
        assert why.split("\\")[0] in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_single_file_is_unbound_and_moved_out_file_is_rejected(stored, tmp_path, capsys):
    shutil.copy(by_itself(stored), tmp_path / "renamed")
    assert safe_read.read_bytes(tmp_path / "renamed") == PLAIN["a.json"]
    shutil.copy(stored / "a.json", tmp_path / "a.json")
    with pytest.raises(safe_read.Unreadable, match=r"a\.json of an encrypted folder that has no files\.octavo"):
        safe_read.read_bytes(tmp_path / "a.json")
    assert main(["encrypt", str(stored / "a.json"), str(tmp_path / "x")]) == 2  # as it is, it could not be read there
    assert main(["encrypt", str(stored / "inner"), str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.count("is part of") == 2 and not (tmp_path / "x").exists()


def test_reencryption_binds_again_and_includes_added_files(stored, tmp_path, other):
    (tmp_path / "old.key").write_text(bytes(range(32)).hex())
    (tmp_path / "old.key").chmod(0o600)
    (stored / "more.json").write_bytes(b"{}")
    anew = ["--old-key", str(tmp_path / "old.key"), "--key-file", str(other)]
    assert main(["encrypt", str(stored), str(tmp_path / "anew"), *anew]) == 0
    assert main(["encrypt", str(stored / "inner"), str(tmp_path / "part"), *anew]) == 0
    assert read(tmp_path / "anew") == PLAIN and safe_read.read_bytes(tmp_path / "anew/more.json") == b"{}"
    assert safe_read.read_bytes(tmp_path / "part/deep/c.bin") == bytes(5000)
    encryption.check_folder(tmp_path / "anew")
    swap(stored / "a.json", stored / "b.json")
    assert main(["encrypt", str(stored), str(tmp_path / "no"), *anew]) == 1 and not (tmp_path / "no").exists()


def test_nested_folder_keeps_its_list(tmp_path, key, other, capsys):
    """As `hf/` in the directory of a run that is encrypted afterwards, and taken to another key."""
    run = write(tmp_path / "run", {"config.yaml": b"run", "checkpoints/s.bin": b"state"})
    assert main(["encrypt", str(write(tmp_path / "plain")), str(run / "hf")]) == 0
    encryption.append_lines(run / "answers.jsonl.aes", ["one\n"])
    (tmp_path / "old.key").write_text(bytes(range(32)).hex())
    (tmp_path / "old.key").chmod(0o600)
    assert main(["encrypt", str(run), str(tmp_path / "e1")]) == 0
    assert "2 encrypted, 6 copied as they are" in capsys.readouterr().out
    assert main(["encrypt", str(tmp_path / "e1"), str(tmp_path / "e2"), "--old-key", str(tmp_path / "old.key"),
                 "--key-file", str(other)]) == 0  # fmt: skip
    encryption.append_lines(
        tmp_path / "e2/answers.jsonl.aes", ["two\n"]
    )  # a list that goes on is not an exchanged file
    for name in ("e1", "e2"):
        folder = tmp_path / name
        (tmp_path / "key").unlink(missing_ok=True)
        os.environ["OCTAVO_KEY_FILE"] = str(tmp_path / "old.key" if name == "e1" else other)
        os.environ.pop("OCTAVO_KEY", None)
        encryption.check_folder(folder)
        assert main(["decrypt", str(folder), str(tmp_path / "back")]) == 0
        lines = b"one\n" if name == "e1" else b"one\ntwo\n"
        assert {f.name: f.read_bytes() for f in (tmp_path / "back").iterdir() if f.is_file()} == {
            "config.yaml": b"run", "answers.jsonl": lines,
        }  # fmt: skip
        assert read(tmp_path / "back/hf") == PLAIN
        shutil.rmtree(tmp_path / "back")
        shutil.copytree(folder / "hf", tmp_path / f"{name}-hf")
        assert read(tmp_path / f"{name}-hf") == PLAIN  # it can be taken out as a whole
        swap(folder / "checkpoints/s.bin", folder / "hf/a.json")
        assert main(["decrypt", str(folder), str(tmp_path / "back")]) == 1


def test_names_of_any_bytes_are_bound_and_escaped(tmp_path, key, capsys):
    plain = write(tmp_path / "plain", {"half\udcff": b"1", "two\nlines": b"2", "red\x1b[31m": b"3", "ä b": b"4"})
    assert main(["encrypt", str(plain), str(tmp_path / "stored")]) == 0
    assert main(["decrypt", str(tmp_path / "stored"), str(tmp_path / "back")]) == 0
    assert {f.name: f.read_bytes() for f in (tmp_path / "back").iterdir()} == {
        f.name: f.read_bytes() for f in plain.iterdir()
    }
    capsys.readouterr()
    swap(tmp_path / "stored/half\udcff", tmp_path / "stored/red\x1b[31m")
    assert main(["decrypt", str(tmp_path / "stored"), str(tmp_path / "no")]) == 1
    said = capsys.readouterr().err
    assert r"half\udcff" in said and "\x1b" not in said and "Traceback" not in said


def test_modes_and_empty_folders_are_kept(tmp_path, key):
    plain = write(tmp_path / "plain")
    (plain / "empty").mkdir()
    for name, mode in {"a.json": 0o640, "b.json": 0o400, "inner/deep/c.bin": 0o751}.items():
        (plain / name).chmod(mode)
    (plain / "inner/deep").chmod(0o550)
    plain.chmod(0o750)
    assert main(["encrypt", str(plain), str(tmp_path / "stored")]) == 0
    assert main(["decrypt", str(tmp_path / "stored"), str(tmp_path / "back")]) == 0
    assert main(["decrypt", str(tmp_path / "stored/b.json"), str(tmp_path / "b")]) == 0
    modes = lambda folder: {  # noqa: E731
        str(f.relative_to(folder)): f.stat().st_mode & 0o7777
        for f in (folder, *folder.rglob("*")) if f.name != encryption.LIST
    }  # fmt: skip
    assert modes(plain) == modes(tmp_path / "stored") == modes(tmp_path / "back")
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o400


def test_model_folder_with_added_or_missing_file_is_rejected(tmp_path, key):
    """A chat template that is added, or generation settings that are removed, would change what a model learns."""
    tiny.write("qwen3", tmp_path / "plain", size="mini")
    assert main(["encrypt", str(tmp_path / "plain"), str(tmp_path / "model")]) == 0
    models.load(tmp_path / "model")
    for change, name in (
        (lambda f: f.unlink(), "generation_config.json"), (lambda f: f.write_text("{}"), "added_tokens.json"),
        (lambda f: shutil.copy(tmp_path / "plain" / f.name, f), "tokenizer_config.json"),
        (lambda f: shutil.copy(tmp_path / "plain" / f.name, f), "model.safetensors"),
    ):  # fmt: skip
        folder = shutil.copytree(tmp_path / "model", tmp_path / "tried")
        change(folder / name)
        with pytest.raises(models.ModelError, match=name):
            models.load_tokenizer(folder)
            models.load(folder)
        shutil.rmtree(folder)


def test_data_folder_with_added_or_missing_file_is_rejected(tmp_path, key):
    rows = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    write(tmp_path / "plain", {"part-0.jsonl": rows, "part-1.jsonl": rows, "images/0.png": b"no rows"})
    assert main(["encrypt", str(tmp_path / "plain"), str(tmp_path / "rows")]) == 0
    assert len(list_row_files(tmp_path / "rows")) == 2
    swap(tmp_path / "rows/part-0.jsonl", tmp_path / "rows/part-1.jsonl")
    with pytest.raises(data.DataError, match=r"part-0\.jsonl was encrypted as part-1\.jsonl"):
        list(open_rows(tmp_path / "rows"))
    (tmp_path / "rows/part-0.jsonl").unlink()
    with pytest.raises(data.DataError, match=r"part-0\.jsonl is missing"):
        list_row_files(tmp_path / "rows")


def test_plain_file_in_encrypted_folder_is_read_without_key(stored, monkeypatch):
    (stored / "more").write_bytes(b"more")  # nobody listed it: the folder as a whole is refused, this file is not
    assert safe_read.read_bytes(stored / "more") == b"more"
    monkeypatch.delenv(encryption.VALUE)
    assert safe_read.read_bytes(stored / "more") == b"more"


def test_handle_is_closed_once_after_rejection(stored):
    """A second close would close a file that somebody else opened meanwhile under the same number."""
    swap(stored / "a.json", stored / "b.json")
    for raw in ((stored / "a.json").read_bytes(), OF_VERSION_1[:-1]):
        (stored / "x").write_bytes(raw)
        handle = os.open(stored / "x", os.O_RDONLY)
        with pytest.raises(encryption.Damaged):
            encryption.open_decrypted(handle, stored / "x")
        os.close(handle)
        again = os.open(stored / encryption.LIST, os.O_RDONLY)
        assert again == handle and os.fstat(again)
        os.close(again)
