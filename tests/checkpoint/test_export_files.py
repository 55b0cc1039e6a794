"""Files that an export copies and replaces, and its checksums."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from octavo import checkpoint, models
from octavo.checkpoint import CheckpointError, verify
from octavo.checkpoint.checksums import MARKER
from octavo.checkpoint.export import export
from octavo.models.errors import ModelError
from octavo.parallel import World
from tests.checkpoint import folders
from tests.checkpoint.folders import Good


def bf16(source: Path, target: Path) -> Path:
    export(models.iter_weights(source), source, target, "bf16")
    return target


@pytest.fixture
def source(good: Good, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good("plain", "qwen3_tied"), tmp_path / "source"))


def test_export_does_not_follow_links_out_of_the_folder(source: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    shutil.move(source / "tokenizer.json", secret)
    (source / "tokenizer.json").symlink_to(secret)
    with pytest.raises(ModelError, match=r"tokenizer\.json is a link to a file outside its folder, .*secret\.json"):
        bf16(source, tmp_path / "out")
    assert not (tmp_path / "out").exists() and secret.exists()
    model = models.load(source)
    with pytest.raises(ModelError, match="is a link to a file outside its folder"):
        checkpoint.save_hf(model, source, tmp_path / "hf", World())
    assert not (tmp_path / "hf").exists()


def test_hub_snapshot_is_exported_as_regular_files(source: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "repo" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.move(source, tmp_path / "repo" / "blobs")
    for file in (tmp_path / "repo" / "blobs").iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    out = bf16(snapshot, tmp_path / "out")
    assert not any(file.is_symlink() for file in out.iterdir()) and verify(out).findings == ()


@pytest.mark.parametrize("damage", [lambda file: file.write_text("{"), lambda file: os.mkfifo(file)])
def test_companions_are_checked_before_writing(source: Path, tmp_path: Path, damage) -> None:
    (source / "tokenizer_config.json").unlink()
    damage(source / "tokenizer_config.json")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is (not JSON|a named pipe)"):
        bf16(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_failing_template_is_not_copied(source: Path, tmp_path: Path) -> None:
    (source / "chat_template.jinja").write_text("{{ messages[0].no_such.thing }}")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: the chat template"):
        bf16(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_replaces_only_an_earlier_export(source: Path, tmp_path: Path) -> None:
    out = bf16(source, tmp_path / "out")
    for name, text in (("README.md", "mine"), ("tokenizer_config.json", "{}"), ("notes/todo", "mine")):
        file = out / name
        file.parent.mkdir(exist_ok=True)
        former = file.read_bytes() if file.exists() else None
        file.write_text(text)
        with pytest.raises(CheckpointError, match=f"but {name.split('/')[0]} in it was added or changed"):
            bf16(source, out)
        assert file.read_text() == text
        file.unlink() if former is None else file.write_bytes(former)
    (out / "notes").rmdir()
    bf16(source, out)
    folders.edit_json(out / MARKER, lambda note: note.pop("sha256"))  # as 0.4.0 wrote it
    bf16(source, out)
    (out / "README.md").touch()
    folders.edit_json(out / MARKER, lambda note: note.pop("sha256"))
    with pytest.raises(CheckpointError, match=r"but README\.md in it was added or changed"):
        bf16(source, out)


def test_files_added_during_export_are_kept(source: Path, tmp_path: Path) -> None:
    out = bf16(source, tmp_path / "out")

    def slow():
        yield from models.iter_weights(source)
        (out / "late").touch()

    with pytest.raises(CheckpointError, match="but late in it was added or changed"):
        export(slow(), source, out, "bf16")
    assert (out / "late").exists() and verify(out).ok


@pytest.mark.parametrize("note", ["{", "[]", '{"files": 3}', '{"files": [], "sha256": {"../x": ""}}'])
def test_foreign_export_note_is_rejected(source: Path, tmp_path: Path, note: str) -> None:
    out = bf16(source, tmp_path / "out")
    (out / MARKER).write_text(note)
    with pytest.raises(CheckpointError, match=MARKER):
        bf16(source, out)
    assert {f.kind for f in verify(out).findings} == {"export-note"}


def test_checksum_detects_flipped_bit_in_shard(source: Path, tmp_path: Path) -> None:
    out = bf16(source, tmp_path / "out")
    sums = json.loads((out / MARKER).read_text())["sha256"]
    assert set(sums) == {file.name for file in out.iterdir()} - {MARKER}
    raw = bytearray((out / "model.safetensors").read_bytes())
    raw[-9] ^= 1  # the lowest bit of a value: no scan could tell
    (out / "model.safetensors").write_bytes(raw)
    (out / "chat_template.jinja").write_text((out / "chat_template.jinja").read_text() + "\n")
    verified = verify(out)
    assert [(f.status, f.kind, f.file) for f in verified.findings] == [
        ("fail", "sum", "model.safetensors"),
        ("warn", "sum", "chat_template.jinja"),
    ]
    assert verify(out, quick=True).ok
    (out / "model.safetensors").unlink()
    assert {"no-weights", "sum"} <= {f.kind for f in verify(out).failures}


def test_save_replaces_only_a_saved_model(source: Path, tmp_path: Path) -> None:
    model = models.load(source)
    saved = checkpoint.save_hf(model, source, tmp_path / "hf", World())
    checkpoint.save_hf(model, source, saved, World())
    (saved / "README.md").write_text("mine")
    with pytest.raises(ModelError, match=r"README\.md in it is not part of a model"):
        checkpoint.save_hf(model, source, saved, World())
    assert (saved / "README.md").read_text() == "mine"
