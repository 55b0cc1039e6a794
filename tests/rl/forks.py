"""Runs the ranks of a phase as forks: with torchrun each rank would import torch again, which takes longer than the
run."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from octavo import rl
from octavo.config import Config
from tests import ranks


def _no_fault(rank: int) -> None:
    pass


def _rank(rank: int, size: int, port: int, cfg: Config, plant: Callable[[int], None]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=str(size), CUDA_VISIBLE_DEVICES="")
    with Path(f"{cfg.run.dir}.rank_{rank}").open("w") as log:
        os.dup2(log.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)  # pytest has replaced sys.stderr
    code = 1
    try:
        plant(rank)
        code = rl.run(cfg).exit_code
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def both(cfg: Config, plant: Callable[[int], None] = _no_fault, size: int = 2) -> list[tuple[int | None, str]]:
    """Run two ranks (or `size`) and return the exit code and stderr of each. Ranks are killed after two minutes.
    `plant(rank)` is called in the rank's process before the run."""
    context, port = multiprocessing.get_context("fork"), ranks.free_port()
    processes = [context.Process(target=_rank, args=(rank, size, port, cfg, plant)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
        process.join()
    return [(process.exitcode, Path(f"{cfg.run.dir}.rank_{n}").read_text()) for n, process in enumerate(processes)]
