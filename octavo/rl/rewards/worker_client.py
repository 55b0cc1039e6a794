"""The trainer's side of a reward worker: started, asked within a time limit, ended, and started again after a fault."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.base.encryption.key import without_key

#: seconds in which a file of functions must be read and run: it may import libraries and load tables
STARTING = 300.0
#: bytes of an answer: of the worker's own words, and of each completion's number or of what was said in its place
_ANSWER, _EACH = 1 << 22, 1 << 12
_SCRIPT = Path(__file__).with_name("worker.py")


class WorkerError(Exception):
    """Why a worker gave no answer: the end of a sentence that begins with the function's name."""


class FunctionRaised(WorkerError):
    """The function raised; the worker lives on."""


class Worker:
    """Runs the functions of one file, given as text, in a process of their own (`worker.py` says how it lives).
    Once it was started: `needs`, of each function the parameters that it must be given beside completions; `beside`,
    the SHA-256 of each file of its folder that the file imported."""

    def __init__(self, path: Path, source: str, functions: Sequence[str]) -> None:
        self.path, self.source, self.functions = path, source, list(dict.fromkeys(functions))
        self.needs: dict[str, list[str]] = {}
        self.beside: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._rest, self._turn = bytearray(), 0

    def start(self) -> None:
        """Start the process, where there is none, and run the file in it. Raises `WorkerError`."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, str(_SCRIPT), str(theirs.fileno()), str(os.getpid()), str(self.path.parent)]
            self._process = subprocess.Popen(  # what functions print goes where errors go
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=without_key(),  # of what is encrypted: it runs a stranger's file
            )
        self._socket, self._rest = ours, bytearray()
        try:
            asked = {"path": str(self.path), "source": self.source, "functions": self.functions}
            found = self._ask(asked, STARTING)
            before = self.beside if self.needs else found["beside"]  # the file itself is the text that was read first
            if other := sorted(dict(before.items() ^ found["beside"].items())):
                raise WorkerError(f"imports what is not as it was when the run began: {', '.join(other)}")
            self.needs, self.beside = found["needs"], found["beside"]
        except WorkerError:
            self.close()
            raise

    def call(
        self, function: str, completions: list[str], columns: dict[str, list[Any]], arguments: dict[str, Any],
        timeout: float,
    ) -> list[Any]:  # fmt: skip
        """What a function gives for a batch: a number for each completion, or a text that says what it gave instead.

        Where it raises, it is asked again for each row alone. Raises `WorkerError` for what concerns the batch,
        `FunctionRaised` where it raises of the batch and of no row alone. One that takes longer than `timeout` seconds
        is ended.
        """
        self.start()
        asked = {"function": function, "completions": completions, "columns": columns, "arguments": arguments}
        try:
            return self._values(asked, timeout)
        except FunctionRaised as cause:
            try:
                alone = self._values({**asked, "apart": True}, timeout)
            except WorkerError:
                raise cause from None
            if not any(isinstance(value, str) for value in alone):
                raise FunctionRaised(f"{cause}, for the batch but for no row of it alone") from None
            return alone

    def close(self) -> None:
        """End the process and all that it started."""
        if self._process is None:
            return
        assert self._socket is not None
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = self._socket = None

    def _values(self, asked: dict[str, Any], timeout: float) -> list[Any]:
        """A number or a text for each completion that was asked about."""
        values, count = self._ask(asked, timeout).get("values"), len(asked["completions"])
        if type(values) is not list or len(values) != count or any(type(one) not in (float, str) for one in values):
            raise self._strange(f"no list of {count} values")
        return values

    def _ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        assert self._socket is not None
        until = time.monotonic() + timeout
        longest = _ANSWER + _EACH * len(message.get("completions", ()))
        self._turn += 1
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(json.dumps({"turn": self._turn, **message}).encode() + b"\n")
            seen = 0
            while (end := self._rest.find(b"\n", seen)) < 0:
                seen = len(self._rest)
                if seen > longest:
                    raise self._strange(f"{seen} bytes without an end")
                if (left := until - time.monotonic()) <= 0:  # one that writes without end is never waited for
                    raise TimeoutError
                self._socket.settimeout(left)
                piece = self._socket.recv(1 << 20)
                if not piece:
                    raise ConnectionResetError
                self._rest += piece
        except TimeoutError:
            self.close()
            raise WorkerError(f"gave no answer within {timeout:g} s, and was ended") from None
        except OSError as cause:
            raise WorkerError(f"ended its process ({self._fate()})") from cause
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.get("turn") != self._turn:
            raise self._strange(ascii(line[:60].decode(errors="replace")))
        if "raised" in answer:
            raise FunctionRaised(str(answer["raised"]))
        if "error" in answer:
            raise WorkerError(str(answer["error"]))
        return answer

    def _strange(self, what: str) -> WorkerError:
        """End a process whose answer is none: what it writes from here on belongs to no question."""
        self.close()
        return WorkerError(
            f"wrote {what} where its process answers the trainer, and was ended. Print to stdout or a file"
        )

    def _fate(self) -> str:
        """How the process ended; the one that watches it tells within a second."""
        assert self._process is not None
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        return "it closed its socket" if code is None else f"exit code {code}" if code < 128 else f"signal {code - 128}"
