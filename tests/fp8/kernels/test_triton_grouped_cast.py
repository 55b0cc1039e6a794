"""Casts of rows and weights of experts in Triton, against the reference cast of each expert."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from octavo.fp8.arithmetic import cast as reference
from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.groups import Groups, group_rows
from octavo.fp8.kernels.triton_kernels import grouped_cast
from octavo.fp8.kernels.triton_kernels.launch import launches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS = ((-1, -1), (1, -1), (-1, 1), (1, 128), (128, 1), (128, 128), (1, 32), (32, 1))


def rows_of(sizes: list[int], cols: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, Groups]:
    """Return rows of experts, whose magnitudes differ by row, column and expert; padding rows are NaN."""
    chosen = torch.cat([torch.full((n,), e) for e, n in enumerate(sizes)] + [torch.tensor([], dtype=torch.int64)])
    groups = group_rows(chosen.long().to(DEVICE), len(sizes)).groups
    gen = torch.Generator().manual_seed(cols + sum(sizes))
    x = torch.randn(groups.rows, cols, generator=gen)
    x *= torch.exp2(torch.randint(-6, 4, (groups.rows, 1), generator=gen).float())
    x *= torch.exp2(torch.randint(-6, 4, (1, cols), generator=gen).float())
    real = torch.zeros(groups.rows, dtype=torch.bool)
    for n, start in zip(sizes, groups.starts.tolist(), strict=False):
        real[start : start + n] = True
    x[~real] = float("nan")
    return x.to(dtype).to(DEVICE), groups


def as_bytes(scale: torch.Tensor) -> torch.Tensor:
    scale = scale.cpu().contiguous()
    return scale.view(torch.uint8 if scale.dtype == torch.float8_e8m0fnu else torch.int32)


def assert_rows(q: Quantized, x: torch.Tensor, spec: CastSpec, groups: Groups) -> None:
    """Expert by expert; scales 1 and codes 0 wherever there is nothing real."""
    r, c = spec.block
    codes, scale = q.data.view(torch.uint8).cpu(), as_bytes(q.scale)
    wide = 1 if c == -1 else layout.ceil_div(x.shape[1], c)
    one = torch.ones(groups.experts if r == -1 else groups.rows // r, wide)
    want_scale = as_bytes(one.to(torch.float8_e8m0fnu) if spec.scale == "e8m0" else one)
    want = torch.zeros(x.shape, dtype=torch.uint8)
    for e, (n, start) in enumerate(zip(groups.sizes.tolist(), groups.starts.tolist(), strict=False)):
        if n:
            alone = reference.quantize(x[start : start + n].cpu(), spec)
            want[start : start + n] = alone.data.view(torch.uint8)
            at = e if r == -1 else start // r
            want_scale[at : at + alone.scale.shape[0]] = as_bytes(alone.scale)
    wrong = (codes != want).nonzero()
    assert not len(wrong), f"{len(wrong)} codes of {spec}; the first at {wrong[0].tolist()}"
    assert scale.shape == want_scale.shape and torch.equal(scale, want_scale), f"scales of {spec}"


@pytest.mark.parametrize("pair", [((1, 128), (128, 1)), ((-1, -1), (-1, -1)), ((1, -1), (-1, 1))], ids=str)
def test_whole_tiles_of_experts_in_both_layouts(pair):
    x, groups = rows_of([128, 0, 12], 128)
    row, col = (CastSpec("e4m3", block, "fp32" if block == (-1, -1) else "pow2") for block in pair)
    for q, spec in zip(grouped_cast.quantize_rows_both(x, row, col, groups), (row, col), strict=True):
        assert_rows(q, x, spec, groups)
    w = x[: 2 * 128].view(2, 128, 128).nan_to_num()
    for (spec, contract), (e, one) in itertools.product(((row, 1), (col, 0)), enumerate(w)):
        q, want = grouped_cast.quantize_experts(w, spec, contract), reference.quantize(one.cpu(), spec)
        assert torch.equal(q.data[e].view(torch.uint8).cpu(), want.data.view(torch.uint8))
        assert torch.equal(q.scale[e].cpu(), want.scale)


@pytest.mark.parametrize("contract", [1, 0])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_rows_of_each_expert_are_cast_separately(block, contract):
    x, groups = rows_of([5, 0, 130], 72)
    kinds = ("pow2", "e8m0") if BLOCKS.index(block) % 2 else ("fp32", "pow2")  # by contraction
    spec = CastSpec("e4m3" if contract else "e5m2", block, kinds[contract])
    q = grouped_cast.quantize_rows(x, spec, groups, contract)
    assert_rows(q, x, spec, groups)
    if block[0] != -1:
        operand = layout.k_major(q, contract)
        assert operand.codes.data_ptr() == q.data.data_ptr() and operand.scale.data_ptr() == q.scale.data_ptr()
        codes = operand.codes.view(torch.uint8).clone()
        codes[: operand.free, : operand.contracted] = 0
        assert not bool(codes.any())


@pytest.mark.parametrize(
    "pair", [((1, 128), (128, 1)), ((1, 32), (32, 1)), ((1, -1), (-1, 1)), ((-1, -1), (-1, -1))], ids=str
)
def test_both_layouts_equal_separate_casts(pair):
    kind = "e8m0" if 32 in pair[0] else "pow2"
    x, groups = rows_of([5, 0, 130], 72)
    row, col = CastSpec("e4m3", pair[0], kind), CastSpec("e5m2", pair[1], kind)
    with launches() as recorded:
        results = grouped_cast.quantize_rows_both(x, row, col, groups)
    assert recorded["cast_kernel"] == 1 and recorded["amax_kernel"] == int(-1 in pair[0]), recorded
    for q, spec in zip(results, (row, col), strict=True):
        assert_rows(q, x, spec, groups)


@settings(max_examples=6, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 140), min_size=1, max_size=3),
    cols=st.integers(1, 140),
    block=st.sampled_from(BLOCKS),
    turned=st.booleans(),
)
def test_random_sizes(sizes, cols, block, turned):
    x, groups = rows_of(sizes, cols)
    x = x.t().contiguous().t() if turned else x
    spec = CastSpec("e4m3", block, "pow2")
    assert_rows(grouped_cast.quantize_rows(x, spec, groups), x, spec, groups)


def test_bad_value_affects_only_block_of_its_expert():
    x, groups = rows_of([3, 4], 40)
    x[int(groups.starts[1]) + 2, 7] = float("inf")
    for block in BLOCKS:
        spec = CastSpec("e4m3", block, "pow2")
        q = grouped_cast.quantize_rows(x, spec, groups, 0)
        assert bool(q.scale.isnan().any()), "the bad block has a scale"
        good = slice(int(groups.starts[0]), int(groups.starts[0]) + 3)
        assert not bool(q.data[good].float().isnan().any()), "the other expert is spoilt"


def weights(experts: int, outputs: int, inputs: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(7)
    w = torch.randn(experts, outputs, inputs, generator=gen)
    w *= torch.exp2(torch.randint(-5, 5, (experts, outputs, 1), generator=gen).float())
    return w.bfloat16().to(DEVICE)


@pytest.mark.parametrize(("block", "contract"), [(b, (i // 2 + i) % 2) for i, b in enumerate(BLOCKS)], ids=str)
def test_weights_of_each_expert_are_cast_separately(block, contract):
    """Whole ones, transposed ones and some of them, by turns."""
    w, turn = weights(2, 70, 150), BLOCKS.index(block)
    w[1] *= 2.0**-30
    spec = CastSpec("e4m3", block, "pow2")
    if turn % 2 == contract:
        w, spec = w.transpose(1, 2) if turn < 4 else w[1:, 3:], CastSpec("e5m2", block, "e8m0")
    q = grouped_cast.quantize_experts(w, spec, contract)
    want = [reference.quantize(m.cpu(), spec) for m in w]
    assert torch.equal(q.data.view(torch.uint8).cpu(), torch.stack([t.data.view(torch.uint8) for t in want]))
    assert torch.equal(as_bytes(q.scale), torch.stack([as_bytes(t.scale) for t in want]))
    operand = layout.experts_k_major(q, contract)
    assert operand.codes.data_ptr() == q.data.data_ptr(), "codes are copied"
    codes = operand.codes.view(torch.uint8).clone()
    codes[:, : operand.free, : operand.contracted] = 0
    assert not bool(codes.any()), "padding is not zero"


def test_weights_are_converted_to_other_layout():
    q = grouped_cast.quantize_experts(weights(2, 70, 150), CastSpec("e4m3", (128, 128), "pow2"))
    for contract in (1, 0):
        got, want = grouped_cast.convert_to_k_major(q, contract), layout.experts_k_major(q, contract)
        assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(got.scale, want.scale) and got[2:] == want[2:]


def test_uncastable_inputs_are_rejected():
    x, groups = rows_of([3], 8)
    spec = CastSpec("e4m3", (1, 128), "pow2")
    with pytest.raises(CastError, match="hold 128 rows"):
        grouped_cast.quantize_rows(x[:5], spec, groups)
    with pytest.raises(CastError, match="experts, outputs, inputs"):
        grouped_cast.quantize_experts(x, spec)
    with pytest.raises(CastError, match="float"):
        grouped_cast.quantize_rows(x.int(), spec, groups)
