"""Measures the Python overhead of an FP8 linear layer, on any CPU: microseconds, compared with nn.Linear.

    python benchmarks/host.py [--rounds 15] [--out results/host_cpu.json]

Backends are chosen as on a GPU with cuBLAS, but no kernel runs: Triton launches and cuBLAS GEMMs are replaced by stubs
that return empty results. The rest is the work of the host for the forward and backward of one layer. It overlaps with
kernels if these take longer, and otherwise determines the speed (short sequences, vision towers). Tensors are real but
small; their size does not matter because nothing is computed.

Times are thread CPU times, so that other work on the machine matters little; candidates run in turn, and the median of
the rounds counts. The last rows are single launches through a driver that does nothing, by Triton and by Octavo, and
what the operators of a compiled layer take to report their GEMMs to fp8.count_gemms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from octavo import fp8
from octavo.base.recipe_specs import SPECS
from octavo.bench import record
from octavo.fp8.dense import graph_counts
from octavo.fp8.kernels import torch_backend, triton_backend
from octavo.fp8.kernels.triton_kernels import cast, cast_tiles, gemm, launch, tiles
from octavo.fp8.observe import recorder

SIZE = 128
CALLS = 100  # of one contender in one round
# On an H200 cuBLAS has no product for scales that its tensor cores do not multiply by.
LAYERS = {name: ("torch", "triton") if spec.is_native_on_all else ("triton",) for name, spec in SPECS.items()}
Step = Callable[[bool], object]


class Empty(torch.autograd.Function):
    """Takes what a linear layer takes and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return x, weight


def _none(*args: Any, **options: Any) -> None:
    pass


def _product(product: torch_backend.Product, dtype: torch.dtype, *rest: Any) -> Tensor:
    return torch.empty(product.a.shape[0], product.b.shape[1], dtype=dtype)


@contextmanager
def without_kernels() -> Iterator[None]:
    """The backends of an H200, whose kernels do nothing."""
    with (
        mock.patch.object(cast, "launch", _none),
        mock.patch.object(gemm, "launch", _none),
        mock.patch.object(tiles, "gpu_of", lambda device: tiles.Gpu(90, 132)),
        mock.patch.object(triton_backend, "_why_not", _none),
        mock.patch.object(triton_backend.TritonBackend, "why_not_auto", _none),
        mock.patch.object(torch_backend, "_why_not", _none),
        mock.patch.object(torch_backend, "multiply", _product),
    ):
        yield


def step_of(layer: Callable[[Tensor], Tensor], size: int, parameters: list[nn.Parameter]) -> Step:
    """One forward, or a forward and its backward, as in a training step that has just set its gradients to None."""
    x = torch.randn(size, size, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.ones_like(x)

    def step(backward: bool) -> None:
        x.grad = None
        for p in parameters:
            p.grad = None
        y = layer(x)
        if backward:
            y.backward(dy)

    return step


def contenders() -> dict[str, Step]:
    """nn.Linear first."""
    stock = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    weight = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    steps = {
        "nn.Linear 1x1": step_of(stock, 1, [stock.weight]),
        "an autograd.Function that does nothing": step_of(lambda x: Empty.apply(x, weight), 1, [weight]),
    }
    ways = [(recipe, backend, "keep") for recipe, backends in LAYERS.items() for backend in backends]
    for recipe, backend, codes in [*ways, ("blockwise", "torch", "both")]:
        layer: Any = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16))
        fp8.apply(layer, fp8.plan(layer, fp8.Policy(recipe, backend=backend, weight_codes=codes)))
        name = f"{recipe}, {backend} backend" + (", both layouts of w" if codes == "both" else "")
        steps[name] = step_of(layer[0], SIZE, list(layer.parameters()))
    layer = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16))
    fp8.apply(layer, fp8.plan(layer, fp8.Policy("blockwise", backend="torch")))
    steps["blockwise, torch backend, torch.compile"] = step_of(torch.compile(layer), SIZE, list(layer.parameters()))
    return steps


def timed(steps: dict[str, Step], rounds: int) -> list[dict[str, Any]]:
    """Microseconds of a forward, and of a forward and backward, of each; and the latter over the first one's."""
    taken: dict[tuple[str, bool], list[float]] = {(name, both): [] for name in steps for both in (False, True)}
    for number in range(rounds + 1):  # the first, which casts weights and fills caches, is not kept
        for (name, both), seconds in taken.items():
            began = time.thread_time()
            for _ in range(CALLS):
                steps[name](both)
            if number:
                seconds.append((time.thread_time() - began) / CALLS)
    micro = {key: statistics.median(seconds) * 1e6 for key, seconds in taken.items()}
    first = micro[next(iter(steps)), True]
    return [
        {
            "layer": name,
            "forward_us": round(micro[name, False], 1),
            "both_us": round(micro[name, True], 1),
            "ratio": round(micro[name, True] / first, 2),
        }
        for name in steps
    ]


def launches(rounds: int) -> dict[str, float]:
    """Microseconds of one launch of a cast in two layouts, as Triton launches and as Octavo does, through a driver
    that does nothing."""
    taken: list[tuple[Any, Any, Any, Any]] = []
    with (
        without_kernels(),
        mock.patch.object(cast, "launch", lambda kernel, grid, *args, **options: taken.append((grid, args, options))),
    ):
        x = torch.zeros(SIZE, SIZE, dtype=torch.bfloat16)
        cast.quantize_both(x, fp8.CastSpec(), fp8.CastSpec(block=(128, 1)))
    (grid, args, options), kernel = taken[0], JITFunction(cast_tiles.cast_kernel.fn)
    compiled = SimpleNamespace(function=None, packed_metadata=None, launch_metadata=_none, run=_none)
    kernel._do_compile = lambda key, signature, device, *rest: kernel.device_caches[device][0].setdefault(key, compiled)
    target = GPUTarget("cuda", 90, 32)
    nothing = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    ways = {
        "kernel[grid](...)": lambda: kernel[grid](*args, **options),
        "Octavo's launch": lambda: launch.launch(kernel, grid, *args, **options),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with mock.patch.object(driver, "_active", nothing), mock.patch.object(launch, "INTERPRETED", False):
        for number in range(rounds + 1):
            for name, way in ways.items():
                began = time.thread_time()
                for _ in range(CALLS):
                    way()
                if number:
                    seconds[name].append((time.thread_time() - began) / CALLS)
    return {name: round(statistics.median(each) * 1e6, 1) for name, each in seconds.items()}


def reports(rounds: int) -> dict[str, float]:
    """Microseconds that the three GEMMs of a layer in a compiled graph take to report: in fp8.count_gemms, and the
    question of an operator whether anything listens."""
    layer: Any = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16))
    fp8.apply(layer, fp8.plan(layer, fp8.Policy("blockwise", backend="torch")))
    weight, key = layer[0].weight, layer[0]._site.key

    def report() -> None:
        graph_counts.report_forward(weight, key, SIZE, graph_counts.GRAD + graph_counts.DGRAD + graph_counts.WGRAD)
        graph_counts.report_backward("dgrad", weight, key, SIZE)
        graph_counts.report_backward("wgrad", weight, key, SIZE)

    ways = {"counted": report, "not counted": lambda: [recorder.is_active() for _ in range(3)]}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with fp8.count_gemms():
        for _ in range(rounds):
            for name, way in ways.items():
                began = time.thread_time()
                for _ in range(CALLS):
                    way()
                seconds[name].append((time.thread_time() - began) / CALLS)
    return {name: round(statistics.median(each) * 1e6, 1) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with without_kernels(), torch.autograd.set_multithreading_enabled(False):
        rows, counts = timed(contenders(), args.rounds), reports(args.rounds)
    print(f"{'microseconds of thread time':40} forward  with backward  x nn.Linear")
    for row in rows:
        print(f"{row['layer']:40} {row['forward_us']:7.1f} {row['both_us']:14.1f} {row['ratio']:12.1f}")
    one = launches(args.rounds)
    for name, micro in one.items():
        print(f"{'one launch: ' + name:40} {micro:7.1f}")
    for name, micro in counts.items():
        print(f"{'reports of a compiled layer, ' + name:40} {micro:7.1f}")
    if args.out:
        result = {
            "command": "python benchmarks/host.py",
            "layers": rows,
            "reports_us": counts,
            "launch_us": one,
            "machine": record.describe_machine(),
        }
        record.save(result, args.out)


if __name__ == "__main__":
    main()
