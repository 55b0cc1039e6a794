"""The weight version: when weights may have changed since something was derived from them.

``now`` rises at every step of every ``torch.optim`` optimizer of the process (a process-wide post-step hook);
``edits`` whenever somebody says that weights were written in a way that no step and no version counter shows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.optim.optimizer import register_optimizer_step_post_hook

now = 0
"""A number that rises with every optimizer step of the process. Read it as ``versions.now``."""
edits = 0
"""A number that rises with every edit that was announced by hand."""
_installed = False
_lock = threading.Lock()
# Who else remembers something between two layers, and drops it at an optimizer step and when asked to forget.
_listeners: list[Callable[[], None]] = []


def listen(drop: Callable[[], None]) -> None:
    """Let ``drop`` be called after every optimizer step and by :func:`notify`."""
    _listeners.append(drop)


def notify() -> None:
    """Let all who listen forget what they remember."""
    for drop in _listeners:
        drop()


def edited() -> None:
    """Weights were written otherwise than by an optimizer."""
    global edits
    edits += 1


def watch_optimizers() -> None:
    """Let every ``torch.optim`` step raise the weight version; once per process, on first use."""
    global _installed
    with _lock:
        if not _installed:
            register_optimizer_step_post_hook(_stepped)
            _installed = True


def _stepped(*_: object) -> None:
    global now
    now += 1
    notify()
