"""NCCL's flight recorder: the last collectives of each rank, written to the run directory once one has failed.

`record` sets torch's environment variables before the process group is created: how many collectives a rank remembers,
and where it writes them when its watchdog gives up. `save` writes them at once, for a rank that ends because another
one is missing. Both the old and the new names of the variables are set; values that are set already stay.
`torchfrtrace`, a command of torch's, reads the files of all ranks together.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

COLLECTIVES = 2000  # remembered by a rank: a few steps of a large model
FILE = "nccl_trace_rank_"  # followed by the rank
_SIZE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
_PLACE = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"


def record(directory: Path) -> None:
    """Make this process remember its collectives, for a file in `directory`. Call before the process group exists."""
    place = str(directory.absolute() / FILE)
    for names, value in ((_SIZE, str(COLLECTIVES)), (_PLACE, place), (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1")):
        value = next((os.environ[name] for name in names if name in os.environ), value)
        for name in names:
            os.environ[name] = value


def save(rank: int) -> Path | None:
    """Write the remembered collectives; None if nothing is recorded or the file cannot be written."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    dump = dump or getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    place = next((os.environ[name] for name in _PLACE if name in os.environ), None)
    if dump is None or place is None:
        return None
    file = Path(f"{place}{rank}")
    try:
        file.write_bytes(dump())
    except (OSError, RuntimeError):  # must not hide the error for which the run ends
        return None
    return file
