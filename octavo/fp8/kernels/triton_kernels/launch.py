"""How kernels are started, and seen being started.

Triton's own ``kernel[grid](...)`` takes about 20 us: it looks for the compiled kernel anew at every launch. Here a
compiled kernel is remembered by what Triton compiles apart: constants by their values, tensors by their dtype and
whether their address divides by 16, integers by whether they are 1, divide by 16, and how many bits they take, other
arguments by their type. A launch of a kind that was made before goes straight to the driver.
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
"""Whether the kernels run in Triton's interpreter: settled when they are imported, as Triton settles it."""

_MOST = 4096  # kinds of launches that are remembered
_watchers: list[Counter[str]] = []
_compiled: dict[tuple[Any, ...], tuple[Any, Any, tuple[Any, ...]]] = {}  # the kernel, compiled, its constants in order


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run ``kernel`` on ``grid``; a grid without programs runs nothing. ``args`` are its first arguments; ``options``
    its constants, which come last, and how it is compiled."""
    if 0 in grid:
        return
    for seen in _watchers:
        seen[kernel.__name__] += 1
    if INTERPRETED or kernel.pre_run_hooks or _hooked():
        kernel[grid](*args, **options)
    else:
        run(kernel, grid, args, options)


def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """A launch as Triton makes it, by what is remembered of one of the same kind."""
    device = driver.active.get_current_device()
    kinds: list[Any] = [id(kernel), device, *options, *options.values()]
    for arg in args:
        if isinstance(arg, Tensor):
            kinds += (arg.dtype, arg.data_ptr() % 16 == 0)
        else:
            kinds.append(_kind_of_int(arg) if type(arg) is int else _kind(arg))
    key = tuple(kinds)
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **options)
        if len(_compiled) >= _MOST:
            _compiled.clear()
        if compiled is not None:  # None where a hook of Triton's forbade it
            _compiled[key] = kernel, compiled, tuple(options[name] for name in kernel.arg_names[len(args) :])
        return
    _, compiled, constants = found  # the kernel is held, so that no other comes to have its id
    stream = driver.active.get_current_stream(device)
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *constants)


@lru_cache(maxsize=1 << 16)
def _kind_of_int(value: int) -> tuple[Any, ...]:
    bits = 32 if -(1 << 31) <= value < 1 << 31 else 64 if value < 1 << 63 else 65
    return value == 1, value % 16 == 0, bits


def _kind(arg: Any) -> Any:
    """Of an argument that is neither a tensor nor an integer: None is a constant, a descriptor has a block."""
    return (arg.base.dtype, *arg.block_shape) if hasattr(arg, "block_shape") else type(arg)


def _hooked() -> bool:
    """Whether a profiler wants to be told of launches, which Triton does."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Count launches by the kernel's name, so that a test can show that the kernel it vouches for ran."""
    seen: Counter[str] = Counter()
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers[:] = [w for w in _watchers if w is not seen]
