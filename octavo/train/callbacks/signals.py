"""SIGTERM, SIGINT and SIGHUP as a request that the loop checks between steps, with a time limit."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from types import FrameType
from typing import Any

RERAISE_AFTER_S = 0.05  # seconds after which an ignored interrupt is raised again
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


class StopRequest:
    """A context that records the first of `SIGNALS` (`signal`). A second SIGINT interrupts at once; where Python
    ignores exceptions (a `__del__`, a callback of the collector), it is raised again after that returns. A process that
    has not left the context `timeout` seconds after the first signal hangs: it prints where, and ends. A SIGHUP that is
    ignored (nohup) stays ignored. Outside the main thread signals cannot be caught, and nothing is recorded."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.signal: int | None = None
        self.asked = False  # set by a callback that wants to stop
        self._previous_handlers: dict[int, Any] = {}
        self._exited = threading.Event()
        self._terminals: list[int] = []
        self._previous_hook = sys.unraisablehook

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            caught = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous_handlers = {number: signal.signal(number, self._record_signal) for number in caught}
            self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
            # A Python handler only runs when the main thread executes Python code, which it does not while it hangs in
            # a library. The interpreter's C handler writes the signal's number to this socket at once.
            self._read_end, self._write_end = socket.socketpair()
            self._write_end.setblocking(False)
            self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
            self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._reraise_interrupt
            threading.Thread(
                target=self._enforce_timeout, args=(threading.get_ident(),), name="stop", daemon=True
            ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._exited.set()
        if self._previous_handlers:
            signal.set_wakeup_fd(self._previous_wakeup_fd)
            self._write_end.close()
            sys.unraisablehook = self._previous_hook
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
        for fd in [fd for fd in self._terminals if not os.isatty(fd)]:  # closed terminal: discard further output
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)

    def _reraise_interrupt(self, dropped: Any) -> None:
        """Hook for exceptions that Python ignores: raise an interrupt again, and print others as usual."""
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            main = threading.main_thread().ident
            again = threading.Timer(
                RERAISE_AFTER_S, signal.pthread_kill, (main, signal.SIGINT)
            )  # not here: ignored too
            again.daemon = True
            again.start()
        else:
            self._previous_hook(dropped)

    def _enforce_timeout(self, main: int) -> None:
        """Thread: wait for a signal, then for the end of the context."""
        number = 0
        with self._read_end:  # open until the end: the interpreter warns if it cannot write
            while number not in self._previous_handlers:
                received = self._read_end.recv(1)
                if not received:
                    return
                number = received[0]
            if self._exited.wait(self.timeout):
                return
        frame = sys._current_frames().get(main)
        where = "".join(traceback.format_stack(frame)[-3:]) if frame else ""
        name, rank = signal.Signals(number).name, os.environ.get("RANK", "0")
        try:
            print(
                f"rank {rank} hangs: {name} came {self.timeout:g} s ago (run.timeout), and this process has not ended. "
                f"It ends now; the last checkpoint remains. It was in\n{where}", file=sys.stderr, flush=True,
            )  # fmt: skip
        finally:
            os._exit(128 + number)
