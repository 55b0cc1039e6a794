"""Triton's compiled products with few rows on a GPU: against float64, independent rows, reproducible."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.kernels.triton_kernels import tiles
from octavo.fp8.kernels.triton_kernels.decode import decode
from tests.gpu.test_gemms import judge, loads, operands, spread

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

TITLES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
SHAPES = ((4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288), (3420, 1280), (7, 129))  # (N, K)


@pytest.mark.parametrize("rows", [1, 8, 33, 64])
@pytest.mark.parametrize("title", TITLES)
def test_every_recipe_on_every_shape(title: str, rows: int) -> None:
    for n, k in SHAPES:
        x, w = operands(title, "fwd", rows, n, k)
        for gpu in list(loads())[: 2 if k == 1280 else 1]:  # each additional form takes a second to compile
            judge(decode(x, w, torch.float32, gpu=gpu), x, 1, w, 1, fast=True)


@pytest.mark.parametrize("title", TITLES[1:])
def test_rows_are_independent(title: str) -> None:
    """Alone, among 5 and among 64 rows, at every position: the same bits, twenty times."""
    casts = recipe(title).fwd
    for n, k in SHAPES[1:4]:
        x, w = spread(tiles.FEW, k, 1).cuda(), cast.quantize(spread(n, k, 2).cuda(), casts.b)

        def rows(given: torch.Tensor, w: cast.Quantized = w) -> torch.Tensor:
            return decode(cast.quantize(given, casts.a), w, torch.bfloat16)

        among = rows(x)
        for turn in range(20):
            assert torch.equal(rows(x.roll(turn, 0)).roll(-turn, 0), among)
            assert torch.equal(rows(x[turn : turn + 1])[0], among[turn])
            assert torch.equal(rows(x[turn : turn + 5]), among[turn : turn + 5])


@pytest.mark.parametrize("title", TITLES)
def test_bias_and_rounding_in_one_part_and_in_several(title: str) -> None:
    for n in (1024, 40000):
        x, w = operands(title, "fwd", 9, n, 2048)
        bias = torch.randn(n).bfloat16().cuda()
        want = (decode(x, w, torch.float32) + bias.float()).bfloat16()
        assert torch.equal(decode(x, w, torch.bfloat16, bias), want)


def test_replays_in_graph_without_synchronization() -> None:
    """Nothing in a call waits for the device; a captured call, both kernels of it, gives the bits of a plain one."""
    x, w = operands("blockwise", "fwd", 8, 1024, 4096)
    want = decode(x, w, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert decode(x, w, torch.bfloat16).shape == want.shape
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode(x, w, torch.bfloat16)
    got.zero_()
    graph.replay()
    assert torch.equal(got, want)
