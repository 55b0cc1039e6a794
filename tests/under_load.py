"""Run a command next to busy processes: what a slow or shared machine does to the tests.

    python -m tests.under_load 4 -- python -m pytest -q -n 2 -m "not long and not gpu"

A test that passes on an idle machine and fails here depends on the clock, which no test may.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time


def _busy(parent: int) -> None:
    """Compute until the parent is gone, in bursts with short pauses, so that the scheduler moves everyone around."""
    while os.getppid() == parent:
        end = time.perf_counter() + 0.2
        while time.perf_counter() < end:
            sum(i * i for i in range(1000))
        time.sleep(0.001)


def run_under_load(command: list[str], processes: int) -> int:
    """The exit code of `command`, run while `processes` others keep the cores busy."""
    context = multiprocessing.get_context("spawn")
    load = [context.Process(target=_busy, args=(os.getpid(),), daemon=True) for _ in range(processes)]
    for process in load:
        process.start()
    try:
        return subprocess.run(command).returncode
    finally:
        for process in load:
            process.terminate()
        for process in load:
            process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("processes", type=int)
    parser.add_argument("command", nargs="+")
    words = parser.parse_args()
    return run_under_load(words.command, words.processes)


if __name__ == "__main__":
    sys.exit(main())
