"""Run a function on several ranks, each its own process with what torchrun would have put into its environment.

Ranks are forks where there is no GPU: a new interpreter takes seconds to import torch, on every rank. What CUDA holds
does not survive a fork, so with a GPU they are started anew.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which torch imports when it is first needed: on every rank, were it not here
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor

from octavo import parallel

START = "spawn" if torch.cuda.is_available() else "fork"


def run(function: Callable[..., Any], size: int, *args: Any, replicate: int = 1) -> list[Any]:
    """`function(world, *args)` on `size` ranks, in `replicate` copies; what each returned (JSON), in rank order. A
    failing rank fails all."""
    port = free_port()
    gc.collect()  # of earlier groups, whose threads are here: a fork that collected them would wait for ever
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (size, port, folder, function, args, replicate), nprocs=size, start_method=START)
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(size)]


def whole_state(model: nn.Module, world: parallel.World) -> dict[str, torch.Tensor]:
    """A snapshot of the whole model under its own names on rank 0, an empty dict elsewhere. A collective.

    Tied names both appear and share one storage, as in an unsharded `state_dict`.
    """
    result: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            here = tensor.detach()
            seen[id(tensor)] = (here.full_tensor() if isinstance(here, DTensor) else here).to("cpu", copy=True)
        if world.is_main:
            result[name] = seen[id(tensor)]
    return result


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(
    rank: int, size: int, port: int, folder: str, function: Callable[..., Any], args: tuple, replicate: int
) -> None:
    gc.freeze()  # what the parent made is the parent's to collect; who looks through objects means its own
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # two ranks on one GPU would be refused; these tests are about gloo
    torch.set_num_threads(1)
    world = parallel.setup(threads=1, replicate=replicate)
    result = function(world, *args)
    (Path(folder) / str(rank)).write_text(json.dumps(result))
    world.barrier()
    world.close()
