"""Folders that cannot be renamed are written in place; invalid names are rejected before the work."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from octavo.base import atomic_write, target_folder
from octavo.cli.main import main
from octavo.models.tiny import tiny


class Refused(ValueError):
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A mini Qwen3."""
    return str(tiny.write("qwen3", tmp_path_factory.mktemp("model") / "qwen3", size="mini"))


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(params=["announced", "found out"])
def volume(request, tmp_path, monkeypatch) -> Path:
    """An empty mount point with what ext4 puts into one: the kernel renames it neither away nor over."""
    volume = tmp_path / "out"
    (volume / "lost+found").mkdir(parents=True)
    rename = os.rename

    def busy(source, goal):
        if volume in (Path(source), Path(goal)):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(source))
        if Path(source).is_relative_to(volume) != Path(goal).is_relative_to(volume):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
        rename(source, goal)

    monkeypatch.setattr(os, "rename", busy)
    if request.param == "announced":
        table = tmp_path / "mountinfo"
        table.write_text(f"36 35 98:0 / {str(volume).replace('o', chr(92) + '157')} rw,noatime - ext4 /dev/b rw\n")
        monkeypatch.setattr(target_folder, "_MOUNTS", table)
    return volume


def test_mounted_volume_can_be_written_twice(volume, tmp_path):
    for turn in ("first", "second"):
        with atomic_write.new_folder(volume, Refused) as made:
            (made / "inner").mkdir()
            (made / "inner" / turn).write_text(turn)
            (made / "config.json").write_text(turn)
        assert names(volume) == ["config.json", "inner", f"inner/{turn}", "lost+found"]
    assert not list(tmp_path.glob(".*"))


def test_failure_leaves_the_volume_unchanged(volume, tmp_path, monkeypatch):
    with atomic_write.new_folder(volume, Refused) as made:
        (made / "config.json").write_text("former")
    before = names(volume)
    with pytest.raises(ZeroDivisionError), atomic_write.new_folder(volume, Refused) as made:
        (made / "config.json").write_text("half")
        raise ZeroDivisionError
    real = os.rename

    def fail(source, goal):
        if Path(goal) == volume / "b.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(goal))
        real(source, goal)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output"), atomic_write.new_folder(volume, Refused) as made:
        for name in ("a", "b.json", "config.json"):
            (made / name).write_text("new")
    assert names(volume) == before and (volume / "config.json").read_text() == "former"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("at", range(1, 7))
def test_kill_between_renames_leaves_old_or_new_files(tmp_path, monkeypatch, at):
    """The next writer ends what the killed one began; here it fails itself, so that what it found stays."""
    volume, real, count = tmp_path / "out", os.rename, 0
    volume.mkdir()
    monkeypatch.setattr(target_folder, "is_fixed", lambda target: True)
    with atomic_write.new_folder(volume, Refused) as made:
        for name in ("a", "config.json"):
            (made / name).write_text("former")

    def killed(source, goal):
        nonlocal count
        count += 1
        if count == at:
            os._exit(9)
        real(source, goal)

    if (child := os.fork()) == 0:
        os.rename = killed
        with atomic_write.new_folder(volume, Refused) as made:
            for name in ("a", "b", "config.json"):
                (made / name).write_text("new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    with pytest.raises(ZeroDivisionError), atomic_write.new_folder(volume, Refused):
        raise ZeroDivisionError
    assert {file.read_text() for file in volume.iterdir()} == {"former" if at <= 3 else "new"}
    assert names(volume) == (["a", "config.json"] if at <= 3 else ["a", "b", "config.json"])


@pytest.mark.parametrize("command", ["digits", "examples", "tiny", "encrypt", "export"])
def test_commands_write_into_a_volume(volume, tmp_path, model, monkeypatch, command):
    key = str(tmp_path / "key")
    words = {
        "digits": ["digits", str(volume), "--train", "2", "--test", "1"], "examples": ["examples", str(volume)],
        "tiny": ["tiny", "llama", str(volume)], "encrypt": ["encrypt", model, str(volume), "--key-file", key],
        "export": ["export", model, str(volume), "--format", "bf16"],
    }[command]  # fmt: skip
    monkeypatch.setenv("OCTAVO_KEY_FILE", key)  # which the command sets itself; undone at the end
    assert main(["encrypt", "--new-key", key]) == 0
    assert main(words) == 0
    assert len(target_folder.contents(volume)) > 2 and not (volume / target_folder.STAGE).exists()


def test_folder_filled_during_the_work_is_not_replaced(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(Refused, match="out was empty and now contains mine"):
        with atomic_write.new_folder(target, Refused, replace=False) as made:
            (made / "new").touch()
            (target / "mine").touch()
    assert names(tmp_path) == ["out", "out/mine"]


@pytest.mark.parametrize(("name", "why"), [
    ("a\x1b[31mred", r"a\x1b[31mred cannot be written: its name contains control characters"),
    ("two\nlines", r"two\nlines cannot be written"), ("half\udcff", r"half\udcff cannot be written"),
    ("circle", "its symbolic links form a loop"), ("circle/below", "its symbolic links form a loop"),
    ("file/below", "file is a file"),
])  # fmt: skip
def test_invalid_name_is_rejected_before_the_work(tmp_path, monkeypatch, capsys, name, why):
    (tmp_path / "circle").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "circle")
    (tmp_path / "file").touch()
    monkeypatch.setattr(shutil, "copytree", None)  # the work
    before = names(tmp_path)
    assert main(["examples", str(tmp_path / name)]) == 2
    said = capsys.readouterr()
    assert why in said.err and "Traceback" not in said.err and "\x1b" not in said.err and not said.out
    with pytest.raises(Refused), atomic_write.new_folder(tmp_path / name, Refused):
        pass
    assert names(tmp_path) == before


def test_circular_links_and_invalid_utf8_are_rejected(tmp_path, capsys):
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "half\udcff").mkdir()
    for words, why in (
        (["export", "circle", "out", "--format", "bf16"], "its symbolic links form a loop"),
        (["merge", "circle/adapter", "out"], "its symbolic links form a loop"),
        (["encrypt", "half\udcff", "out"], r"half\udcff: its name is not UTF-8"),
        (["export", "half\udcff", "out", "--format", "bf16"], r"half\udcff: its name is not UTF-8"),
    ):  # fmt: skip
        assert main([words[0], *(str(tmp_path / w) if w[:3] in ("cir", "hal", "out") else w for w in words[1:])]) == 2
        said = capsys.readouterr()
        assert why in said.err and "Traceback" not in said.err and not said.out
    assert not (tmp_path / "out").exists()


def test_link_to_a_missing_folder_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    with atomic_write.new_folder(tmp_path / "link", Refused) as made:
        (made / "a").touch()
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "disk") == ["out", "out/a"]


def test_source_with_control_characters_is_printed_escaped(tmp_path, model, capsys):
    source = shutil.copytree(model, tmp_path / "red\x1b[31m")
    key = str(tmp_path / "key")
    assert main(["seal", "key", key]) == 0
    for words in (
        ["export", str(source), str(tmp_path / "a"), "--format", "bf16"], ["verify", str(source), "--quick"],
        ["seal", "model", str(source), str(tmp_path / "b"), "--key-file", key],
    ):  # fmt: skip
        assert main(words) == 0
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err
    assert main(["seal", "key", str(tmp_path / "red\x1b[31m.key")]) == 2
    assert main(["encrypt", "--new-key", str(tmp_path / "red\x1b[31m.key")]) == 2
    assert not (tmp_path / "red\x1b[31m.key").exists() and capsys.readouterr().err.count(r"red\x1b[31m.key") == 2
