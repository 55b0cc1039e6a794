"""How slow this machine is, compared with the one for which the budget of ``.ci/run`` was set.

    python -m tests.machine_speed        prints a factor such as 1.42; never below 1

CPU seconds of one suite differed by 1.8 between machines of one kind: by their clock, and by what runs on the other
threads of a core. A fixed load says by how much. It uses Python and torch and nothing of Octavo, so that slower code of
ours is not taken for a slower machine, and runs in two processes at once, as the tests do.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

REFERENCE = 3.2
"""CPU seconds of :func:`run_load` on the machine of the budget, where ``make test`` took 940. Inferred: the load took
5.2 on a machine where that suite took 1,630."""
PROCESSES = 2


def run_load(_: int = 0) -> float:
    """Run small training steps, a loop of Python and some JSON, and return the CPU seconds of this process."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, rows = torch.randn(256, 128), [{"id": n, "text": "a row of text " * 8} for n in range(2000)]
    began = time.process_time()
    for _step in range(800):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for _round in range(120):
        json.loads(json.dumps(rows))
    total = 0
    for n in range(24_000_000):
        total += n & 7
    return time.process_time() - began


def factor(seconds: float) -> float:
    """Return how many times as slow as the machine of the budget one is that takes ``seconds``; at least 1."""
    return max(1.0, seconds / REFERENCE)


def measure() -> float:
    """Return the CPU seconds of the load, the mean of two processes at once."""
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        return sum(pool.map(run_load, range(PROCESSES))) / PROCESSES


if __name__ == "__main__":
    print(f"{factor(measure()):.2f}")
