"""The trainer's side of a reward worker: starts it, calls it with a time limit, ends it, and restarts it after an
error."""

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

from octavo.base.encryption.key import environment_without_key

#: time limit for loading the file of functions, which may import libraries and read tables
STARTING = 300.0
#: maximum number of bytes of an answer: a constant, and an amount per completion
_ANSWER, _EACH = 1 << 22, 1 << 12
_SCRIPT = Path(__file__).with_name("worker.py")


class WorkerError(Exception):
    """A worker gave no answer; the message continues a sentence that begins with the name of the function."""


class FunctionRaised(WorkerError):
    """The function raised; the worker is still running."""


class Worker:
    """Runs the functions of one file, passed as text, in a separate process (`worker.py`). After :meth:`start`:
    `needs`, function -> its required parameters except completions; `imported`, file -> SHA-256 of each file of its
    folder that the file imported."""

    def __init__(self, path: Path, source: str, functions: Sequence[str]) -> None:
        self.path, self.source, self.functions = path, source, list(dict.fromkeys(functions))
        self.needs: dict[str, list[str]] = {}
        self.imported: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._rest, self._turn = bytearray(), 0

    def start(self) -> None:
        """Start the process if there is none, and run the file in it. Raises `WorkerError`."""
        if self._process is not None:
            return
        local, remote = socket.socketpair()
        with remote:
            arguments = [str(remote.fileno()), str(os.getpid()), str(self.path.parent)]
            command = [sys.executable, "-u", str(_SCRIPT), *arguments]  # -u: a print is seen when it happens
            self._process = subprocess.Popen(  # stdout=2: what functions print goes to stderr
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[remote.fileno()],
                start_new_session=True,
                env=environment_without_key(),  # the file is untrusted code: it must not read the key
            )
        self._socket, self._rest = local, bytearray()
        try:
            request = {"path": str(self.path), "source": self.source, "functions": self.functions}
            answer = self._ask(request, STARTING)
            # After a restart, imported files must be unchanged; the file itself is the text that was read first.
            before = self.imported if self.needs else answer["imported"]
            if changed := sorted(dict(before.items() ^ answer["imported"].items())):
                raise WorkerError(f"imports files that changed since the run began: {', '.join(changed)}")
            self.needs, self.imported = answer["needs"], answer["imported"]
        except WorkerError:
            self.close()
            raise

    def call(
        self,
        function: str,
        completions: list[str],
        columns: dict[str, list[Any]],
        arguments: dict[str, Any],
        timeout: float,
    ) -> list[Any]:
        """Call a function for a batch. Returns a number for each completion, or a text that describes its value.

        If the function raises, it is called again for each row. Raises `WorkerError` for a failure of the whole batch,
        and `FunctionRaised` if it raises for the batch but for none of its rows. A call that takes longer than
        `timeout` seconds is ended.
        """
        self.start()
        request = {"function": function, "completions": completions, "columns": columns, "arguments": arguments}
        try:
            return self._values(request, timeout)
        except FunctionRaised as cause:
            try:
                by_row = self._values({**request, "by_row": True}, timeout)
            except WorkerError:
                raise cause from None
            if not any(isinstance(value, str) for value in by_row):
                raise FunctionRaised(f"{cause}, for the batch but for none of its rows") from None
            return by_row

    def close(self) -> None:
        """End the process and all processes that it started."""
        if self._process is None:
            return
        assert self._socket is not None
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = self._socket = None

    def _values(self, request: dict[str, Any], timeout: float) -> list[Any]:
        """Return a number or a text for each completion of the request."""
        values, count = self._ask(request, timeout).get("values"), len(request["completions"])
        if type(values) is not list or len(values) != count or any(type(value) not in (float, str) for value in values):
            raise self._end_corrupt(f"something other than a list of {count} values")
        return values

    def _ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        assert self._socket is not None
        deadline = time.monotonic() + timeout
        longest = _ANSWER + _EACH * len(message.get("completions", ()))
        self._turn += 1
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(json.dumps({"turn": self._turn, **message}).encode() + b"\n")
            seen = 0
            while (end := self._rest.find(b"\n", seen)) < 0:
                seen = len(self._rest)
                if seen > longest:
                    raise self._end_corrupt(f"{seen} bytes without an end")
                if (left := deadline - time.monotonic()) <= 0:  # also limits a function that writes endlessly
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
            raise WorkerError(f"ended its process ({self._describe_exit()})") from cause
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.get("turn") != self._turn:
            raise self._end_corrupt(ascii(line[:60].decode(errors="replace")))
        if "raised" in answer:
            raise FunctionRaised(str(answer["raised"]))
        if "error" in answer:
            raise WorkerError(str(answer["error"]))
        return answer

    def _end_corrupt(self, what: str) -> WorkerError:
        """End a process whose answer is unusable: later lines could not be matched with requests."""
        self.close()
        return WorkerError(f"wrote {what} to the socket of its process, and was ended. Print to stdout or to a file")

    def _describe_exit(self) -> str:
        """Describe how the process ended; its watcher reports it within a second."""
        assert self._process is not None
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        return "it closed its socket" if code is None else f"exit code {code}" if code < 128 else f"signal {code - 128}"
