"""Run a function on several ranks, each its own process with what torchrun would have put into its environment.

Ranks are forks where there is no GPU: a new interpreter takes seconds to import torch, on every rank. What CUDA holds
does not survive a fork, so with a GPU they are started anew.
"""

from __future__ import annotations

import gc
import json
import multiprocessing.connection
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which torch imports when it is first needed: on every rank, were it not here
import torch.multiprocessing as mp
from torch import nn

from octavo import parallel
from octavo.config.sections.train import ParallelSection
from octavo.fp8.weights import full

START = "spawn" if torch.cuda.is_available() else "fork"


def run(function: Callable[..., Any], size: int, *args: Any, **axes: int) -> list[Any]:
    """`function(world, *args)` on `size` ranks, laid out by `axes`; what each returned (JSON), in rank order. A
    failing rank fails all."""
    port = free_port()
    gc.collect()  # of earlier groups, whose threads are here: a fork that collected them would wait for ever
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (size, port, folder, function, args, axes), nprocs=size, start_method=START)
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(size)]


def commands(words: list[str], size: int) -> tuple[list[int], str, str]:
    """`octavo WORDS` on `size` ranks, as torchrun starts them: exit codes, and what all wrote on stdout and stderr. Who
    fails takes the others along, after the seconds in which they may end by themselves."""
    context, port = multiprocessing.get_context("fork"), free_port()
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        made = [context.Process(target=_command, args=(rank, size, port, folder, words)) for rank in range(size)]
        for process in made:
            process.start()
        left, until = {process.sentinel for process in made}, time.monotonic() + 300
        while left and (wait := until - time.monotonic()) > 0:
            left -= set(multiprocessing.connection.wait(left, wait))
            if any(process.exitcode for process in made):
                until = min(until, time.monotonic() + 30)
        for process in made:
            process.kill()
            process.join()
        out, err = ("".join((Path(folder) / f"{r}.{n}").read_text() for r in range(size)) for n in ("out", "err"))
        return [process.exitcode or 0 for process in made], out, err


def _command(rank: int, size: int, port: int, folder: str, words: list[str]) -> None:
    gc.freeze()
    from octavo.cli.main import main

    _environment(rank, size, port)
    for number, name in ((1, "out"), (2, "err")):
        with (Path(folder) / f"{rank}.{name}").open("w") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", closefd=False) for number in (1, 2)
    )  # pytest's are files of its own
    code = 1
    try:
        code = main(words)
    except BaseException:  # a defect: the command prints its traceback as well
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _environment(rank: int, size: int, port: int) -> None:
    """What torchrun would have said. Two ranks on one GPU would be refused; these tests are about gloo."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def whole_state(model: nn.Module, world: parallel.World) -> dict[str, torch.Tensor]:
    """A snapshot of the whole model under its own names on rank 0, an empty dict elsewhere. A collective.

    Tied names both appear and share one storage, as in an unsharded `state_dict`.
    """
    result: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen[id(tensor)] = full(tensor.detach()).to("cpu", copy=True)
        if world.is_main:
            result[name] = seen[id(tensor)]
    return result


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(
    rank: int, size: int, port: int, folder: str, function: Callable[..., Any], args: tuple, axes: dict[str, int]
) -> None:
    gc.freeze()  # what the parent made is the parent's to collect; who looks through objects means its own
    _environment(rank, size, port)
    torch.set_num_threads(1)
    world = parallel.setup(threads=1, section=ParallelSection(**axes))
    result = function(world, *args)
    (Path(folder) / str(rank)).write_text(json.dumps(result))
    world.barrier()
    world.close()
