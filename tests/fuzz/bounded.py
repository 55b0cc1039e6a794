"""Checks a reader on one damaged input: it must return a result or raise an Octavo error that names the file, within
bounded time and memory, and start no program."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from octavo.train.step.memory_report import peak_rss

SECONDS = 120.0  # wall time of one case, for cases that wait: a slow or shared machine must not fail a test
CPU = 20.0  # processor time of one case; a slow machine takes one second
ROUND = 500  # cases of a seed on the command line
GROWTH = 2048  # MiB that the process may grow by in one case

_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
_FORKS = ("os.fork", "os.forkpty")
_started: list[tuple[str, str]] = []
_watching: list[bool] = []


class Finding(NamedTuple):
    case: str
    what: str


class Hang(BaseException):
    """A BaseException, so that `except Exception` does not catch it."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise Hang in code that runs longer than this, in wall time."""

    def ring(*_: object) -> None:
        raise Hang

    former = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def peak() -> float:
    """Return the peak memory of this process in MiB."""
    return peak_rss() / 2**20


@contextmanager
def bounds(
    case: str,
    found: list[Finding],
    seconds: float = SECONDS,
    growth: float = GROWTH,
    cpu: float = CPU,
    forks: bool = True,
) -> Iterator[None]:
    """Run one case. A finding is added to ``found`` if the block takes longer than ``seconds`` of wall time or ``cpu``
    seconds of processor time, grows the process by more than ``growth`` MiB, or starts a program (or, without
    ``forks``, any process)."""
    _watch()
    _started.clear()
    before, begun = peak(), time.process_time()
    try:
        with alarm(seconds):
            yield
    except Hang:
        found.append(Finding(case, f"no answer within {seconds:g} s"))
    if (took := time.process_time() - begun) > cpu:
        found.append(Finding(case, f"took {took:.1f} s of processor time"))
    if (grown := peak() - before) > growth:
        found.append(Finding(case, f"the process grew by {grown:.0f} MiB"))
    found += [Finding(case, f"started {what}") for event, what in _started if not forks or event not in _FORKS]


def _watch() -> None:
    """Record every start of a program or process, permanently: an audit hook cannot be removed."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS or event in _FORKS:
            _started.append((event, f"{event} {arguments!r}"[:100]))

    if not _watching:
        _watching.append(True)
        sys.addaudithook(hook)


def outcome(action: Callable[[], object], place: Path, case: str, found: list[Finding]) -> str | None:
    """Call the reader and add violations to `found`. Returns the message if the reader rejects the input."""
    message = None
    with bounds(case, found), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            action()
        except (Hang, KeyboardInterrupt):
            raise
        except BaseException as error:
            message = str(error)
            if not type(error).__module__.startswith("octavo."):
                found.append(Finding(case, f"{type(error).__name__}: {message[:300]}"))
            elif str(place) not in message:
                found.append(Finding(case, f"names no file: {message[:300]}"))
    return message


def command(run: Callable[..., list[Finding]], cases: int, seed: int, whole: bool = False) -> None:
    """`python -m tests.fuzz.test_X --cases N --seed N`: runs rounds of ROUND cases, each with the next seed. A fuzzer
    that derives each case from its number runs them as a ``whole``, and can rerun one with `--only NUMBER`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--seed", type=int, default=seed)
    if whole:
        parser.add_argument("--only", type=int, help="this case alone")
    args = vars(parser.parse_args())
    seed, cases = args.pop("seed"), args.pop("cases")
    length = cases if whole else ROUND
    done, total = 0, 0
    while done < cases:
        more = min(length, cases - done)
        found = run(seed + done // length, more, **args)
        done, total = done + more, total + len(found)
        for finding in found:
            print(f"{finding.case}: {finding.what}")
        spent = f"{time.process_time():.0f} s of processor time, {peak():.0f} MiB"
        print(f"{done} cases, {total} findings, {spent}", flush=True)
    sys.exit(bool(total))
