"""`octavo train FILE --nproc N`: starts, watches and ends this machine's processes of a run.

It does what torchrun does on one machine, with the same variables (RANK, WORLD_SIZE, ...) and the same kind of store.
In addition, a signal reaches every process once, no process is killed while it saves (run.timeout bounds that), the
exit code is the run's, and an error is printed without the launcher's traceback. For several machines use torchrun:
`torchrun --nnodes ... -m octavo train FILE`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from octavo.cli.arguments import UsageError, positive

LOOK = 0.2  # seconds between looks at the processes
MERCY = 30.0  # seconds that the other processes have to end once one has failed, as under torchrun
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


def processes(text: str) -> int | None:
    """An argparse type: a number of processes, or auto (None): one for each GPU."""
    return None if text == "auto" else positive(text)


def how_many(count: int | None) -> int:
    """The number of processes; None: one for each GPU. Raises UsageError for more than there are GPUs, and under
    torchrun."""
    if "WORLD_SIZE" in os.environ:
        raise UsageError(
            "--nproc starts the processes of a run, and torchrun has started this one; use only one of them"
        )
    from octavo.base import accelerator

    gpus = accelerator.device_count()
    if count is None:
        return max(1, gpus)
    if gpus and count > gpus:
        raise UsageError(f"--nproc {count}: this machine has {gpus} GPU(s), one for each process; use --nproc auto")
    return count


def launch(words: Sequence[str], count: int) -> int:
    """Run `octavo WORDS...` as `count` ranks. Returns the exit code of the first rank that failed, else rank 0's. The
    stderr of ranks other than 0 is printed only if they fail."""
    from torch.distributed import TCPStore

    from octavo.report.trial.parallel_runs import COMMAND  # it saves and ends if this process disappears

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // count))),
    }  # fmt: skip
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(1, count)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", COMMAND, str(os.getpid()), *words], stderr=error,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                start_new_session=True,  # the terminal's Ctrl-C must not reach ranks directly, but once, from here
            )
            for rank, error in enumerate([None, *errors])
        ]  # fmt: skip
        for process in ranks:
            stack.callback(process.kill)
        with _forwarding(ranks):
            code, ended = _end(ranks)
        said: dict[tuple[int, str], list[int]] = {}  # an error that all ranks report is printed once
        for rank, error in enumerate(errors, 1):
            error.seek(0)
            if ranks[rank].returncode and (text := error.read().strip()):
                said.setdefault((ranks[rank].returncode, text), []).append(rank)
        for (ended_by, text), those in said.items():
            who = f"rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those))}"
            print(f"{who}, exit code {ended_by}:\n{text}", file=sys.stderr)
        for rank in (rank for rank, process in enumerate(ranks) if process.returncode == -9):
            if rank not in ended:
                print(
                    f"rank {rank} was killed by SIGKILL from outside. If neither a user nor a scheduler sent it, host "
                    "memory was full: the kernel's log (dmesg) says so",
                    file=sys.stderr,
                )
    return code


@contextmanager
def _forwarding(ranks: Sequence[subprocess.Popen[Any]]) -> Iterator[None]:
    """Context that forwards signals to every rank. An ignored signal (nohup) stays ignored."""

    def forward(number: int, frame: object) -> None:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, forward)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(ranks: Sequence[subprocess.Popen[Any]]) -> tuple[int, list[int]]:
    """Wait for all ranks. Returns the exit code and the ranks that were killed here. When a rank fails, the others are
    terminated, and killed after :data:`MERCY` seconds."""
    failed, since = 0, 0.0
    ended: list[int] = []
    while running := [process for process in ranks if process.poll() is None]:
        if not failed:
            codes = [process.returncode for process in ranks if process.returncode is not None]
            failed = next((code for code in codes if code and code not in [128 + number for number in _SIGNALS]), 0)
            if failed:
                since = time.monotonic()
                for process in running:
                    process.terminate()
        elif time.monotonic() - since > MERCY:
            for process in running:
                process.kill()
            ended = [rank for rank, process in enumerate(ranks) if process in running]
        time.sleep(LOOK)
    code = failed or next((process.returncode for process in ranks if process.returncode), 0)
    return 128 - code if code < 0 else code, ended
