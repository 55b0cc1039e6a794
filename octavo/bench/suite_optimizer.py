"""``optimizer``: a step of ``fp8.AdamW`` for every format of states and masters, compared with torch's fused AdamW.

A step is limited by memory bandwidth: it reads weights, gradients and states, and writes weights and states. The ratio
of a row is its bandwidth divided by the bandwidth of torch's fused AdamW, whose states and weights are fp32; its time
shows the gain from smaller formats.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from octavo import fp8
from octavo.bench.bench import Bench, Call, Work

STATES = {"fp8": 2.0625, "coat": 2.1875, "bf16": 4.0, "fp32": 8.0}  # bytes per parameter
MASTERS = {"fp32": 4.0, "bf16+16": 4.0, "bf16+sr": 2.0}  # bytes of the weight, including its correction
BASELINE = "torch fused fp32"

# A decoder layer of Qwen3-8B (193 M: all candidates are on the device at once), or something small.
LARGE, SMALL = (4096, 12288, 1024), (64, 160, 32)


def shapes(small: bool) -> list[tuple[int, ...]]:
    """Return the shapes of a decoder layer of width h: q and o, k and v, gate, up and down, four norms."""
    h, i, kv = SMALL if small else LARGE
    return [(h, h), (h, h), (kv, h), (kv, h), (i, h), (i, h), (h, i), (h,), (h,), (128,), (128,)]


def run(bench: Bench) -> None:
    """Time a step of every candidate on the same shapes."""
    sizes = shapes(bench.small)
    count = sum(torch.Size(size).numel() for size in sizes)
    candidates = {BASELINE: partial(_make_torch_step, bench, sizes)}
    work = {BASELINE: Work(bytes=28.0 * count)}
    for states, held in STATES.items():
        for master, weight in MASTERS.items():
            name = f"{states} x {master}"
            candidates[name] = partial(_make_octavo_step, bench, sizes, states, master)
            gradient = 4.0 if master == "fp32" else 2.0
            work[name] = Work(bytes=(2 * weight + gradient + 2 * held) * count)
    bench.case("optimizer", f"{count / 1e6:.3g} M parameters in {len(sizes)}", BASELINE, candidates, work, memory=True)


def _make_parameters(bench: Bench, sizes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    parameters: list[Tensor] = []
    for size in sizes:
        p = torch.nn.Parameter(torch.randn(size, device=bench.device, dtype=dtype))
        p.grad = torch.randn_like(p) * 1e-3
        parameters.append(p)
    return parameters


def _make_torch_step(bench: Bench, sizes: list[tuple[int, ...]]) -> Call:
    return torch.optim.AdamW(_make_parameters(bench, sizes, torch.float32), lr=1e-4, weight_decay=0.1, fused=True).step


def _make_octavo_step(bench: Bench, sizes: list[tuple[int, ...]], states: str, master: str) -> Call:
    dtype = torch.float32 if master == "fp32" else torch.bfloat16
    parameters = _make_parameters(bench, sizes, dtype)
    optimizer = fp8.AdamW(parameters, lr=1e-4, weight_decay=0.1, states=states, master=master)
    factor = torch.full((), 0.5, device=bench.device)  # clipping is part of the step
    return partial(optimizer.step, factor=factor)
