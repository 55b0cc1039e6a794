"""A repeated launch calls the driver directly, but only if Triton would run the same compiled kernel.

Nothing is compiled and no GPU is used: Triton computes its own specialization keys, and the compiled kernel is a
stand-in that records its launches.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.fp8.kernels.triton_kernels import launch


def example(x_ptr, y_ptr, count, scale, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    pass


class Compiled:
    """A kernel that Triton found in its cache, or compiled."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, runs: list[tuple[Any, ...]]) -> None:
        self.runs = runs

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        self.runs.append((self, *args))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel of an H100 whose ``runs`` are noted, with ``asked``: what Triton was asked to find."""
    target = GPUTarget("cuda", 90, 32)
    fake = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 7
    )
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_compiled", {})
    created = JITFunction(example)
    created.runs, created.asked = [], []

    def compile_(key: Any, signature: Any, device: Any, *more: Any) -> Compiled:
        return created.device_caches[device][0].setdefault(key, Compiled(created.runs))

    run = created.run
    created.run = lambda *args, **options: (created.asked.append(args), run(*args, **options))[1]
    created._do_compile = compile_
    return created


def test_second_launch_skips_triton(kernel: Any) -> None:
    x, y = torch.zeros(64), torch.zeros(64)
    for count in (48, 64):
        launch.launch(kernel, (3,), x, y, count, 2.5, BLOCK=16, EVEN=True, num_warps=8)
    (first, *rest), (second, *again) = kernel.runs
    assert len(kernel.asked) == 1 and first is second
    assert rest[:4] == again[:4] == [3, 1, 1, 7] and rest[4:6] == again[4:6] == ["function", "metadata"]
    assert rest[9:] == [x, y, 48, 2.5, 16, True] and again[6:] == [None, None, None, x, y, 64, 2.5, 16, True]


def test_specializations_are_cached_separately(kernel: Any) -> None:
    """Many kinds of arguments: what Triton runs for each is run from memory too."""
    saved = torch.zeros(256, dtype=torch.uint8)
    pointers = [saved[:64].view(torch.float32), saved[4:68].view(torch.float32), saved[:64].view(torch.bfloat16), None]
    pointers += [TensorDescriptor(saved.view(16, 16), [16, 16], [16, 1], [n, 16]) for n in (8, 16)]
    counts = [0, 1, 2, 16, -1, -16, 1 << 31, (1 << 31) - 1, -(1 << 31) - 1, 1 << 35, 1 << 63]
    calls = [((pointers[0], x, n, s), {"EVEN": 1}) for x, n, s in itertools.product(pointers, counts, (1.0, 2))]
    calls += [((x, x, 5, 1.0), o) for x in pointers for o in ({"EVEN": 1}, {"EVEN": 2}, {"EVEN": 1, "num_warps": 8})]
    for args, extra in calls:
        kernel[(1,)](*args, BLOCK=16, **extra)
    alone = [run[0] for run in kernel.runs]
    for again in (False, True):
        kernel.runs.clear(), kernel.asked.clear()
        for args, extra in calls:
            launch.launch(kernel, (1,), *args, BLOCK=16, **extra)
        assert [run[0] for run in kernel.runs] == alone and (not kernel.asked) == again
    assert len({id(compiled) for compiled in alone}) > len(calls) // 3


def test_a_profiler_sees_every_launch(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.knobs.runtime.launch_enter_hook, "calls", [lambda metadata: None])
    for _ in range(2):
        launch.launch(kernel, (1,), torch.zeros(4), torch.zeros(4), 4, 1.0, BLOCK=16, EVEN=True)
    assert len(kernel.asked) == 2


def test_memory_is_bounded(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST", 2)
    for block in range(5):
        launch.launch(kernel, (1,), None, None, 4, 1.0, BLOCK=block, EVEN=True)
    assert len(launch._compiled) <= 2 and len(kernel.runs) == 5
