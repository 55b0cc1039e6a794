"""Several ranks at one run state: what fails on one of them fails on all, in one sentence."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint.api import CheckpointException

from octavo.base.atomic_write import no_room
from octavo.base.encryption import VaultError
from octavo.checkpoint.errors import CheckpointError


class Ranks(Protocol):
    """What is asked of the world (`parallel.World` is one)."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather_objects(self, value: Any) -> list[Any]: ...


@contextmanager
def shared(verb: str, path: Path, world: Ranks):
    """What fails on one rank fails on all, with the words of the first that failed."""
    error: Exception | None = None
    try:
        yield
    except (OSError, RuntimeError, TypeError, ValueError) as caught:
        error = caught
    if words := [w for w in world.gather_objects(None if error is None else _words(verb, path, error)) if w]:
        raise CheckpointError(words[0]) from error


@contextmanager
def dcp_errors(verb: str, path: Path):
    """DCP's exception (a BaseException around a dictionary of ranks) as ours. DCP itself tells all ranks."""
    # For good, and not for the moment: filters are the process's, and a save in a thread would bring back old ones.
    warnings.filterwarnings("ignore", message=".*process group is not.*|.*in a single process.*")
    try:
        yield
    except CheckpointException as caught:
        _, (error, _) = min(caught.failures.items(), key=lambda item: item[0])
        if not isinstance(error, Exception):  # a second Ctrl-C: DCP wraps that too
            raise error from None
        raise CheckpointError(_words(verb, path, error)) from error
    except RuntimeError as caught:  # DCP's own collectives: a peer is gone
        raise CheckpointError(_words(verb, path, caught)) from caught


def _words(verb: str, path: Path, error: BaseException) -> str:
    if isinstance(error, CheckpointError | VaultError):
        return str(error)
    if verb != "read" and (reason := no_room(path, error)):
        return (
            f"could not {verb} the checkpoint {path}: {reason}. Checkpoints already there are untouched; free some "
            "space (run.keep says how many checkpoints stay), then continue with run.resume=auto"
        )
    if isinstance(error, OSError):
        return (
            f"could not {verb} the checkpoint {path}: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}. Checkpoints already there are untouched; free space "
            "or mend the permissions, then resume"
        )
    return f"could not {verb} the checkpoint {path}: {type(error).__name__}: {error}"
