"""Products with few rows in Triton's interpreter: correct, with a fixed order of sums, and independent rows."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from octavo import fp8
from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.kernels.registry import get
from octavo.fp8.kernels.triton_kernels import decode as module
from octavo.fp8.kernels.triton_kernels import tiles
from octavo.fp8.kernels.triton_kernels.decode import decode
from octavo.fp8.kernels.triton_kernels.gemm import gemm
from octavo.fp8.kernels.triton_kernels.launch import INTERPRETED, launches
from octavo.fp8.kernels.triton_kernels.tiles import FEW, Gpu
from tests.fp8.kernels.forms.decode import SHAPES, variants
from tests.fp8.kernels.forms.gemm import GPUS
from tests.fp8.kernels.forms.gemm import operands as meta_operands
from tests.fp8.kernels.test_triton_gemm import SHARED, check, operands, spread

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu holds the compiled kernels to the same")

TITLES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
BY_ROWS = TITLES[1:]  # casts of x that look at one row
WHOLE, CUT = Gpu(0, 1), Gpu(90, 4)  # one program for all of a contraction, by pointers; two, by descriptors
N, K = 70, 1100  # two tiles of columns and nine steps, the last of both with an edge


def parts_of(gpu: Gpu, n: int = N, k: int = K) -> int:
    form = tiles.form(*[tiles.scale_block(CastSpec(), 1)] * 2, fast=True, gpu=gpu)
    return math.ceil(k / tiles.contraction_per_program(n, k, tiles.decode(form, gpu), gpu))


@pytest.mark.parametrize(("rows", "gpu"), [(1, CUT), (FEW, WHOLE)], ids=["one row, cut", "all rows, whole"])
@pytest.mark.parametrize("title", TITLES)
def test_every_recipe(title: str, rows: int, gpu: Gpu) -> None:
    x, w = operands(title, "fwd", rows, N, K)
    with launches() as recorded:
        got = decode(x, w, torch.float32, gpu=gpu)
    assert parts_of(CUT) == 2 and (recorded["decode_kernel"], recorded["join_kernel"]) == (1, int(gpu is CUT))
    check(got, x, 1, w, 1)


@pytest.mark.parametrize("title", BY_ROWS)
def test_rows_are_independent(title: str, exact_products: None) -> None:
    """Alone, among 5 and among 64, at other places, through the backend's own casts: the same bits."""
    casts = recipe(title).fwd
    assert casts is not None
    triton, cut = get("triton"), Gpu(90, 2)
    assert parts_of(cut, 40, 1030) == 2
    x, w_q = spread(FEW, 1030, seed=1), triton.quantize(spread(40, 1030, seed=2), casts.b, 1)

    def rows(given: Tensor) -> Tensor:
        return decode(triton.quantize(given, casts.a, 1), w_q, torch.float32, gpu=cut)

    among = rows(x)
    assert torch.equal(rows(x[17:18])[0], among[17])
    assert torch.equal(rows(x[[40, 63, 0, 17, 3]]), among[[40, 63, 0, 17, 3]])


@pytest.mark.parametrize("title", TITLES)
def test_single_part_sums_like_gemm(title: str, exact_products: None) -> None:
    """Where the contraction is not cut, a rollout's product has the bits of training's, whatever the tiles of both."""
    x, w = operands(title, "fwd", 5, 40, 600)
    assert torch.equal(decode(x, w, torch.float32, gpu=WHOLE), gemm(x, 1, w, 1, torch.float32, gpu=WHOLE))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)], ids=str)
def test_parts_are_added_in_order(order: tuple[int, ...]) -> None:
    """2^24 + 1 + 1 is 2^24 in fp32, one after the other; 1 + 1 + 2^24 is more. Sums of a part are exact here."""
    spec = CastSpec("e4m3", (1, -1), "pow2")
    stretches = torch.zeros(3, 512)
    stretches[0, :256], stretches[1:, 0] = 256.0, 1.0
    codes = stretches[list(order)].view(1, -1)
    assert parts_of(Gpu(0, 3), 8, 1536) == 3
    x, w = (Quantized(codes.expand(n, -1).to(spec.fmt.dtype), torch.ones(n, 1), spec) for n in (2, 8))
    expected = torch.zeros(())
    for part in stretches[list(order)]:
        expected = expected + part.square().sum()
    assert expected == 2**24 + 2 * (order[-1] == 0)
    assert torch.equal(decode(x, w, torch.float32, gpu=Gpu(0, 3)), expected.expand(2, 8))


@pytest.mark.parametrize("gpu", [WHOLE, CUT], ids=["whole", "cut"])
def test_scales_then_bias_then_one_rounding(gpu: Gpu) -> None:
    """fp32 scales round: the sum first, x's, then w's, the bias, bit for bit. Sums of small numbers are exact."""
    g = torch.Generator().manual_seed(0)
    for block in ((-1, -1), (1, -1)):
        spec = CastSpec("e4m3", block, "fp32")
        x, w = (cast.quantize(torch.randn(n, 1024, generator=g), spec) for n in (3, N))
        codes = [torch.randint(-8, 9, q.data.shape, generator=g).float() for q in (x, w)]
        x, w = (q._replace(data=c.to(q.data.dtype)) for q, c in zip((x, w), codes, strict=True))
        plain = codes[0] @ codes[1].T * x.scale.view(-1, 1) * w.scale.view(1, -1)
        bias = torch.randn(N, 2, generator=g).bfloat16()[:, 0]
        assert torch.equal(decode(x, w, torch.float32, gpu=gpu), plain)
        assert torch.equal(decode(x, w, torch.bfloat16, bias, gpu=gpu), (plain + bias.float()).bfloat16())


def test_extreme_scales_and_bad_values() -> None:
    """A sum that leaves fp32 under one scale alone stays; NaN reaches its row and no other, in parts as well."""
    for title in BY_ROWS[:2]:
        casts = recipe(title).fwd
        assert casts is not None
        inputs = spread(3, 1024, 1, reach=1).abs() * 1e36
        inputs[1, 600] = math.nan
        x, w = cast.quantize(inputs, casts.a), cast.quantize(spread(20, 1024, 2, reach=1).abs() * 1e-30, casts.b)
        got = decode(x, w, torch.float32, gpu=CUT)
        assert torch.equal(got.isnan().all(1), torch.tensor([False, True, False])) and got[[0, 2]].isfinite().all()


def test_empty_sides() -> None:
    for block in ((1, -1), (1, 128)):
        spec = CastSpec("e4m3", block)
        for m, n, k in ((0, 5, 600), (3, 0, 600), (3, 5, 0)):
            x, w = (cast.quantize(torch.randn(rows, k), spec) for rows in (m, n))
            bias = torch.randn(n)
            for gpu in (WHOLE, CUT):
                assert torch.equal(decode(x, w, torch.float32, bias, gpu=gpu), bias.expand(m, n))


def test_more_rows_are_tiled_and_operands_must_fit() -> None:
    casts = recipe("rowwise").fwd
    assert casts is not None
    x, w = cast.quantize(torch.randn(FEW + 1, 40), casts.a), cast.quantize(torch.randn(24, 40), casts.b)
    with launches() as recorded:
        check(get("triton").gemm_decode(x, w, torch.float32), x, 1, w, 1)
    assert (recorded["decode_kernel"], recorded["gemm_kernel"]) == (0, 1)
    with pytest.raises(CastError, match=r"gemm_decode: the operands are \[65, 40\] and \[24, 32\]"):
        decode(x, cast.quantize(torch.randn(24, 32), casts.b), torch.float32)


class Block(nn.Module):
    """A gated MLP behind a linear layer, as models write them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 32)
        self.mlp = Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.q_proj(x))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("fuse", ["off", "on"])
def test_layers_use_it_without_gradients(fuse: str) -> None:
    """All four products of a block, counted as the FP8 GEMMs that they are; training multiplies as ever."""
    torch.manual_seed(0)
    model = Block()
    fp8.apply(model, fp8.plan(model, fp8.Policy(recipe="rowwise", backend="triton", fuse=fuse)))
    x = torch.randn(2, 3, 32)
    results: dict[str, Any] = {}
    for grad in (False, True):
        with torch.set_grad_enabled(grad), fp8.count_gemms() as counts, launches() as recorded:
            results[f"y {grad}"] = model(x).detach()
        assert (recorded["decode_kernel"], recorded["gemm_kernel"]) == ((0, 4) if grad else (4, 0)), dict(recorded)
        results[f"counts {grad}"] = {key: n for key, n in counts.calls.items() if key[1] == "fwd"}
    assert results["counts False"] == results["counts True"] and len(results["counts True"]) == 4
    assert {backend for _, _, backend in results["counts True"]} == {"triton"}
    torch.testing.assert_close(results["y False"], results["y True"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"sm_{gpu.sm}")
def test_launches(gpu: Gpu) -> None:
    """As on that GPU, on tensors without memory: every multiprocessor reads weights or the rest is too short to cut, no
    weight is read twice, codes are described where they lie; all the same for 1 row and for 64, their number apart."""
    for n, k, _ in SHAPES:
        results = []
        for rows in (1, FEW):
            x, w = meta_operands("blockwise", "fwd", rows, n, k)
            with mock.patch.object(module, "launch") as launch:
                decode(x, w, torch.bfloat16, gpu=gpu)
            (kernel, grid, x_source, w_source, out, *rest), constants = launch.call_args_list[0]
            stretch, tile = rest[6], constants["TILE"]
            assert kernel is module.decode_kernel and rest[3:6] == [rows, n, k]
            assert (grid[0] - 1) * tile.n < n <= grid[0] * tile.n and stretch % 128 == 0
            assert (grid[1] - 1) * stretch < k <= grid[1] * stretch
            assert grid[0] * grid[1] >= gpu.processors or stretch < 2 * 512
            assert out.shape == ((rows, n) if grid[1] == 1 else (grid[1], rows, n))
            if gpu.sm >= 90:
                assert (x_source.shape, w_source.shape) == ([rows, k], [n, k]) and w_source.strides == [k, 1]
                assert x_source.base.untyped_storage().nbytes() == 16 * math.ceil(rows / 16) * k
            results.append((grid, stretch, constants, len(launch.call_args_list)))
        assert results[0] == results[1]


@pytest.mark.parametrize("sm", [89, 90, 100, 120])
def test_two_programs_fit_a_multiprocessor(sm: int) -> None:
    """So that one loads weights while the other starts, ends or adds: operands in flight take half of its memory."""
    results = [v for v in variants() if v.architectures == (sm,) and "ALL" in v.constants]
    assert len(results) >= 8
    for variant in results:
        tile = variant.constants["TILE"]
        assert (tile.m + tile.n) * tile.k * variant.num_stages <= SHARED[sm] // 2 - 1024, variant.name
