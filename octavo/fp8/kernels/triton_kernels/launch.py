"""How kernels are started, seen being started, and described for compilation ahead of time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels run in Triton's interpreter: settled when they are imported, as Triton settles it."""

_watchers: list[Counter[str]] = []


class Variant(NamedTuple):
    """One compiled form of a kernel: what ``python -m octavo.fp8.kernels.triton_kernels.aot`` builds for each
    architecture.

    ``signature`` gives Triton's type of each argument that is no constant (``"*bf16"``, ``"*fp8e4nv"``, ``"*u8"``,
    ``"i32"``; ``":16"`` behind it: a multiple of 16, as Triton finds out by itself at a launch); ``constants`` the
    constexpr arguments; ``architectures`` those it is used on; ``maxnreg`` the most registers a thread may have;
    ``fused`` whether a product may be rounded together with the sum it enters.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    architectures: tuple[int, ...] = (89, 90, 100, 120)
    maxnreg: int | None = None
    fused: bool = True


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
