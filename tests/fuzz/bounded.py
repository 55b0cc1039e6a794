"""Whether a reader keeps its promise on one damaged input: an answer, or an error of Octavo's that names the file,
within a bounded time and memory, and no outside program."""

from __future__ import annotations

import argparse
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 20  # of one case; a slow machine takes one
ROUND = 500  # cases of a seed on the command line
GROWTH = 1 << 21  # KiB that the process may grow by in one case


class Finding(NamedTuple):
    case: str
    what: str


class _Hang(BaseException):
    pass


_programs: list[str] = []
_watching: list[bool] = []


def _watch() -> None:
    """Note every start of an outside program, for the rest of the process."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
            _programs.append(f"{event} {str(arguments)[:80]}")

    if not _watching:
        _watching.append(True)
        sys.addaudithook(hook)


def outcome(action: Callable[[], object], place: Path, case: str, found: list[Finding]) -> str | None:
    """Do it; what breaks the promise goes to `found`. Returns the sentence of a refusal."""
    _watch()

    def ring(*_: object) -> None:
        raise _Hang

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    former = signal.signal(signal.SIGALRM, ring)
    _programs.clear()
    signal.alarm(SECONDS)
    said = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()
    except _Hang:
        found.append(Finding(case, f"no answer within {SECONDS} s"))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        said = str(error)
        if not type(error).__module__.startswith("octavo."):
            found.append(Finding(case, f"{type(error).__name__}: {said[:300]}"))
        elif str(place) not in said:
            found.append(Finding(case, f"names no file: {said[:300]}"))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown > GROWTH:
        found.append(Finding(case, f"the process grew by {grown >> 10} MiB"))
    if _programs:
        found.append(Finding(case, f"started {_programs[0]}"))
    return said


def command(run: Callable[[int, int], list[Finding]]) -> None:
    """`python -m tests.fuzz.test_X --cases N --seed N`: rounds of ROUND cases, each with the next seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    done, total = 0, 0
    while done < asked.cases:
        seed, cases = asked.seed + done // ROUND, min(ROUND, asked.cases - done)
        found = run(seed, cases)
        done, total = done + cases, total + len(found)
        for finding in found:
            print(f"{finding.case}: {finding.what}")
        print(f"{done} cases, {total} findings", flush=True)
    sys.exit(bool(total))
