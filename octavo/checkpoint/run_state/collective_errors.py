"""Errors of saves and loads on several ranks: an error on one rank is raised on all of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from octavo.base.atomic_write import why_no_space
from octavo.base.encryption import VaultError
from octavo.checkpoint.errors import CheckpointError

T = TypeVar("T")


class Ranks(Protocol):
    """The part of `parallel.World` that saving needs."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather_objects(self, value: T) -> list[T]: ...


@contextmanager
def fail_together(verb: str, path: Path, world: Ranks) -> Iterator[None]:
    """Run the block on every rank; an error on one of them raises CheckpointError on all.

    The message comes from the lowest rank that failed. A collective: every rank must enter and leave the block.
    """
    error: Exception | None = None
    try:
        yield
    except (OSError, RuntimeError, TypeError, ValueError) as caught:
        error = caught
    # Gathered even when nothing failed: a rank that raised by itself would leave the others waiting in their next
    # collective.
    texts = world.gather_objects(None if error is None else _error_text(verb, path, error))
    if failures := [text for text in texts if text]:
        raise CheckpointError(failures[0]) from error


@contextmanager
def dcp_errors(verb: str, path: Path) -> Iterator[None]:
    """Turn DCP's exception (a BaseException with a dictionary of errors by rank) into CheckpointError.

    DCP itself raises it on all ranks.
    """
    # Set for the rest of the process. Filters are global: a save in a thread that restored the previous ones on
    # exit could undo those that another thread has set meanwhile.
    warnings.filterwarnings("ignore", message=".*process group is not.*|.*in a single process.*")
    try:
        yield
    except CheckpointException as caught:
        _, (error, _) = min(caught.failures.items(), key=lambda item: item[0])
        if not isinstance(error, Exception):  # a second Ctrl-C, which DCP wraps as well
            raise error from None
        raise CheckpointError(_error_text(verb, path, error)) from error
    except RuntimeError as caught:  # one of DCP's own collectives failed: another rank has died
        raise CheckpointError(_error_text(verb, path, caught)) from caught


def _error_text(verb: str, path: Path, error: BaseException) -> str:
    if isinstance(error, CheckpointError | VaultError):
        return str(error)
    if verb != "read" and (reason := why_no_space(path, error)):
        return (
            f"could not {verb} the checkpoint {path}: {reason}. Existing checkpoints are untouched; free some "
            "space (run.keep limits the number of checkpoints), then continue with run.resume=auto"
        )
    if isinstance(error, OSError):
        return (
            f"could not {verb} the checkpoint {path}: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}. Existing checkpoints are untouched; free space or "
            "fix the permissions, then resume"
        )
    return f"could not {verb} the checkpoint {path}: {type(error).__name__}: {error}"
