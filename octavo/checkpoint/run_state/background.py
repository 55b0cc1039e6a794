"""Asynchronous saves (`run.save: async`): a thread writes run states while training continues.

    background = Background(world, device)         # a collective: creates a process group for the saving threads
    background.begin(directory, take_snapshot(...))  # returns once the state is copied; the weights may change
    ...                                            # training steps
    path = background.poll()                       # the path once it is complete on all ranks, else None; raises errors
    path = background.poll(wait=True)              # before the next save, and before the run ends

At most one save runs at a time. The thread does what `writing.write` does, from copies: it writes everything to a
temporary directory, forces it to the disk, computes checksums and renames once. A process that is killed meanwhile
leaves the same files as a killed synchronous save, and the previous checkpoint. Collectives of the thread use a
separate process group: in the group of the training steps they could be matched with a collective of a step on another
rank.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from octavo.base import accelerator
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.run_state.collective_errors import Ranks
from octavo.checkpoint.run_state.staging import Staging
from octavo.checkpoint.run_state.writing import Snapshot, write


class World(Ranks, Protocol):
    """The part of `parallel.World` that an asynchronous save needs."""

    @property
    def group(self) -> ProcessGroup | None: ...
    def with_separate_group(self) -> World: ...


class BackgroundSaver:
    """Runs one save at a time in a thread. Every method except `close` is a collective.

    encrypt   write encrypted files
    """

    def __init__(self, world: World, device: torch.device, encrypt: bool = False) -> None:
        self._world, self._save_world, self._device, self._encrypt = world, world.with_separate_group(), device, encrypt
        self._staging = Staging(device)
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: Exception | None = None

    @property
    def has_pending_save(self) -> bool:
        """True if `poll` has not returned the outcome of the current save yet."""
        return self._thread is not None

    def begin(self, directory: Path, snapshot: Snapshot) -> None:
        """Copy a snapshot and start to write it. Call `poll(wait=True)` first if a save is pending."""
        assert self._thread is None, "a save is pending: poll has not returned its outcome"
        copied = self._staging.copy(snapshot)
        self._path = self._error = None
        self._thread = threading.Thread(target=self._write, args=(directory, copied), name="save", daemon=True)
        self._thread.start()

    def poll(self, wait: bool = False) -> Path | None:
        """Return the path of the checkpoint once it is complete, or None if it is not yet or no save is pending.

        Raises as `write` does, on every rank in the same step.
        """
        if self._thread is None:
            return None
        if wait:
            self._thread.join()
        done = not self._thread.is_alive()
        # All ranks decide from the same gathered outcomes, so that all return, or raise, in the same step.
        outcomes = self._world.gather_objects([done, done and self._error is not None])
        failed = any(error for _, error in outcomes)
        if not failed and not all(done for done, _ in outcomes):
            return None
        self._thread.join()
        self._thread = None
        if failed:
            raise self._error or CheckpointError(
                "another rank could not write its part of the checkpoint; its own message has the cause"
            )
        return self._path

    def close(self, wait_s: float = 0.0) -> None:
        """Wait up to `wait_s` seconds for a pending save at the end of the run, also after an error.

        A save that takes longer ends with the process, and the next run removes its leftovers.
        """
        if self._thread is not None:
            self._thread.join(wait_s)
        if self._thread is None or not self._thread.is_alive():
            self._staging.close()

    def _write(self, directory: Path, snapshot: Snapshot) -> None:
        try:
            if accelerator.has_own_memory(self._device):  # a new thread starts on the first device
                accelerator.set_current(self._device)
            # DCP waits for the current stream. In the stream of the training steps it would wait for them.
            if accelerator.why_no_streams(self._device) is None:
                accelerator.set_stream(accelerator.new_stream(self._device))
            self._path = write(directory, snapshot, self._save_world, None, self._save_world.group, self._encrypt)
        except Exception as error:  # from any library; `poll` raises it on the main thread
            self._error = error
