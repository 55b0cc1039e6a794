"""Work that takes long and may be killed: what is finished is kept, and the result appears whole or not at all.

    NAME.converting/         beside NAME while it is not finished; the same command goes on where it was
        task.json            what is being made of what: another task is not mixed with it
        finished/3.json      part 3 is written, on the disk, and this is what is in it
        made/                what becomes NAME, by one rename, once everything in it has reached the disk
        lock                 held by the process at work

A machine that lost power leaves at most parts without their note, which are made again.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.base import atomic_write
from octavo.checkpoint.errors import CheckpointError

SUFFIX = ".converting"
WORKERS = 4

Advance = Callable[[int], None]


class Work:
    """One task under way; see `begin`."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.aside = target.with_name(target.name + SUFFIX)
        self.made = self.aside / "made"
        self._finished = self.aside / "finished"

    def finished(self, part: int) -> Any:
        """The note of a part that is finished, or None. One that cannot be read was never finished."""
        try:
            return json.loads((self._finished / f"{part}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def finish(self, part: int, note: Any) -> None:
        """Keep the note of a part whose files are on the disk."""
        atomic_write.write_text(self._finished / f"{part}.json", json.dumps(note))

    def forget(self, part: int) -> None:
        """A part that turned out damaged is made again."""
        (self._finished / f"{part}.json").unlink(missing_ok=True)

    def publish(self) -> None:
        """Everything is made: it becomes the target, and what was beside it goes."""
        atomic_write.sync_tree(self.made)
        self._refuse_target()
        atomic_write.swap(self.made, self.target)
        shutil.rmtree(self.aside)

    def _refuse_target(self) -> None:
        if self.target.exists():
            if self.aside.is_dir() and not self.made.exists():  # killed after the rename: it was finished
                shutil.rmtree(self.aside)
            raise CheckpointError(
                f"{self.target} exists, and nothing is overwritten. Name another directory, or delete it"
            )


@contextmanager
def begin(target: Path, task: dict[str, Any]) -> Iterator[Work]:
    """Begin a task, or go on with it. `task`: JSON that says what is made of what.

    Raises CheckpointError where the target exists, where another process is at it or another task was begun, and for
    what the disk refuses while the block runs; what is finished is kept.
    """
    work = Work(target)
    work._refuse_target()
    try:
        work.aside.mkdir(parents=True, exist_ok=True)
        with open(work.aside / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CheckpointError(f"another process is at work in {work.aside}; wait until it has ended") from None
            _same_task(work, task)
            work.made.mkdir(exist_ok=True)
            work._finished.mkdir(exist_ok=True)
            yield work
    except (OSError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        if reason := atomic_write.no_room(work.aside, error):
            raise CheckpointError(
                f"{target} could not be written: {reason}. What is finished is kept in {work.aside}: free some space "
                "and run the same command again, or delete that directory"
            ) from error
        raise


def _same_task(work: Work, task: dict[str, Any]) -> None:
    file = work.aside / "task.json"
    known = json.loads(json.dumps(task))
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        atomic_write.write_text(file, json.dumps(known))
        return
    if found != known:
        keys = [key for key in known if not isinstance(found, dict) or found.get(key) != known[key]]
        raise CheckpointError(
            f"{work.aside} holds the beginnings of another conversion (not the same: {', '.join(keys) or 'options'}). "
            "Finish it with the command and the source that began it, or delete that directory"
        )


def all_parts(
    work: Work,
    sizes: Sequence[int],
    write: Callable[[int, threading.Event, Advance], Any],
    whole: Callable[[int, Any], bool],
    workers: int | None,
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> int:
    """Write every part that is not finished and whole, several at a time; how many were.

    sizes     bytes of each part
    write     (part, whether to stop, what to call with bytes written) -> its note; its files are on the disk then
    whole     (part, note) -> whether they are there still, and as they were written
    progress  called with bytes done and bytes in all
    """
    total, lock, stop = sum(sizes), threading.Lock(), threading.Event()
    done = 0

    def advance(n: int) -> None:
        nonlocal done
        with lock:
            done += n
            progress(done, total)

    due = []
    for part, size in enumerate(sizes):
        note = work.finished(part)
        if note is not None and whole(part, note):
            advance(size)
        else:
            work.forget(part)
            due.append(part)
    if kept := len(sizes) - len(due):
        say(f"goes on where it was: {kept} of {len(sizes)} files are finished and whole")

    def make(part: int) -> None:
        note = write(part, stop, advance)
        if not stop.is_set():
            work.finish(part, note)

    due.sort(key=lambda part: -sizes[part])  # so that no long one is left for the end
    with ThreadPoolExecutor(min(workers or WORKERS, max(1, len(due)))) as pool:
        futures = [pool.submit(make, part) for part in due]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return kept
