"""Gluon's kernel on the CPU: its own Python, with a thread for each group of warps.

Gluon has no interpreter. But what this kernel asks of it is little: tiles that are copied, barriers that count, and
products of tiles. So the functions of ``gluon_kernel`` run as they are written, over stand-ins of these: the loading
warp and both warpgroups are threads, ``mbarrier`` counts arrivals and bytes as the hardware does, and a copy fills with
zeros beyond its matrix and writes nothing there. It shows which tile goes where, under which scale, and that nobody
waits for ever; not what a compiler makes of it, nor that a fence is missing.
"""

from __future__ import annotations

import threading
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from octavo.fp8.kernels.triton_kernels import gluon_kernel

PATIENCE = 120.0  # seconds until a wait is one for ever


class Barrier:
    """A phase ends when ``count`` arrivals were made and all bytes that were announced have come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def move(self, arrivals: int = 0, expected: int = 0) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += expected
            assert self.missing >= 0, "more arrivals than the barrier was made for"
            if self.missing == 0 and self.bytes == 0:
                self.phase ^= 1
                self.missing = self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != parity, PATIENCE), "a wait for ever"


class Shared:
    """Shared memory of tiles, or of barriers."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def index(self, at: int) -> Any:
        found = self.held[at]
        return found if isinstance(found, Barrier) else Shared(found)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.held.permute(order))

    def store(self, value: Tensor) -> None:
        self.held.copy_(value)


class Pointer:
    """Into the memory of a tensor."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + more)


class Described:
    """A matrix by its descriptor."""

    def __init__(self, descriptor: Any) -> None:
        self.real = descriptor.base.as_strided(descriptor.shape, descriptor.strides)
        self.box, self.dtype, self.layout = descriptor.block_shape, descriptor.base.dtype, descriptor.layout

    def inside(self, at: list[int]) -> tuple[Tensor, tuple[slice, ...]]:
        """What of the box lies in the matrix, and where in the box that is."""
        ends = [
            max(min(int(i) + n, size) - int(i), 0) for i, n, size in zip(at, self.box, self.real.shape, strict=True)
        ]
        found = self.real[tuple(slice(int(i), int(i) + n) for i, n in zip(at, ends, strict=True))]
        return found, tuple(slice(0, n) for n in found.shape)


def _load(pointer: Pointer, mask: Any = True, other: float = 0.0) -> Tensor:
    at, mask = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(mask))
    found = pointer.memory[torch.where(mask, at, 0)]
    return torch.where(mask, found, torch.as_tensor(other, dtype=found.dtype))


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Shared:
    if layout == "barriers":
        return Shared([Barrier() for _ in range(shape[0])])
    return Shared(torch.full(shape, float("nan"), dtype=torch.float32).to(dtype))


def _bring(source: Described, at: list[int], barrier: Barrier, target: Shared) -> None:
    held, (real, where) = target.held.view(torch.uint8), source.inside(at)
    held.zero_()
    held[where] = real.view(torch.uint8)
    barrier.move(expected=-held.numel())


def _take(target: Described, at: list[int], source: Shared) -> None:
    real, where = target.inside(at)
    real.copy_(source.held[where])


def _product(a: Shared, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    found = a.held.float() @ b.held.float()
    return acc + found if use_acc else found


def _specialized(work: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    failures: list[BaseException] = []

    def run(function: Any, args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """In place of ``launch`` of ``gluon_gemm``: all programs, one after the other."""
    gl = SimpleNamespace(
        float32=torch.float32, int64=torch.int64, static_range=range, num_programs=lambda axis: grid[axis],
        cdiv=lambda a, b: -(-a // b), minimum=min, where=torch.where, load=_load,
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        arange=lambda first, last, layout: torch.arange(first, last),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        NVMMADistributedLayout=lambda **_: None, SliceLayout=lambda *_: None,
        allocate_shared_memory=_allocate, warp_specialize=_specialized,
    )  # fmt: skip
    names: dict[str, Any] = {
        "gl": gl,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: "barriers",
            init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, size: barrier.move(arrivals=1, expected=size),
            wait=lambda barrier, parity: barrier.wait(parity),
            arrive=lambda barrier, count: barrier.move(arrivals=count),
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=_bring, async_copy_shared_to_global=_take, store_wait=lambda pendings: None
        ),
        "warpgroup_mma": _product,
        "warpgroup_mma_wait": lambda pendings, found: found[0],
        "fence_async_shared": lambda: None,
    }
    for name, value in vars(gluon_kernel).items():
        if hasattr(value, "fn"):
            names[name] = FunctionType(value.fn.__code__, names, name)
        elif hasattr(value, "value"):  # a constexpr
            names[name] = value.value
    given = [_given(arg) for arg in args]
    fixed = {key: value for key, value in options.items() if key in kernel.arg_names}
    for program in range(grid[0]):
        gl.program_id = lambda axis, program=program: program
        names[kernel.__name__](*given, **fixed)


def _given(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        room = arg.untyped_storage().nbytes() // arg.element_size() - arg.storage_offset()
        return Pointer(arg.as_strided((room,), (1,)))
    return Described(arg) if hasattr(arg, "block_shape") else arg
