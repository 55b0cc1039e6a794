"""Run a function on several ranks, each its own process with what torchrun would have put into its environment."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def run(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """`function(world, *args)` on `size` ranks; what each returned (JSON), in rank order. A failing rank fails all."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(size, port, folder, function, args), nprocs=size)
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(size)]


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(rank: int, size: int, port: int, folder: str, function: Callable[..., Any], args: tuple) -> None:
    from octavo import parallel

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # two ranks on one GPU would be refused; these tests are about gloo
    torch.set_num_threads(1)
    world = parallel.setup(threads=1)
    result = function(world, *args)
    (Path(folder) / str(rank)).write_text(json.dumps(result))
    world.barrier()
    world.close()
