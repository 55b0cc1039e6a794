"""Resumable work: finished parts survive a kill, and the result appears only when it is complete.

    NAME.converting/         next to NAME until it is finished; the same command continues from it
        task.json            source and options, so that another task does not continue it
        finished/3.json      part 3 is on the disk, with this description
        made/                renamed to NAME once everything in it has reached the disk
        lock                 held by the working process

A power failure leaves at most parts without their description, which are written again.
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
    """One task under way; see `begin_work`."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.work_dir = target.with_name(target.name + SUFFIX)
        self.result_dir = self.work_dir / "made"
        self._notes_dir = self.work_dir / "finished"

    def read_note(self, part: int) -> Any:
        """Return the note of a finished part, or None. A note that cannot be read was never finished."""
        try:
            return json.loads((self._notes_dir / f"{part}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def write_note(self, part: int, note: Any) -> None:
        """Keep the note of a part whose files are on the disk."""
        atomic_write.write_text(self._notes_dir / f"{part}.json", json.dumps(note))

    def discard_note(self, part: int) -> None:
        """Delete the note of a damaged part, so that it is written again."""
        (self._notes_dir / f"{part}.json").unlink(missing_ok=True)

    def publish(self) -> None:
        """Rename the finished result to the target and delete the rest of the working folder."""
        atomic_write.sync_tree(self.result_dir)
        self._check_target()
        atomic_write.swap(self.result_dir, self.target)
        shutil.rmtree(self.work_dir)

    def _check_target(self) -> None:
        if self.target.exists():
            if self.work_dir.is_dir() and not self.result_dir.exists():  # killed after the rename: it was finished
                shutil.rmtree(self.work_dir)
            raise CheckpointError(
                f"{self.target} exists and is not overwritten. Choose another directory, or delete it"
            )


@contextmanager
def begin_work(target: Path, task: dict[str, Any]) -> Iterator[Work]:
    """Begin a task, or continue it. `task`: JSON that identifies the task by its source and options.

    Raises CheckpointError if the target exists, if another process works on it, if another task was begun for it, and
    if the disk is full while the block runs. Finished parts are kept.
    """
    work = Work(target)
    work._check_target()
    try:
        work.work_dir.mkdir(parents=True, exist_ok=True)
        with open(work.work_dir / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CheckpointError(
                    f"another process is working in {work.work_dir}; wait until it has ended"
                ) from None
            _check_same_task(work, task)
            work.result_dir.mkdir(exist_ok=True)
            work._notes_dir.mkdir(exist_ok=True)
            yield work
    except (OSError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        if reason := atomic_write.why_no_space(work.work_dir, error):
            raise CheckpointError(
                f"{target} could not be written: {reason}. Finished files are kept in {work.work_dir}: free some "
                "space and run the same command again, or delete that directory"
            ) from error
        raise


def _check_same_task(work: Work, task: dict[str, Any]) -> None:
    file = work.work_dir / "task.json"
    known = json.loads(json.dumps(task))
    try:
        begun = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        atomic_write.write_text(file, json.dumps(known))
        return
    if begun != known:
        keys = [key for key in known if not isinstance(begun, dict) or begun.get(key) != known[key]]
        raise CheckpointError(
            f"{work.work_dir} holds an unfinished conversion that differs in {', '.join(keys) or 'options'}. "
            "Finish it with the same command and source, or delete that directory"
        )


def write_parts(
    work: Work,
    sizes: Sequence[int],
    write: Callable[[int, threading.Event, Advance], Any],
    whole: Callable[[int, Any], bool],
    workers: int | None,
    log: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> int:
    """Write every part that is not finished yet, several at a time. Returns how many had been finished.

    sizes     bytes of each part
    write     (part, event to stop, callback for bytes written) -> note; returns once its files are on the disk
    whole     (part, note) -> whether its files still exist and are unchanged
    progress  called with bytes done and total bytes
    """
    total, lock, stop = sum(sizes), threading.Lock(), threading.Event()
    done = 0

    def advance(n: int) -> None:
        nonlocal done
        with lock:  # workers call this concurrently
            done += n
            progress(done, total)

    pending = []
    for part, size in enumerate(sizes):
        note = work.read_note(part)
        if note is not None and whole(part, note):
            advance(size)
        else:
            work.discard_note(part)
            pending.append(part)
    if resumed := len(sizes) - len(pending):
        log(f"continues: {resumed} of {len(sizes)} files are finished and intact")

    def write_part(part: int) -> None:
        note = write(part, stop, advance)
        if not stop.is_set():
            work.write_note(part, note)

    pending.sort(key=lambda part: -sizes[part])  # longest first, so that no single long part is left at the end
    with ThreadPoolExecutor(min(workers or WORKERS, max(1, len(pending)))) as pool:
        futures = [pool.submit(write_part, part) for part in pending]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return resumed
