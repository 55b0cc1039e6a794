"""Where the time of one call goes, kernel by kernel: torch's profiler, summed by kind and by name.

Unlike :mod:`~octavo.bench.profiles.budget` this also works for compiled blocks and CUDA graphs. On a GPU the seconds
are of kernels, and ``idle`` is the time between the first and the last of them in which none runs; on a CPU they are of
torch's operators without the operators that they call, and ``idle`` is all other time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from octavo.base import accelerator
from octavo.bench.bench import Call
from octavo.fp8 import kernels

KINDS = ("gemm", "attention", "octavo", "generated", "optimizer", "rest", "idle")
NAMES, LETTERS = 40, 120  # names that are kept, the most expensive first, and characters of each

# The first that matches counts. Names that Inductor generates contain the names of the operators that it fused, and
# names of attention kernels contain the name of the GEMM library that they are written with.
_PATTERNS = (
    ("optimizer", re.compile(r"adam", re.IGNORECASE)),
    ("generated", re.compile(r"^(triton_(poi|red|per|for|unk|tem|mm|bmm)|cpp_)")),
    ("attention", re.compile(r"flash|fmha|sdpa|attention|attend|scaled_dot_product", re.IGNORECASE)),
    ("gemm", re.compile(r"gemm|nvjet|cutlass|xmma|wgmma|gemv|splitk|cublas|aten::(add|b|_grouped_|_scaled_)?mm")),
)
_RANGES = re.compile(r"^(## |Torch-Compiled|ProfilerStep)")  # marks of a range of kernels, not kernels


@dataclass(frozen=True)
class KernelProfile:
    """Seconds of one call: in all, by :data:`KINDS`, and by name for the most expensive kernels."""

    seconds: float
    kinds: Mapping[str, float]
    names: Mapping[str, float]


@lru_cache
def own_kernels() -> frozenset[str]:
    """Return the names of Octavo's Triton kernels, from their sources."""
    folder = Path(kernels.__file__).parent / "triton_kernels"
    sources = (path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    return frozenset(name for text in sources for name in re.findall(r"^@triton\.jit.*\ndef (\w+)", text, re.MULTILINE))


def kind_of(name: str) -> str:
    """Return the kind of a kernel or operator by its name."""
    kind = next((kind for kind, pattern in _PATTERNS if pattern.search(name)), None)
    return kind or ("octavo" if name in own_kernels() or name.startswith("octavo::") else "rest")


def profile_call(call: Call, device: torch.device) -> KernelProfile:
    """Run ``call`` once under the profiler. Raises RuntimeError if the profiler recorded nothing."""
    gpu = accelerator.is_gpu(device)
    accelerator.synchronize(device)
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as recorded:
        call()
        accelerator.synchronize(device)
        wall = time.perf_counter() - began
    if gpu:
        events = [e for e in recorded.events() if e.device_type != DeviceType.CPU]
        spans = [(e.name, e.time_range.start / 1e6, e.time_range.end / 1e6, e.is_user_annotation) for e in events]
    else:
        events = recorded.key_averages()
        spans = [(e.key, 0.0, e.self_cpu_time_total / 1e6, e.is_user_annotation) for e in events]
    spans = [span for span in spans if not _is_range(span[0], span[-1])]
    if not spans:
        raise RuntimeError("the profiler recorded no kernel")
    window = max(end for _, _, end, _ in spans) - min(start for _, start, _, _ in spans) if gpu else wall
    return summarize(((name, end - start) for name, start, end, _ in spans), window)


def _is_range(name: str, annotated: bool | None) -> bool:
    return bool(annotated) or _RANGES.match(name) is not None


def summarize(timed: Iterable[tuple[str, float]], window: float) -> KernelProfile:
    """Sum (name, seconds) of kernels by kind and by name; ``window`` is the time of the call. Kernels that run at the
    same time count fully, so the sum may exceed the window."""
    kinds, names = dict.fromkeys(KINDS, 0.0), dict[str, float]()
    for name, seconds in timed:
        kinds[kind_of(name)] += seconds
        names[name[:LETTERS]] = names.get(name[:LETTERS], 0.0) + seconds
    kinds["idle"] = max(0.0, window - sum(kinds.values()))
    expensive = sorted(names, key=lambda name: -names[name])[:NAMES]
    return KernelProfile(window, kinds, {name: names[name] for name in expensive})
