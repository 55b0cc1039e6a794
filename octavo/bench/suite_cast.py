"""``cast``: the bandwidth of casts and fused layers, compared with a plain copy.

A copy reads and writes 2 bytes per element in BF16; a cast into both layouts reads 2 and writes 1 + 1, so at the same
bandwidth both take the same time. The ratio of a row is its bandwidth over the copy's.
"""

from __future__ import annotations

from functools import partial

import torch

from octavo import fp8
from octavo.bench import peers
from octavo.bench.bench import Bench, Call, Rotation, Work
from octavo.fp8 import kernels
from octavo.fp8.arithmetic import Recipe

SHAPES = ((16384, 4096), (16384, 12288), (8192, 1152))
SMALL = ((96, 160), (64, 144))


def run(bench: Bench) -> None:
    """Measure every recipe's casts of x, and the fused layers, for each shape [M, K]."""
    for m, k in SMALL if bench.small else SHAPES:
        _run_casts(bench, m, k)
        _run_fused(bench, m, k)


def _run_casts(bench: Bench, m: int, k: int) -> None:
    size = torch.finfo(bench.dtype).bits // 8
    elements = m * k
    candidates = {"copy": lambda: _copy(bench, m, k)}
    work = {"copy": Work(bytes=2.0 * size * elements)}
    for name in (*peers.RECIPES, *peers.VARIANTS):
        recipe = fp8.recipe(name)
        for backend in peers.supported_backends(bench, name):
            # A variant has the rows of another recipe.
            for which, writes in (("row", 1), ("both", 2))[name in peers.VARIANTS :]:
                key = f"{name} {which} {backend}"
                candidates[key] = partial(_cast, bench, m, k, recipe, backend, which)
                work[key] = Work(bytes=float(size + writes) * elements)
            if name == "blockwise_1d" and backend == "triton":
                # The other tile of 1x128 and 128x1, the cast of dy in both, so that a card can show which is faster.
                key = "8 warps, blockwise_1d both triton"
                candidates[key] = partial(_cast_with_8_warps, bench, m, k, recipe)
                work[key] = Work(bytes=float(size + 2) * elements)
    bench.case("cast", f"{m} x {k}", "copy", candidates, work)


def _copy(bench: Bench, m: int, k: int) -> Call:
    inputs = Rotation(lambda: bench.randn(m, k))
    out = torch.empty(m, k, device=bench.device, dtype=bench.dtype)
    return lambda: out.copy_(inputs())


def _cast(bench: Bench, m: int, k: int, recipe: Recipe, backend: str, which: str) -> Call:
    chosen = kernels.get(backend)
    assert recipe.fwd is not None and recipe.wgrad is not None
    row, col = recipe.fwd.a, recipe.wgrad.b
    inputs = Rotation(lambda: bench.randn(m, k))
    if which == "row":
        return lambda: chosen.quantize(inputs(), row, 1)
    return lambda: chosen.quantize_both(inputs(), row, col)


def _cast_with_8_warps(bench: Bench, m: int, k: int, recipe: Recipe) -> Call:
    assert recipe.fwd is not None and recipe.wgrad is not None
    row, col = recipe.fwd.a, recipe.wgrad.b
    inputs = Rotation(lambda: bench.randn(m, k))
    return lambda: kernels.quantize_both_by_warps(inputs(), row, col, 8)


def _run_fused(bench: Bench, m: int, k: int) -> None:
    """Measure RMSNorm and SwiGLU fused with their casts, compared with torch's function followed by the cast."""
    recipe = fp8.recipe("blockwise")
    assert recipe.fwd is not None and recipe.wgrad is not None and recipe.dgrad is not None
    row, col, dy_row, dy_col = recipe.fwd.a, recipe.wgrad.b, recipe.dgrad.a, recipe.wgrad.a
    chosen = {op: _select_backend(bench, op, recipe) for op in ("rmsnorm", "swiglu", "swiglu_backward", "quantize")}
    weight = torch.ones(k, device=bench.device, dtype=bench.dtype)
    x, gate, up, dh = (Rotation(lambda: bench.randn(m, k)) for _ in range(4))
    caster = chosen["quantize"]

    def norm_separate() -> object:
        y = torch.nn.functional.rms_norm(x(), (k,), weight, 1e-6)
        return caster.quantize_both(y, row, col)

    def gate_separate() -> object:
        return caster.quantize_both(torch.nn.functional.silu(gate()) * up(), row, col)

    def gate_back_separate() -> object:
        g, u, d = gate(), up(), dh()
        s = torch.sigmoid(g)
        du = d * g * s
        dg = d * u * s * (1 + g * (1 - s))
        return caster.quantize_both(dg, dy_row, dy_col), caster.quantize_both(du, dy_row, dy_col)

    pairs = {
        "rmsnorm": (norm_separate, lambda: chosen["rmsnorm"].rmsnorm_quantize(x(), weight, 1e-6, row, col), 2 + 2 + 2),
        "swiglu": (gate_separate, lambda: chosen["swiglu"].swiglu_quantize(gate(), up(), row, col), 4 + 2 + 2),
        "swiglu backward": (
            gate_back_separate,
            lambda: chosen["swiglu_backward"].swiglu_backward_quantize(dh(), gate(), up(), dy_row, dy_col),
            6 + 4,
        ),
    }
    for name, (separate, fused, moved) in pairs.items():
        op = name.replace(" ", "_")
        candidates = {"separate": lambda call=separate: call, f"fused {chosen[op].name}": lambda call=fused: call}
        # No bytes: the ratio is of times, because the fused kernel moves fewer bytes by design.
        work = {"separate": Work(), f"fused {chosen[op].name}": Work()}
        bench.case("cast", f"{name} {m} x {k} ({moved} B an element fused)", "separate", candidates, work)


def _select_backend(bench: Bench, op: str, recipe: Recipe) -> kernels.Backend:
    what = recipe.fwd.a if op == "quantize" and recipe.fwd is not None else recipe
    return kernels.select(op, recipe_or_spec=what, device=bench.device).backend
