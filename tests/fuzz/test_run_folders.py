"""A user adds copies, links and files to folders of checkpoints: saving must not fail, and nothing of theirs is lost.

    python -m tests.fuzz.test_run_folders --cases 10000 --seed 1

In each case a run saves and prunes checkpoints, removes leftovers and looks up its newest checkpoint, while a user
changes the folder in between. The user's files must be kept under their names or, if a save needed the name, under that
name plus `.other`. (A copy of a damaged checkpoint under a name that a run uses is excluded: it cannot be distinguished
from the run's checkpoint.) Targets of links must be unchanged, and the newest checkpoint must be the run's.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

from octavo.checkpoint import CheckpointError
from octavo.checkpoint.run_state import files, state
from tests.fuzz.bounded import Finding, command

KEEP = 2
MARK = "mark"  # a file with the owner of a folder


class One:
    """A world of one process, without torch."""

    rank, size = 0, 1

    def gather_objects(self, value: object) -> list[object]:
        return [value]


def save(directory: Path, step: int) -> None:
    """Write a checkpoint with one small file, in the same way as a run."""
    directory.mkdir(exist_ok=True)
    files.remove_leftovers(directory)
    made = files.temporary_path(directory, step, "tmp")
    made.mkdir()
    (made / MARK).write_text(f"run {step}")
    listed = {MARK: files.fingerprint(made / MARK)}
    document = {"format": files.FORMAT, "step": step, "ranks": 1, "counters": {}, "groups": [], "finite": True}
    files.write_state(made, {**document, "files": listed})
    files.publish(directory, step)


def name_of(rng: random.Random, step: int) -> str:
    """Return a name such as users and file managers derive from `step_N`; sometimes one that the run will use."""
    number = rng.choice((step, step + 1, step + 2, 98, 10**18))
    fullwidth = "".join(chr(ord("0") + 0xFEE0 + int(digit)) for digit in str(number))
    arabic = "".join(chr(0x660 + int(digit)) for digit in str(number))
    return rng.choice((
        f"step_{number:03}", f"step_{number} (copy)", f"step_+{number}", f"step_-{number}", f"step_{fullwidth}",
        f"step_{arabic}", f"step_{number}.bak", f"step_{number}\n", f"Step_{number}", f"step_{number}_", "step_",
        f"step_ {number}", f"step_{number}", f"step_{number}", f"step_{number}{files.MOVED_SUFFIX}", "notes.txt",
        f"step_{number}\udcff", f"step_1_{number}", f".step_0{number}.tmp",
    ))  # fmt: skip


def disturb(rng: random.Random, directory: Path, outside: Path, step: int, number: int) -> tuple[str, Path | None]:
    """Change the folder as a user. Returns (a description, the path that was added or None)."""
    path = directory / name_of(rng, step)
    steps = [files.step_path(directory, n) for n in files.steps(directory)]
    own = [path for path in steps if (path / MARK).is_file() and f"step_{(path / MARK).read_text()[4:]}" == path.name]
    kind = rng.choice(("copy", "copy", "folder", "file", "link", "link to a file", "broken link", "damage"))
    if kind == "damage":
        if own:
            rng.choice(own).joinpath(files.STATE).write_text("damaged")
        return kind, None
    if os.path.lexists(path):
        return "nothing", None
    if kind == "copy" and own:
        source = rng.choice(own)
        shutil.copytree(source, path)
        state_of = source / files.STATE
        if files._STEP_NAME.fullmatch(path.name) and state_of.exists() and state_of.read_text() == "damaged":
            return f"copy {path.name!r} of a damaged one", None  # by its name it belongs to the run
    elif kind == "link":
        path.symlink_to(outside)
    elif kind == "broken link":
        path.symlink_to(outside / "nowhere")
    elif kind == "link to a file":
        path.symlink_to(outside / MARK)
    elif kind == "file":
        path.write_text("a file of the user")
        return f"{kind} {path.name!r}", path
    else:
        path.mkdir()
    if not path.is_symlink():
        (path / MARK).write_text(f"user {number}")
    return f"{kind} {path.name!r}", path


def is_there(path: Path, number: int) -> bool:
    """Return True if the user's file or folder still exists, under its name or next to it with a suffix."""
    for found in [path, *path.parent.glob(f"{glob_of(path.name)}{files.MOVED_SUFFIX}*")]:
        if found.is_symlink():
            return True
        if found.is_file() and found.read_text() == "a file of the user":
            return True
        if found.is_dir() and (found / MARK).is_file() and (found / MARK).read_text() == f"user {number}":
            return True
    return False


def glob_of(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def life(rng: random.Random, directory: Path, outside: Path, findings: list[Finding], case: str) -> None:
    """Run one case and add violations to `findings`."""
    theirs: dict[Path, int] = {}
    step, done = 0, []
    for number in range(rng.randrange(2, 8)):
        step += rng.choice((1, 1, 2))
        try:
            save(directory, step)
            done.append(f"save {step}")
            if rng.random() < 0.7 and (problems := files.prune(directory, step, KEEP)):
                findings.append(Finding(case, f"{done}: {problems}"))
        except Exception as error:
            findings.append(Finding(case, f"after {done} step {step} was not saved: {type(error).__name__}: {error}"))
            return
        try:
            newest = state.latest(directory, One())
        except CheckpointError as error:
            newest = error
        if newest != files.step_path(directory, step):
            findings.append(Finding(case, f"after {done} the newest is {newest}"))
        for path, whose in theirs.items():
            if not is_there(path, whose):
                findings.append(Finding(case, f"after {done} {path.name!r} of the user is gone"))
        if {one.name for one in outside.iterdir()} != {MARK, files.STATE}:
            findings.append(Finding(case, f"after {done} the other disk has {[*outside.iterdir()]}"))
        for _ in range(rng.randrange(3)):
            words, path = disturb(rng, directory, outside, step, number)
            done.append(words)
            if path is not None:
                theirs[path] = number


def run(seed: int, cases: int) -> list[Finding]:
    rng, findings = random.Random(seed), list[Finding]()
    with tempfile.TemporaryDirectory() as place:
        outside = Path(place) / "disk"
        save(Path(place) / "former", 98)
        shutil.move(Path(place) / "former" / "step_98", outside)
        for number in range(cases):
            directory = Path(place) / f"{number}"
            life(rng, directory, outside, findings, f"case {number} of seed {seed}")
            shutil.rmtree(directory)
    return findings


def test_foreign_files_among_checkpoints_are_kept() -> None:
    assert run(seed=12, cases=60) == []


if __name__ == "__main__":
    command(run, cases=10_000, seed=0)
