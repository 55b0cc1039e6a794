"""Ties the life of a run's process to the trial's: a run that trains on without its trial is nobody's.

A trial that is killed outright (SIGKILL, out of memory) cannot ask its runs to leave, and they are in sessions of their
own, where no terminal's hang-up reaches them. So each run watches who its parent is.
"""

from __future__ import annotations

import os
import signal
import threading
import time

LOOK = 1.0  # seconds between looks at the parent


def follow(parent: int, send: int = signal.SIGTERM) -> None:
    """Send this process a signal once ``parent`` (a process id) is its parent no longer; a run saves at SIGTERM.

    Watches from a daemon thread: unlike Linux's parent-death signal that works on every POSIX system, and does not take
    the end of the thread that started the process for the end of the trial.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        os.kill(os.getpid(), send)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
