"""Kernel launches, and a counter of them for tests.

Triton's own ``kernel[grid](...)`` takes about 20 us, because it looks the compiled kernel up again at every launch.
This cache keys a compiled kernel by everything that Triton specializes on: constants by their values, tensors by dtype
and whether their address divides by 16, integers by whether they are 1, divide by 16, and their number of bits, other
arguments by type. A launch of a known kind goes straight to the driver.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels run in Triton's interpreter: decided when they are imported, as Triton does."""

_MOST = 4096  # kinds of launches in the cache: a bound for callers whose sizes never repeat
_watchers: list[Counter[str]] = []
_compiled: dict[tuple[object, ...], tuple[Any, Any, tuple[object, ...]]] = {}  # the kernel, compiled, its constants


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
    """Run ``kernel`` on ``grid``, or nothing on an empty grid. ``args`` are its first arguments; ``options`` its
    constants, which come last, and compile options such as ``num_warps``."""
    if 0 in grid:
        return
    for seen in _watchers:
        seen[kernel.__name__] += 1
    if INTERPRETED or kernel.pre_run_hooks or _has_hooks():
        kernel[grid](*args, **options)
    else:
        run(kernel, grid, args, options)


def run(kernel: Any, grid: tuple[int, ...], args: tuple[object, ...], options: dict[str, object]) -> None:
    """Launch like Triton, by the compiled kernel of an earlier launch of the same kind if there is one."""
    device = driver.active.get_current_device()
    kinds: list[object] = [id(kernel), device, *options, *options.values()]
    for arg in args:
        if isinstance(arg, Tensor):
            kinds += (arg.dtype, arg.data_ptr() % 16 == 0)
        else:
            kinds.append(_specialize_int(arg) if type(arg) is int else _specialize(arg))
    key = tuple(kinds)
    entry = _compiled.get(key)
    if entry is None:
        compiled = kernel[grid](*args, **options)
        if len(_compiled) >= _MOST:
            _compiled.clear()
        if compiled is not None:  # None if a hook of Triton prevented it
            _compiled[key] = kernel, compiled, tuple(options[name] for name in kernel.arg_names[len(args) :])
        return
    _, compiled, constants = entry  # the entry keeps the kernel alive: its id cannot be reused
    stream = driver.active.get_current_stream(device)
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *constants)


@lru_cache(maxsize=1 << 16)
def _specialize_int(value: int) -> tuple[bool, bool, int]:
    bits = 32 if -(1 << 31) <= value < 1 << 31 else 64 if value < 1 << 63 else 65
    return value == 1, value % 16 == 0, bits


def _specialize(arg: Any) -> object:
    """Return the key of an argument that is neither a tensor nor an integer: dtype and block of a TMA descriptor, else
    the type, also for None, which Triton compiles as a constant."""
    return (arg.base.dtype, *arg.block_shape) if hasattr(arg, "block_shape") else type(arg)


def _has_hooks() -> bool:
    """True if a profiler has registered launch hooks, which only Triton's own launch calls."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Count launches by the kernel's name, so that a test can check which kernel ran."""
    seen: Counter[str] = Counter()
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers[:] = [w for w in _watchers if w is not seen]
