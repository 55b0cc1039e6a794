"""`octavo train FILE --nproc N`: starts the ranks of a run on this machine, watches them, and ends them.

It works like torchrun on one machine, with the same variables (RANK, WORLD_SIZE, ...) and the same kind of store. In
addition, each signal is forwarded to every rank once, no rank is killed while it saves (bounded by run.timeout), the
command exits with the run's exit code, and errors are printed without the launcher's traceback. For several machines
use torchrun: `torchrun --nnodes ... -m octavo train FILE`.
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

POLL_S = 0.2  # seconds between checks of the processes
GRACE_S = 30.0  # seconds that the other ranks have to end after one has failed, as under torchrun
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


def processes(text: str) -> int | None:
    """Argparse type: a number of processes, or auto (None) for one per GPU."""
    return None if text == "auto" else positive(text)


def resolve_process_count(count: int | None) -> int:
    """Return the number of processes, one per GPU if `count` is None. Raises UsageError if there are not enough GPUs,
    and under torchrun."""
    if "WORLD_SIZE" in os.environ:
        raise UsageError(
            "--nproc starts the processes of a run, but this process was started by torchrun; use only one of them"
        )
    from octavo.base import accelerator

    gpus = accelerator.device_count()
    if count is None:
        return max(1, gpus)
    if gpus and count > gpus:
        raise UsageError(
            f"--nproc {count}: this machine has only {gpus} GPU(s), and each process needs one; use --nproc auto"
        )
    return count


def launch(words: Sequence[str], count: int) -> int:
    """Run `octavo WORDS...` as `count` ranks. Returns the exit code of the first rank that failed, or of rank 0 if none
    failed. The stderr of other ranks is printed only if they fail."""
    from torch.distributed import TCPStore

    from octavo.report.trial.parallel_runs import COMMAND  # a rank saves and ends if this process is killed

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
                start_new_session=True,  # Ctrl-C must reach the ranks only once, from here
            )
            for rank, error in enumerate([None, *errors])
        ]  # fmt: skip
        for process in ranks:
            stack.callback(process.kill)
        with _forwarding(ranks):
            code, killed = _wait(ranks)
        outputs: dict[tuple[int, str], list[int]] = {}  # (exit code, stderr) -> ranks, so that equal errors print once
        for rank, error in enumerate(errors, 1):
            error.seek(0)
            if ranks[rank].returncode and (text := error.read().strip()):
                outputs.setdefault((ranks[rank].returncode, text), []).append(rank)
        for (exit_code, text), failed_ranks in outputs.items():
            names = f"rank{'s' if len(failed_ranks) > 1 else ''} {', '.join(map(str, failed_ranks))}"
            print(f"{names}, exit code {exit_code}:\n{text}", file=sys.stderr)
        for rank in (rank for rank, process in enumerate(ranks) if process.returncode == -9):
            if rank not in killed:
                print(
                    f"rank {rank} was killed by SIGKILL. If neither a user nor a scheduler sent it, host memory was "
                    "full; the kernel's log (dmesg) then has an entry",
                    file=sys.stderr,
                )
    return code


@contextmanager
def _forwarding(ranks: Sequence[subprocess.Popen[Any]]) -> Iterator[None]:
    """Forward signals to every rank inside this context. Ignored signals (nohup) stay ignored."""

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


def _wait(ranks: Sequence[subprocess.Popen[Any]]) -> tuple[int, list[int]]:
    """Wait for all ranks. Returns the exit code and the ranks that were killed. When a rank fails, the others are
    terminated, and killed after :data:`GRACE_S` seconds."""
    failed, since = 0, 0.0
    killed: list[int] = []
    while running := [process for process in ranks if process.poll() is None]:
        if not failed:
            codes = [process.returncode for process in ranks if process.returncode is not None]
            failed = next((code for code in codes if code and code not in [128 + number for number in _SIGNALS]), 0)
            if failed:
                since = time.monotonic()
                for process in running:
                    process.terminate()
        elif time.monotonic() - since > GRACE_S:
            for process in running:
                process.kill()
            killed = [rank for rank, process in enumerate(ranks) if process in running]
        time.sleep(POLL_S)
    code = failed or next((process.returncode for process in ranks if process.returncode), 0)
    return 128 - code if code < 0 else code, killed
