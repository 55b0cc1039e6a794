"""Run states written beside the steps (`run.save: async`), each as whole as one that is waited for.

    background = Background(world, device)         # a collective: a group of its own for what the ranks say meanwhile
    background.begin(directory, take(...))         # returns when the state is copied; the weights may change
    ...                                            # steps
    path = background.poll()                       # in its place on all ranks; None: not yet; an error: it failed
    path = background.poll(wait=True)              # before the next one, and before the run ends

One save is under way at a time. A thread does what `writing.write` does, of copies: everything aside, forced to the
disk, checksums, one rename. A process that is killed meanwhile leaves what a killed save leaves, and the checkpoint
before it. What the ranks send each other in the thread goes through a group that nothing else uses: in the steps' own
group it would meet a collective of theirs on another rank.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Protocol

import torch

from octavo.base import accelerator
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.run_state.collective_errors import Ranks
from octavo.checkpoint.run_state.staging import Staging
from octavo.checkpoint.run_state.writing import Moment, write


class World(Ranks, Protocol):
    """What is asked of the world (`parallel.World` is one)."""

    @property
    def group(self) -> Any: ...
    def with_own_group(self) -> World: ...


class Background:
    """The save that is under way; `encrypt`: it is encrypted. Every method but `close` is a collective of the steps'
    ranks."""

    def __init__(self, world: World, device: torch.device, encrypt: bool = False) -> None:
        self._world, self._beside, self._device, self._encrypt = world, world.with_own_group(), device, encrypt
        self._staging = Staging(device)
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: Exception | None = None

    @property
    def under_way(self) -> bool:
        """Whether a save was begun that `poll` has not told of."""
        return self._thread is not None

    def begin(self, directory: Path, moment: Moment) -> None:
        """Copy a moment and begin to write it. Whoever has one under way waits for it first, by `poll`."""
        assert self._thread is None, "a save is under way, whose outcome nobody has asked for"
        copied = self._staging.copy(moment)
        self._path = self._error = None
        self._thread = threading.Thread(target=self._write, args=(directory, copied), name="save", daemon=True)
        self._thread.start()

    def poll(self, wait: bool = False) -> Path | None:
        """The checkpoint that was under way, once it is in its place; None: it is not yet, or there was none.

        Raises what `write` does, on every rank in the same step.
        """
        if self._thread is None:
            return None
        if wait:
            self._thread.join()
        done = not self._thread.is_alive()
        told = self._world.gather_objects([done, done and self._error is not None])
        failed = any(error for _, error in told)
        if not failed and not all(done for done, _ in told):
            return None
        self._thread.join()
        self._thread = None
        if failed:
            raise self._error or CheckpointError("another rank could not write its part of the checkpoint; its own "
                                                 "message has the cause")  # fmt: skip
        return self._path

    def close(self, patience: float = 0.0) -> None:
        """The run ends, in whatever way: wait this many seconds for what is under way. What does not end by then ends
        with the process, and is swept away by the next run."""
        if self._thread is not None:
            self._thread.join(patience)
        if self._thread is None or not self._thread.is_alive():
            self._staging.close()

    def _write(self, directory: Path, moment: Moment) -> None:
        try:
            if accelerator.has_own_memory(self._device):  # a thread begins with the first device
                accelerator.set_current(self._device)
            if accelerator.why_no_streams(self._device) is None:  # none of the steps': DCP waits for the current one
                accelerator.set_stream(accelerator.stream(self._device))
            self._path = write(directory, moment, self._beside, None, self._beside.group, self._encrypt)
        except Exception as error:  # of whatever library: `poll` raises it
            self._error = error
