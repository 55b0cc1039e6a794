"""The error for a run that is out of memory: rank, step, what it was doing, and the fix."""

from __future__ import annotations

import torch

from octavo.parallel import World
from octavo.train.errors import TrainError

SMALLER = "lower train.micro_batch, train.seq_length or data.max_pixels, or set train.recompute: full"


def what_is_full(error: BaseException) -> str | None:
    """A clause about the memory that ran out; None for another error. A CPU's allocator raises no class of its own."""
    if isinstance(error, torch.OutOfMemoryError):
        return str(error).split(". ")[0]
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return f"host memory is full ({' '.join(str(error).split())[:200]})"
    return None


def memory_full(error: BaseException, world: World) -> TrainError | None:
    """The error for a run that is out of memory; None for any other error."""
    if (full := what_is_full(error)) is None:
        return None
    who = f"rank {world.rank} of {world.size}" if world.size > 1 else "the run"
    return TrainError(
        f"{who} ran out of memory at {world.progress.phase}: {full}; {SMALLER} (octavo plan FILE --card shows what "
        "each saves). Continue with run.resume=auto"
    )
