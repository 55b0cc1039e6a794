"""Triton's compiled GEMMs, dense and grouped, on a GPU, against float64 on the same codes, for both ways of loading."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import Quantized
from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.kernels import reference_grouped
from octavo.fp8.kernels.groups import TILE, Groups, expert_spans, group_rows, select_expert
from octavo.fp8.kernels.triton_kernels import grouped, tiles
from octavo.fp8.kernels.triton_kernels.gemm import gemm
from octavo.fp8.kernels.triton_kernels.tiles import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DIMS = {"fwd": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}
TITLES = ("tensorwise", "tensorwise e4m3", "rowwise", "blockwise", "blockwise hybrid", "mxfp8")
SHAPES = (  # (M, N, K)
    (4096, 4096, 4096),
    (4096, 1280, 3420),
    (1176, 4304, 1152),
    (300, 3420, 1280),
    (129, 1176, 1280),
    (17, 1024, 4096),
    (1, 80, 144),
    (127, 7, 129),
)
FASTER = {"fast": 1e-4, "exact": 1e-5}  # NUMERICS, GEMM


def spread(rows: int, cols: int, seed: int) -> Tensor:
    """Values whose magnitudes change by row and by column, so that a scale in the wrong place shows."""
    g = torch.Generator().manual_seed(seed)
    down, across = (torch.randint(-4, 5, size, generator=g).float() for size in ((rows, 1), (1, cols)))
    return torch.randn(rows, cols, generator=g) * torch.exp2(down + across)


def in_float64(q: Quantized) -> Tensor:
    values, scale = q.data.float().double(), cast.scale_fp32(q).double()
    for dim, (side, size) in enumerate(zip(q.spec.block, values.shape, strict=True)):
        scale = scale.repeat_interleave(size if side == -1 else side, dim).narrow(dim, 0, size)
    return values * scale


def judge(got: Tensor, a_q: Quantized, a_dim: int, b_q: Quantized, b_dim: int, fast: bool) -> None:
    """Over all by calc_diff; each element within what tensor cores that keep 14 bits may drop of |a| |b|."""
    a, b = in_float64(a_q), in_float64(b_q)
    a, b = (a if a_dim == 1 else a.t()), (b.t() if b_dim == 1 else b)
    want, most, got = a @ b, a.abs() @ b.abs(), got.double()
    assert bool(((got - want).abs() <= most * 2.0 ** (-7 if fast else -9)).all())
    diff = 1 - 2 * (got * want).sum() / (got.square().sum() + want.square().sum())
    assert diff.item() < FASTER["fast" if fast else "exact"]


def loads() -> Iterator[Gpu]:
    """The device as it is, and as one without descriptors (the form of Ada)."""
    original = tiles.gpu_of(torch.device("cuda"))
    yield original
    if original.sm >= 90:
        yield Gpu(89, original.processors)


def operands(title: str, which: str, m: int, n: int, k: int) -> tuple[Quantized, Quantized]:
    casts = recipe(*title.split()).gemm(which)
    sides = {"fwd": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[which]
    specs = (casts.a, casts.b)
    a, b = (
        cast.quantize(spread(*side, seed).cuda(), s) for seed, (side, s) in enumerate(zip(sides, specs, strict=True))
    )
    return a, b


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("which", DIMS)
@pytest.mark.parametrize("title", TITLES)
def test_every_recipe_on_every_shape(title: str, which: str, shape: tuple[int, int, int]) -> None:
    a, b = operands(title, which, *shape)
    fast = which == "fwd" and title.split()[0] in ("tensorwise", "rowwise")
    for gpu in list(loads())[: 2 if shape in SHAPES[2:4] else 1]:  # each additional form takes a second to compile
        got = gemm(a, DIMS[which][0], b, DIMS[which][1], torch.float32, gpu=gpu)
        judge(got, a, DIMS[which][0], b, DIMS[which][1], fast)


@pytest.mark.parametrize("title", ["rowwise", "blockwise", "mxfp8"])
def test_every_tile(title: str) -> None:
    """Each tile that the host may choose, on one product with ragged edges."""
    for which in DIMS:
        a, b = operands(title, which, 600, 700, 500)
        for gpu in loads():
            grains = [tiles.scale_block(q.spec, d) for q, d in zip((a, b), DIMS[which], strict=True)]
            form = tiles.form(*grains, fast=which == "fwd", gpu=gpu)
            for tile, _ in tiles.candidates(form, gpu):
                got = gemm(a, DIMS[which][0], b, DIMS[which][1], torch.float32, gpu=gpu, tile=tile)
                judge(got, a, DIMS[which][0], b, DIMS[which][1], fast=which == "fwd")


@pytest.mark.parametrize("title", TITLES)
def test_bad_values_bias_and_rounding(title: str) -> None:
    casts = recipe(*title.split()).fwd
    x, w, bias = torch.randn(200, 500).cuda(), torch.randn(300, 500).cuda(), torch.randn(300).bfloat16().cuda()
    w_q = cast.quantize(w, casts.b)
    for gpu in loads():
        x_q = cast.quantize(x, casts.a)
        plain = gemm(x_q, 1, w_q, 1, torch.float32, gpu=gpu)
        for dtype in (torch.bfloat16, torch.float16):
            want = (plain + bias.float()).to(dtype)
            assert torch.equal(gemm(x_q, 1, w_q, 1, dtype, bias, gpu=gpu), want)
        bad = x.clone()
        bad[3, 450] = float("inf")
        got = gemm(cast.quantize(bad, casts.a), 1, w_q, 1, torch.float32, gpu=gpu).isnan()
        rows = torch.ones(200, dtype=torch.bool) if "tensorwise" in title else torch.arange(200) == 3
        assert torch.equal(got.cpu(), rows[:, None].expand(200, 300))


def test_replays_in_graph_without_synchronization() -> None:
    """Nothing in a call waits for the device, and a captured call gives the bits of a plain one."""
    a, b = operands("blockwise", "wgrad", 512, 384, 256)
    want = gemm(a, 0, b, 0, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert gemm(a, 0, b, 0, torch.bfloat16).shape == want.shape
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gemm(a, 0, b, 0, torch.bfloat16)
    got.zero_()
    graph.replay()
    assert torch.equal(got, want)


def routed(*sizes: int) -> Groups:
    chosen = torch.cat([torch.full((n,), e) for e, n in enumerate((*sizes, 200))])  # the last rows belong to no expert
    return group_rows(chosen, len(sizes)).groups


def on_gpu(q: Quantized) -> Quantized:
    return Quantized(q.data.cuda(), q.scale.cuda(), q.spec)


@pytest.mark.parametrize("which", DIMS)
@pytest.mark.parametrize("title", TITLES)
def test_grouped(title: str, which: str) -> None:
    """Uneven and empty groups; each expert judged alone, tiles of nobody zero, no waiting."""
    groups = routed(700, 0, 1, 300, 128, 0)
    target = Groups(*(t.cuda() for t in groups[:3]), groups.rows)
    casts, n, k = recipe(*title.split()).gemm(which), 720, 1176
    w = torch.stack([spread(n, k, 10 + e) for e in range(groups.experts)])
    x, dy = spread(groups.rows, k, 1), spread(groups.rows, n, 2)
    a_q = reference_grouped.quantize_rows(x if which == "fwd" else dy, casts.a, groups)
    if which == "wgrad":
        b_q = reference_grouped.quantize_rows(x, casts.b, groups)
    else:
        b_q = reference_grouped.quantize_experts(w, casts.b)
    a, b = on_gpu(a_q), on_gpu(b_q)
    fast = which == "fwd" and title.split()[0] in ("tensorwise", "rowwise")
    for gpu in loads():
        getattr(grouped, which)(a, b, target, torch.float32, gpu=gpu)  # compile
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = getattr(grouped, which)(a, b, target, torch.float32, gpu=gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert got.isfinite().all()
        for e, span in expert_spans(groups):
            original = select_expert(a, e, span)
            if which == "wgrad":
                judge(got[e], original, 0, select_expert(b, e, span), 0, fast)
            else:
                judge(got[span], original, 1, Quantized(b.data[e], b.scale[e], b.spec), DIMS[which][1], fast)
        if which == "wgrad":
            assert not got[1].any() and not got[5].any()
        else:
            assert not got[target.tiles.repeat_interleave(TILE) < 0].any()
