"""Turns SIGTERM and SIGHUP into an exception, like Ctrl-C, so that half-written files are removed.

The default action of both signals ends the process at once without running ``finally``: plain text that `octavo
decrypt` had written would stay on the disk. SIGKILL still leaves it there; the next command that writes to the same
place removes it (:mod:`octavo.base.atomic_write`).
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
    """Raised for a signal that ends the process; not an ``Exception``, so that ``except Exception`` does not catch
    it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name


@contextmanager
def stop_signals() -> Iterator[None]:
    """Raise `Stopped` or KeyboardInterrupt in the main thread on the first SIGTERM, SIGHUP or SIGINT inside this
    context.

    A SIGTERM or SIGHUP after the first signal has no effect, so that it does not interrupt the cleanup (schedulers
    repeat their signals); a second SIGINT does interrupt it. Ignored signals (nohup) stay ignored, and handlers of
    other code stay in place. Outside the main thread nothing changes. A forked child that inherits the handlers ends by
    the signal's default action.
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
    """End this process by the default action of the signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)
