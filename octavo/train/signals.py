"""SIGTERM and SIGINT as a request that the loop looks at between steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """A context in which the first SIGTERM or SIGINT is remembered (`signal`) and a second SIGINT interrupts at once.
    Outside the main thread signals cannot be caught; then it remembers nothing."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.asked = False  # to stop, by a callback
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
