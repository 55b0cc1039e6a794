"""The error of a run that is out of memory: rank, step, phase of the step, and the fix."""

from __future__ import annotations

import torch

from octavo.parallel import World
from octavo.train.errors import TrainError

SMALLER = "lower train.micro_batch, train.seq_length or data.max_pixels, or set train.recompute: full"


def describe_full_memory(error: BaseException) -> str | None:
    """Return a clause that says which memory is full, or None if the error has a different cause."""
    if isinstance(error, torch.OutOfMemoryError):
        return str(error).split(". ")[0]
    # The CPU allocator raises a plain RuntimeError.
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return f"host memory is full ({' '.join(str(error).split())[:200]})"
    return None


def out_of_memory_error(error: BaseException, world: World) -> TrainError | None:
    """Return the error to raise for a run that is out of memory, or None if `error` has a different cause."""
    if (full := describe_full_memory(error)) is None:
        return None
    process = f"rank {world.rank} of {world.size}" if world.size > 1 else "the run"
    return TrainError(
        f"{process} ran out of memory at {world.progress.phase}: {full}; {SMALLER} (octavo plan FILE --card shows how "
        "much each saves). Continue with run.resume=auto"
    )
