"""Batch-invariant kernels in Triton's interpreter: correct, and every row independent of the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from octavo import fp8
from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.invariance import KERNELS, devices, row_mm
from octavo.fp8.invariance.attention import Visibility, _forward, attention
from octavo.fp8.kernels.groups import group_rows
from octavo.fp8.kernels.registry import get
from octavo.fp8.kernels.triton_kernels import gemm, row_attention, row_products, row_sums, rows, tiles
from octavo.fp8.kernels.triton_kernels.launch import INTERPRETED, launches
from octavo.fp8.kernels.triton_kernels.tiles import Gpu

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu holds the compiled kernels to the same")

SOME = ([17], [40, 127, 0, 17, 3])
_LONG = [pytest.param(dtype, marks=pytest.mark.long) for dtype in (torch.float32, torch.float16)]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, *_LONG], ids=str)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: Tensor, want: Tensor, terms: int = 1) -> None:
    """Compare within one rounding of the result and of fp32 sums."""
    eps = torch.finfo(got.dtype).eps
    allowed = eps * want.abs() + 2**-22 * terms * want.abs().max()
    assert got.shape == want.shape and bool(((got.double() - want).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, *_LONG[1:]], ids=str)
@pytest.mark.parametrize("laid", [True, False], ids=["rows of w", "columns of w"])
def test_products(dtype: torch.dtype, laid: bool, exact_products: None) -> None:
    """130 columns and 100 steps: edges on every side."""
    x, w, bias = random(128, 100, dtype=dtype), random(130, 100, seed=1, dtype=dtype), random(130, seed=2, dtype=dtype)
    b = w.t() if laid else w.t().contiguous()
    y = row_products.product(x, b, bias, 0.5, 2.0, dtype)
    assert_near(y, 2 * x.double() @ w.double().t() + 0.5 * bias.double(), 100)
    for some in SOME:
        assert torch.equal(row_products.product(x[some], b, bias, 0.5, 2.0, dtype), y[some])
    wide = row_products.product(x[:, ::2][:5], b[::2], None, 1.0, 1.0, torch.float32)
    assert_near(wide, x[:5, ::2].double() @ b[::2].double(), 100)


@DTYPES
def test_expert_products(dtype: torch.dtype, exact_products: None) -> None:
    """One expert has no rows, one has more than a tile; the last rows belong to no expert."""
    x, w, ends = random(128, 40, dtype=dtype), random(4, 70, 40, seed=1, dtype=dtype).mT, torch.tensor([1, 1, 90, 100])
    y = row_products.grouped_product(x, w, ends)
    for expert, original in ((0, slice(0, 1)), (2, slice(1, 90)), (3, slice(90, 100))):
        assert torch.equal(y[original], row_products.product(x[original], w[expert], None, 1.0, 1.0, dtype))
    assert not y[100:].any()
    none = row_products.grouped_product(x[:5], w, torch.zeros(4, dtype=torch.int32))
    assert not none.any()


CASES = {
    "all keys": {},
    "window": {"positions": torch.arange(70).expand(2, 70), "window": 9},
    "some see nothing": {"positions": torch.arange(70).expand(2, 70) - 3},
    "mask": {
        "mask": torch.ones(1, 1, 70, 70, dtype=torch.bool).tril(),
        "own": torch.arange(70) < torch.tensor([[70], [37]]),
    },
    "added": {"mask": random(2, 4, 70, 70, seed=4)},
}


@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_attention_matches_reference(case: str, dtype: torch.dtype) -> None:
    q, k, v = (random(2, h, 70, n, seed=n, dtype=dtype) for h, n in ((4, 24), (2, 24), (2, 40)))
    recorded = Visibility(*(CASES[case].get(name) for name in Visibility._fields))
    got, lse = row_attention.attend(q, k, v, *recorded, 0.3)
    want, other = _forward(q, k, v, recorded, 0.3)
    other = other.view(2, 4, -1)[:, :, :70]
    assert torch.equal(lse.isinf(), other.isinf())
    assert bool(((lse - other).nan_to_num().abs() <= 1e-5).all())
    bound = torch.finfo(dtype).eps * want.float().abs() + 2**-14
    assert got.dtype == dtype and bool(((got.float() - want.float()).abs() <= bound).all())


@DTYPES
def test_query_result_is_batch_invariant(dtype: torch.dtype, exact_products: None) -> None:
    """Whole sequences by positions and by masks, one query over its own keys, in a batch over longer ones."""
    q, k, v = (random(2, h, 128, 24, seed=seed, dtype=dtype) for seed, h in enumerate((3, 1, 1)))
    full = row_attention.attend(q, k, v, None, torch.arange(128).expand(2, 128), None, None, 0.2)
    mask, original = torch.ones(1, 1, 128, 128, dtype=torch.bool).tril(), torch.ones(2, 128, dtype=torch.bool)
    assert all(map(torch.equal, row_attention.attend(q, k, v, mask, None, original, None, 0.2), full))
    added = torch.zeros(2, 1, 128, 128).masked_fill(~mask, -torch.inf)
    assert all(map(torch.equal, row_attention.attend(q, k, v, added, None, None, None, 0.2), full))
    for t in (31, 127):
        one, keys, values = q[1:, :, t : t + 1], k[1:, :, : t + 1], v[1:, :, : t + 1]
        alone = row_attention.attend(one, keys, values, None, torch.tensor([[t]]), None, None, 0.2)
        assert all(torch.equal(a[0, :, 0], b[1, :, t]) for a, b in zip(alone, full, strict=True))
        among = row_attention.attend(q[:, :, t : t + 1], k, v, None, torch.tensor([[3], [t]]), None, None, 0.2)
        assert all(torch.equal(a[1, :, 0], b[1, :, t]) for a, b in zip(among, full, strict=True))


@pytest.mark.parametrize("length", [1, 130, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sums(length: int, dtype: torch.dtype) -> None:
    x = random(128 if length < 5000 else 20, length, dtype=dtype)
    got = row_sums.sums(x)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(got.double(), x.double().sum(1), atol=1e-4 if dtype != torch.float64 else 1e-10)
    other = torch.empty(x.numel() + 1, dtype=dtype)[1:].view_as(x).copy_(x)  # its address no multiple of 16
    for some in ([17], [4, 17, 0, 19, 3]):
        assert torch.equal(row_sums.sums(x[some]), got[some]) and torch.equal(row_sums.sums(other)[some], got[some])


@pytest.mark.parametrize(
    "title", ["blockwise", *(pytest.param(title, marks=pytest.mark.long) for title in ("rowwise", "mxfp8"))]
)
def test_fp8_products_use_one_tile(title: str, row_kernels: None) -> None:
    """However many rows there are, of linear layers and of experts; and the bits of other tiles."""
    casts, triton = recipe(title).fwd, get("triton")
    assert casts is not None
    x, w = random(128, 140), triton.quantize(random(40, 140, seed=1), casts.b, 1)
    with launches() as recorded:
        y = rows.fp8_product(triton.quantize(x, casts.a, 1), w, torch.float32)
        for some in SOME[1:]:
            assert torch.equal(rows.fp8_product(triton.quantize(x[some], casts.a, 1), w, torch.float32), y[some])
    assert not recorded["decode_kernel"]
    assert torch.equal(gemm.gemm(triton.quantize(x, casts.a, 1), 1, w, 1, torch.float32, gpu=Gpu(0, 200)), y)
    experts = triton.quantize_experts(random(2, 40, 140, seed=2), casts.b)
    groups, _, row_of = group_rows(torch.arange(128) % 2, 2)
    inputs = torch.zeros(groups.rows, 140).index_copy_(0, row_of, x)
    every = rows.fp8_grouped_product(triton.quantize_rows(inputs, casts.a, groups), experts, groups, torch.float32)
    fewer, _, place = group_rows(torch.tensor([1]), 2)
    inputs = torch.zeros(fewer.rows, 140).index_copy_(0, place, x[17:18])
    one = rows.fp8_grouped_product(triton.quantize_rows(inputs, casts.a, fewer), experts, fewer, torch.float32)
    assert torch.equal(one[place], every[row_of[17:18]])


def test_tiles_depend_only_on_casts_and_device() -> None:
    for gpu in (Gpu(89, 142), Gpu(90, 132), Gpu(100, 148), Gpu(120, 170)):
        for title in ("rowwise", "blockwise", "mxfp8"):
            casts = recipe(title).fwd
            assert casts is not None
            form = tiles.form(tiles.scale_block(casts.a, 1), tiles.scale_block(casts.b, 1), fast=True, gpu=gpu)
            assert tiles.invariant_tile(form, gpu) in [tile for tile, _ in tiles.candidates(form, gpu)]
            assert tiles.invariant_tile(form, gpu, 128).m <= 128


def test_casts_across_rows_are_rejected(row_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size is tried once."""
    monkeypatch.setattr(devices, "_proven", set())
    x, w = random(3, 24), random(40, 24, seed=1)
    with launches() as recorded:
        row_mm(x, w.t())
        tried = recorded["product_kernel"]
        row_mm(x[:1], w.t())
    assert (tried, recorded["product_kernel"]) == (6, 7)
    devices._proven.clear()
    original = row_products.product
    monkeypatch.setattr(row_products, "product", lambda a, *more: original(a, *more) * (1 + 1e-3 * len(a)))
    with pytest.raises(fp8.InvarianceError, match=r"a product with \[24, 40\] in torch\.float32 was tried.*row 65 of"):
        row_mm(x, w.t())
    sums, attend = row_sums.sums, row_attention.attend
    monkeypatch.setattr(row_sums, "sums", lambda x: sums(x) + torch.arange(len(x)))
    with pytest.raises(fp8.InvarianceError, match="the sum of a row of 24"):
        KERNELS["cpu"]().sums(x)
    monkeypatch.setattr(row_attention, "attend", lambda q, *more: (attend(q, *more)[0] + q.shape[2], None))
    with pytest.raises(fp8.InvarianceError, match="attention of 1 heads of 24 and 24"):
        attention(*[random(1, 1, 3, 24)] * 3)
    multiply = gemm.gemm
    monkeypatch.setattr(gemm, "gemm", lambda a, *more, **words: multiply(a, *more, **words) * a.data.shape[0])
    casts, triton = recipe("rowwise").fwd, get("triton")
    assert casts is not None
    with pytest.raises(fp8.InvarianceError, match="an FP8 product of"):
        rows.fp8_product(triton.quantize(x, casts.a, 1), triton.quantize(w, casts.b, 1), torch.float32)


def test_float64_and_mixed_dtypes_are_rejected(row_kernels: None) -> None:
    with pytest.raises(fp8.InvarianceError, match="float64, float64 was found on cpu.*TF32"):
        row_mm(random(2, 3).double(), random(3, 4).double())
    with pytest.raises(fp8.InvarianceError, match="float32, bfloat16"):
        row_mm(random(2, 3), random(3, 4).bfloat16())
