"""Ends a run's process when its trial ends, so that no run continues without its trial.

A trial that is killed (SIGKILL, out of memory) cannot ask its runs to exit, and they are in separate sessions, which a
terminal's hang-up does not reach. So each run monitors its parent process.
"""

from __future__ import annotations

import os
import signal
import threading
import time

POLL_SECONDS = 1.0  # seconds between checks of the parent


def signal_on_parent_exit(parent: int, send: int = signal.SIGTERM) -> None:
    """Send this process a signal once ``parent`` (a process id) is no longer its parent; a run saves on SIGTERM.

    Polls from a daemon thread: unlike Linux's parent-death signal, this works on every POSIX system, and does not
    mistake the end of the thread that started the process for the end of the trial.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), send)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
