"""SIGTERM and SIGHUP end a command like Ctrl-C: by an exception, so that half-written files are removed.

The default action of both signals ends the process at once, and no ``finally`` runs: plain text that `octavo decrypt`
had written would stay on the disk. A process that is killed (SIGKILL) still leaves it; the next command that writes
there removes it (:mod:`octavo.base.atomic_write`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(BaseException):
    """A signal asked the process to end. It is no ``Exception``, so that ``except Exception`` does not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name


@contextmanager
def stop_signals() -> Iterator[None]:
    """Inside this context, the first SIGTERM, SIGHUP or SIGINT raises `Stopped` or KeyboardInterrupt in the main
    thread.

    A SIGTERM or SIGHUP after the first signal has no effect, so that it does not interrupt the clean-up (schedulers
    repeat their signals); a second SIGINT does interrupt it. Ignored signals (nohup) stay ignored, and handlers of
    other code stay in place. Outside the main thread nothing is changed. A forked child process that inherits the
    handlers ends as it would without them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, stopping = os.getpid(), False

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        # A forked child inherits the handler, but not the code that catches the exception.
        if os.getpid() != owner:
            _end_by(number)
        if not stopping:
            stopping = True
            raise Stopped(number)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        raise KeyboardInterrupt

    before: dict[int, Any] = {}
    try:
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, stop)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_by(number: int) -> NoReturn:
    """End this process by the signal's default action."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)
