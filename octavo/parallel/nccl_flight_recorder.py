"""NCCL's flight recorder: the last collectives of each rank, written to the run directory once one has failed.

`enable` sets torch's environment variables before the process group is created: how many collectives a rank remembers,
and where it writes them when its watchdog times out. `save` writes them immediately, for a rank that exits because
another one is missing. Both the old and the new names of the variables are set; existing values are kept. torch's
command `torchfrtrace` reads the files of all ranks together.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

BUFFER_SIZE = 2000  # collectives per rank: a few steps of a large model
FILE_PREFIX = "nccl_trace_rank_"  # followed by the rank
_SIZE_VARIABLES = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
_FILE_VARIABLES = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"


def enable(directory: Path) -> None:
    """Make this process record its collectives for a file in `directory`. Call before the process group is created."""
    file = str(directory.absolute() / FILE_PREFIX)
    for names, value in (
        (_SIZE_VARIABLES, str(BUFFER_SIZE)),
        (_FILE_VARIABLES, file),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    ):
        value = next((os.environ[name] for name in names if name in os.environ), value)
        for name in names:
            os.environ[name] = value


def save(rank: int) -> Path | None:
    """Write the recorded collectives and return the file, or None if nothing is recorded or it cannot be written."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    dump = dump or getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    prefix = next((os.environ[name] for name in _FILE_VARIABLES if name in os.environ), None)
    if dump is None or prefix is None:
        return None
    file = Path(f"{prefix}{rank}")
    try:
        file.write_bytes(dump())
    except (OSError, RuntimeError):  # must not hide the error that ends the run
        return None
    return file
