"""Names of checkpoints: which entries belong to the run, and which a deletion may touch."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from octavo import checkpoint
from octavo.checkpoint import CheckpointError
from octavo.checkpoint.run_state import files
from tests.fuzz.test_run_folders import One, save

NAMES = (
    "step_003",
    "step_4 (copy)",
    "step_+4",
    "step_４",
    "step_٤",
    "step_4.bak",
    "step_-4",
    "step_ 4",
    "step_4\n",
    "step_",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """checkpoints/ of steps 3 and 4."""
    for step in (3, 4):
        save(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("name", NAMES)
def test_entries_with_foreign_names_are_ignored_and_kept(folder: Path, name: str):
    shutil.copytree(folder / "step_4", folder / name)
    assert checkpoint.steps(folder) == [3, 4] and checkpoint.latest(folder, One()) == folder / "step_4"
    assert [named.partition(" (not a name")[0] for named in checkpoint.foreign_entries(folder)] == [name]
    save(folder, 5)
    assert checkpoint.prune(folder, 5, keep=1) == [] and checkpoint.steps(folder) == [5]
    assert (folder / name / "state.json").is_file()


def test_renamed_copy_is_detected_by_its_step(folder: Path):
    shutil.copytree(folder / "step_4", folder / "step_9")
    said: list[str] = []
    assert checkpoint.latest(folder, One(), said.append) == folder / "step_4"
    assert said == [f"checkpoint step_9 is skipped: {folder / 'step_9'} contains step 4: it was copied or renamed"]
    assert checkpoint.foreign_entries(folder) == ["step_9 (of step 4)"]
    assert checkpoint.prune(folder, 4, keep=1) == [] and checkpoint.steps(folder) == [4, 9]


@pytest.mark.parametrize("step", [2, 4, 98])
def test_links_are_neither_followed_nor_deleted(folder: Path, tmp_path: Path, step: int):
    """step_4 was moved to another disk; step_2 and 98 are of another run there."""
    save(tmp_path / "disk", step)
    if step == 4:
        shutil.rmtree(folder / "step_4")
    (folder / f"step_{step}").symlink_to(tmp_path / "disk" / f"step_{step}")
    assert checkpoint.foreign_entries(folder) == [f"step_{step} (a link)"]
    assert checkpoint.latest(folder, One()) == folder / ("step_3" if step == 4 else "step_4")
    assert checkpoint.prune(folder, 3, keep=1) == []
    assert (folder / f"step_{step}").is_symlink() and (tmp_path / "disk" / f"step_{step}" / "mark").is_file()


def test_only_links_raise_instead_of_starting_over(folder: Path, tmp_path: Path):
    folder.rename(tmp_path / "disk")
    folder.mkdir()
    (folder / "step_4").symlink_to(tmp_path / "disk" / "step_4")
    with pytest.raises(CheckpointError, match=r"step_4 \(a link\) is not a checkpoint that a run wrote"):
        checkpoint.latest(folder, One())


@pytest.mark.parametrize("what", ["file", "link", "broken link", "folder", "copy"])
def test_entry_in_the_way_of_a_save_is_renamed(folder: Path, tmp_path: Path, what: str):
    (tmp_path / "disk").mkdir()
    way = folder / "step_6"
    if what == "file":
        way.write_text("mine")
    elif what == "folder":
        way.mkdir()
    elif what == "copy":
        shutil.copytree(folder / "step_4", way)
    else:
        way.symlink_to(tmp_path / ("disk" if what == "link" else "nowhere"))
    (folder / "step_6.other").write_text("an earlier one")
    save(folder, 6)
    assert checkpoint.latest(folder, One()) == folder / "step_6" and not (folder / "step_6").is_symlink()
    assert os.path.lexists(folder / "step_6.other-2") and (folder / "step_6.other").read_text() == "an earlier one"
    assert (tmp_path / "disk").is_dir()


@pytest.mark.parametrize("name", [".step_5.tmp", ".step_5.old", ".step_5.gone", ".step_7.old"])
@pytest.mark.parametrize("what", ["file", "link"])
def test_foreign_entries_under_temporary_names_do_not_fail_a_save(folder: Path, tmp_path: Path, name: str, what: str):
    save(tmp_path / "disk", 5)
    if what == "file":
        (folder / name).write_text("")
    else:
        (folder / name).symlink_to(tmp_path / "disk" / "step_5")
    save(folder, 5)
    assert checkpoint.latest(folder, One()) == folder / "step_5" and checkpoint.steps(folder) == [3, 4, 5]
    assert (tmp_path / "disk" / "step_5" / "mark").is_file() and not os.path.lexists(folder / name)


def test_checkpoint_that_cannot_be_deleted_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    (problem,) = checkpoint.prune(folder, 4, keep=1)
    assert "step_3 could not be deleted (run.keep): Permission denied" in problem and checkpoint.steps(folder) == [4]


def test_prune_deletes_damaged_checkpoints(folder: Path):
    (folder / "step_3" / files.STATE).write_text("{")
    assert checkpoint.foreign_entries(folder) == [] and checkpoint.prune(folder, 4, keep=1) == []
    assert not (folder / "step_3").exists()
    (folder / "step_4" / files.STATE).unlink()
    assert checkpoint.foreign_entries(folder) == [f"step_4 (without {files.STATE})"], (
        "nothing shows that a run wrote it"
    )
    assert json.dumps(checkpoint.steps(folder)) == "[4]"
