"""``gemm``: the three GEMMs alone on operands that are already FP8, compared with the same GEMM in high precision.

Also forwards of few rows without gradients, as in decoding, whose time is determined by the bytes of the weights."""

from __future__ import annotations

from functools import partial

import torch

from octavo import fp8
from octavo.bench import peers
from octavo.bench.bench import Bench, Call, Unavailable, Work
from octavo.fp8 import kernels
from octavo.fp8.arithmetic import GEMMS, Recipe

# (name, N, K): Qwen3-8B's decoder, Qwen3-VL's and Qwen2.5-VL's vision towers.
SHAPES = (
    ("qwen3-8b qkv", 6144, 4096),
    ("qwen3-8b gate_up", 24576, 4096),
    ("qwen3-8b down", 4096, 12288),
    ("qwen3-8b kv", 1024, 4096),
    ("qwen3-vl fc1", 4304, 1152),
    ("qwen2.5-vl gate", 3420, 1280),
)
SMALL = (("small", 80, 144), ("odd", 43, 72))
DECODE_SHAPES = (("qwen3-8b gate", 12288, 4096), *SHAPES[2:4])
TOKENS, FEW = 16384, 64
ROWS, SMALL_ROWS = (1, 8, 32, 64), (1, 8)


def run(bench: Bench) -> None:
    """Measure fwd, dgrad and wgrad of every recipe and backend."""
    m = bench.tokens or (FEW if bench.small else TOKENS)
    for label, n, k in SMALL if bench.small else SHAPES:
        for gemm in GEMMS:
            candidates = {bench.high: partial(_make_plain_call, bench, gemm, m, n, k)}
            for name in (*peers.RECIPES, *(peers.VARIANTS if gemm == "wgrad" else ())):  # which differ in wgrad
                for backend in peers.supported_backends(bench, name):
                    call = partial(_make_fp8_call, bench, gemm, fp8.recipe(name), backend, m, n, k)
                    candidates[f"{name} {backend}"] = call
            case = f"{label} {gemm} M={m} N={n} K={k}"
            bench.case("gemm", case, bench.high, candidates, Work(flops=2.0 * m * n * k))
    for label, n, k in SMALL[:1] if bench.small else DECODE_SHAPES:
        for rows in SMALL_ROWS if bench.small else ROWS:
            _run_decode(bench, label, rows, n, k)


def _run_decode(bench: Bench, label: str, m: int, n: int, k: int) -> None:
    """Measure a forward of few rows; if a backend has a kernel for few rows, its general GEMM is also measured. All
    candidates count the bytes that FP8 must move, so that ratios are ratios of time."""
    candidates = {bench.high: partial(_make_plain_call, bench, "fwd", m, n, k)}
    work = Work(flops=2.0 * m * n * k, bytes=float(n * k + m * k + m * n * bench.dtype.itemsize))
    for name in peers.RECIPES:
        for backend in peers.supported_backends(bench, name):
            has_kernel = type(kernels.get(backend)).gemm_decode is not kernels.Backend.gemm_decode
            for suffix, product in (("", "decode"), (", tiles of many rows", "fwd"))[: 1 + has_kernel]:
                call = partial(_make_fp8_call, bench, "fwd", fp8.recipe(name), backend, m, n, k, product)
                candidates[f"{name} {backend}{suffix}"] = call
    bench.case("gemm", f"{label} decode M={m} N={n} K={k}", bench.high, candidates, work)


def _make_operands(bench: Bench, gemm: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = {"fwd": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[gemm]
    return bench.randn(*shapes[0]), bench.randn(*shapes[1])


def _make_plain_call(bench: Bench, gemm: str, m: int, n: int, k: int) -> Call:
    a, b = _make_operands(bench, gemm, m, n, k)
    return {"fwd": lambda: a @ b.t(), "dgrad": lambda: a @ b, "wgrad": lambda: a.t() @ b}[gemm]


def _make_fp8_call(
    bench: Bench, gemm: str, recipe: Recipe, backend: str, m: int, n: int, k: int, product: str = ""
) -> Call:
    chosen, casts = kernels.get(backend), recipe.gemm(gemm)
    assert casts is not None
    if gemm in GEMMS and (why := chosen.supports(gemm, recipe, bench.device, None)) is not None:
        raise Unavailable(why)
    a, b = _make_operands(bench, gemm, m, n, k)
    a_dim, b_dim = {"fwd": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}[gemm]
    a_q, b_q = chosen.quantize(a, casts.a, a_dim), chosen.quantize(b, casts.b, b_dim)
    multiply = getattr(chosen, f"gemm_{product or gemm}")
    return lambda: multiply(a_q, b_q, bench.dtype)
