"""The process of a job as seen by its parent: its events, its last output, how it ended, and how to kill it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LINES = 15  # of what it printed last
#: of a traceback: how it came there, and what else was loaded
NOISE = ("/pluggy/", "/_pytest/", "<frozen runpy>", "benchmarks/gpu/worker.py", "Extension modules: ")
GRACE = 1.5  # seconds in which a process that hangs may say where, before it is killed


class Process:
    """A worker in a group of its own, so that its children (compilers) end with it."""

    def __init__(self, command: Sequence[str], order: dict[str, Any], where: Path) -> None:
        ours, theirs = os.pipe()
        self._group = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            start_new_session=True,
            cwd=where,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
        )
        os.close(theirs)
        assert self._group.stdin is not None and self._group.stdout is not None
        with suppress(BrokenPipeError):  # it is gone already, which its end will say
            self._group.stdin.write(json.dumps({**order, "pipe": theirs}).encode())
            self._group.stdin.close()
        self._pipes = {"events": ours, "output": self._group.stdout.fileno()}
        for pipe in self._pipes.values():
            os.set_blocking(pipe, False)
        self._rest = dict.fromkeys(self._pipes, b"")
        self._last: deque[str] = deque(maxlen=LINES)
        self._killing: float | None = None
        self.last_event = time.monotonic()
        self.forced = ""

    @property
    def pipes(self) -> list[int]:
        """What to wait on for events."""
        return list(self._pipes.values())

    def events(self) -> list[dict[str, Any]]:
        """Its events since the last time; what it printed is kept for `tail`."""
        printed = [line.decode(errors="replace").rstrip() for line in self._lines("output")]
        self._last += [line for line in printed if line and not any(word in line for word in NOISE)]
        events = []
        for line in self._lines("events"):
            self.last_event = time.monotonic()
            with suppress(ValueError):  # half a line of one that died
                events.append(json.loads(line))
        return events

    def tail(self) -> list[str]:
        """The last lines that it printed."""
        return list(self._last)

    def force(self, why: str) -> None:
        """Ask it to say where it is (faulthandler answers SIGABRT with a traceback) and to die; in the end, kill it."""
        if self._killing is None:
            self.forced, self._killing = why, time.monotonic() + GRACE
            with suppress(ProcessLookupError):
                os.kill(self._group.pid, signal.SIGABRT)
        elif time.monotonic() > self._killing:
            self.kill()

    def kill(self) -> None:
        """The end of it and of all its children."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._group.pid, signal.SIGKILL)

    @property
    def ended(self) -> bool:
        """Whether it has ended. One that even SIGKILL does not end, stuck in a driver, is abandoned."""
        stuck = self._killing is not None and time.monotonic() > self._killing + 5
        return self._group.poll() is not None or stuck

    @property
    def how(self) -> str:
        """How it ended, where it did not by itself."""
        code = self._group.poll()
        if self.forced:
            return self.forced
        if code == -signal.SIGKILL:
            return "killed by SIGKILL (out of host memory?)"
        if code is not None and code < 0:
            return f"crashed: {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def close(self) -> list[dict[str, Any]]:
        """Its last events, once it has ended; its children end too."""
        self.kill()
        events = self.events()
        os.close(self._pipes["events"])
        assert self._group.stdout is not None
        self._group.stdout.close()
        return events

    def _lines(self, name: str) -> list[bytes]:
        got = [self._rest[name]]
        with suppress(BlockingIOError):
            while chunk := os.read(self._pipes[name], 1 << 16):
                got.append(chunk)
        *lines, self._rest[name] = b"".join(got).split(b"\n")
        return lines
