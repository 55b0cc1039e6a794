"""Gluon's GEMM on a Hopper: its check, and then shapes of models, dense and grouped, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo.fp8.arithmetic.cast import Quantized
from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.kernels import reference_grouped, registry
from octavo.fp8.kernels import torch_backend as tb
from octavo.fp8.kernels.groups import Groups, of_expert, spans
from octavo.fp8.kernels.triton_kernels import gluon_check, gluon_gemm
from tests.gpu.test_gemms import DIMS, judge, on_gpu, operands, routed, spread

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")]

TITLES = ("blockwise", "tensorwise", "rowwise", "blockwise hybrid")
SHAPES = ((4096, 4096, 4096), (8192, 1024, 4096), (1176, 4304, 1152), (300, 3420, 1280), (17, 1280, 520), (1, 80, 144))


@pytest.mark.parametrize("which", [*DIMS, *(f"grouped_{which}" for which in DIMS)])
@pytest.mark.parametrize("title", TITLES)
def test_its_own_check_passes(title: str, which: str) -> None:
    casts = recipe(*title.split()).gemm(which.removeprefix("grouped_"))
    assert gluon_check.deviation(which, casts.a, casts.b, torch.device("cuda")) < 1


@pytest.mark.parametrize("which", DIMS)
@pytest.mark.parametrize("title", TITLES)
def test_shapes_of_models(title: str, which: str) -> None:
    """Many tiles for each program, and fewer tiles than programs; twice, since a race would not repeat its result."""
    fast = which == "fwd" and title.split()[0] in ("tensorwise", "rowwise")
    for shape in SHAPES:
        a, b = operands(title, which, *shape)
        got = gluon_gemm.gemm(a, DIMS[which][0], b, DIMS[which][1], torch.float32)
        judge(got, a, DIMS[which][0], b, DIMS[which][1], fast)
        for _ in range(20):
            assert torch.equal(gluon_gemm.gemm(a, DIMS[which][0], b, DIMS[which][1], torch.float32), got)


@pytest.mark.parametrize("which", DIMS)
@pytest.mark.parametrize("title", TITLES)
def test_grouped(title: str, which: str) -> None:
    """Uneven and empty groups; each expert judged alone, tiles of nobody zero."""
    groups, n, k = routed(700, 0, 1, 300, 128, 0), 768, 1176
    there = Groups(groups.sizes.cuda(), groups.starts.cuda(), groups.tiles.cuda(), groups.rows)
    casts = recipe(*title.split()).gemm(which)
    x, dy = spread(groups.rows, k, 1), spread(groups.rows, n, 2)
    a = on_gpu(reference_grouped.quantize_rows(x if which == "fwd" else dy, casts.a, groups))
    fast = which == "fwd" and title.split()[0] in ("tensorwise", "rowwise")
    if which == "wgrad":
        b = on_gpu(reference_grouped.quantize_rows(x, casts.b, groups))
        got = gluon_gemm.grouped_wgrad(a, b, there, torch.float32)
        assert not got[1].any() and not got[5].any()
    else:
        w = torch.stack([spread(n, k, 10 + e) for e in range(groups.experts)])
        b = on_gpu(reference_grouped.quantize_experts(w, casts.b))
        got = gluon_gemm.grouped_rows(a, b, DIMS[which][1], there, torch.float32)
        assert got.isfinite().all() and not got[there.tiles.repeat_interleave(128) < 0].any()
    for e, span in spans(groups):
        own = of_expert(a, e, span)
        if which == "wgrad":
            judge(got[e], own, 0, of_expert(b, e, span), 0, fast)
        else:
            judge(got[span], own, 1, Quantized(b.data[e], b.scale[e], b.spec), DIMS[which][1], fast)


def test_it_serves_by_name_and_says_what_it_takes_part_in() -> None:
    for title in ("blockwise", "tensorwise", "rowwise"):
        for which in DIMS:
            assert registry.get("gluon").supports(which, recipe(title), torch.device("cuda"), None) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whether_cublas_adds_a_bias_to_a_product_of_blocks(dtype: torch.dtype) -> None:
    """Either answer is served; which one it is, is read here."""
    why_not = tb.bias_why_not(torch.device("cuda"), dtype)
    if why_not is not None:
        pytest.skip(f"it does not, and Triton serves: {why_not}")
