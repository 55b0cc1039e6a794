"""Whether a reader keeps its promise on one damaged input: an answer, or an error of Octavo's that names the file,
within a bounded time and memory, and no outside program."""

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

SECONDS = 120.0  # of one case by the clock, for one that waits: a slow or shared machine must not fail a test
CPU = 20.0  # of one case, of processor time; a slow machine takes one
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
    """No `except Exception` takes it for an answer."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise Hang in what runs longer than this, by the clock."""

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
    """MiB that this process has had at most."""
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
    """One case: what takes longer than ``seconds`` by the clock or ``cpu`` of processor time, grows the process by more
    than ``growth`` MiB, or starts a program (or, without ``forks``, any process) goes to ``found``."""
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
    """Note every start of an outside program or process, for good: there is no way to take a hook off."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS or event in _FORKS:
            _started.append((event, f"{event} {arguments!r}"[:100]))

    if not _watching:
        _watching.append(True)
        sys.addaudithook(hook)


def outcome(action: Callable[[], object], place: Path, case: str, found: list[Finding]) -> str | None:
    """Do it; what breaks the promise goes to `found`. Returns the sentence of a refusal."""
    said = None
    with bounds(case, found), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            action()
        except (Hang, KeyboardInterrupt):
            raise
        except BaseException as error:
            said = str(error)
            if not type(error).__module__.startswith("octavo."):
                found.append(Finding(case, f"{type(error).__name__}: {said[:300]}"))
            elif str(place) not in said:
                found.append(Finding(case, f"names no file: {said[:300]}"))
    return said


def command(run: Callable[..., list[Finding]], cases: int, seed: int, whole: bool = False) -> None:
    """`python -m tests.fuzz.test_X --cases N --seed N`: rounds of ROUND cases, each with the next seed. A fuzzer that
    draws each case by its number runs them as a ``whole``, and can run one of them again with `--only NUMBER`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--seed", type=int, default=seed)
    if whole:
        parser.add_argument("--only", type=int, help="this case alone")
    asked = vars(parser.parse_args())
    seed, cases = asked.pop("seed"), asked.pop("cases")
    length = cases if whole else ROUND
    done, total = 0, 0
    while done < cases:
        more = min(length, cases - done)
        found = run(seed + done // length, more, **asked)
        done, total = done + more, total + len(found)
        for finding in found:
            print(f"{finding.case}: {finding.what}")
        spent = f"{time.process_time():.0f} s of processor time, {peak():.0f} MiB"
        print(f"{done} cases, {total} findings, {spent}", flush=True)
    sys.exit(bool(total))
