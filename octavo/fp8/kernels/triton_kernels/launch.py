"""How kernels are started, and seen being started."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels run in Triton's interpreter: settled when they are imported, as Triton settles it."""

_watchers: list[Counter[str]] = []


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run ``kernel`` on ``grid``; a grid without programs runs nothing."""
    if 0 in grid:
        return
    for seen in _watchers:
        seen[kernel.__name__] += 1
    kernel[grid](*args, **options)


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Count launches by the kernel's name, so that a test can show that the kernel it vouches for ran."""
    seen: Counter[str] = Counter()
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers[:] = [w for w in _watchers if w is not seen]
