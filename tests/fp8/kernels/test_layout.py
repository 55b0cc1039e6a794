"""The memory layout of codes and scales: correct for every cast, and free of copies if the cast produced it."""

from __future__ import annotations

import pytest
import torch

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import RECIPES, recipe
from octavo.fp8.kernels import layout, registry
from tests.fp8.kernels.laid_out import laid_out

BLOCKS = ((-1, -1), (1, -1), (-1, 1), (1, 128), (128, 1), (128, 128), (1, 32), (32, 1))
SIZES = ((1, 1), (16, 16), (17, 15), (33, 144), (130, 260), (128, 256))


def make_quantized(rows: int, cols: int, spec: CastSpec, seed: int = 0) -> Quantized:
    """A cast of values whose codes and scales all differ from those of padding."""
    return cast.quantize(torch.rand(rows, cols, generator=torch.Generator().manual_seed(seed)) + 0.5, spec)


@pytest.mark.parametrize("contract", (0, 1))
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rows, cols", SIZES)
def test_operand_has_codes_padding_and_scales(rows: int, cols: int, block: tuple[int, int], contract: int):
    spec = CastSpec("e4m3", block, "e8m0" if 32 in block else "pow2")
    plain = make_quantized(rows, cols, spec)
    free, contracted = (rows, cols) if contract == 1 else (cols, rows)
    for q in (plain, laid_out(plain, contract), laid_out(plain, 1 - contract)):
        got = layout.k_major(q, contract)
        assert (got.free, got.contracted) == (free, contracted)
        codes = got.codes.view(torch.uint8)
        assert codes.is_contiguous() and codes.shape[0] % 16 == codes.shape[1] % 16 == 0
        side = max(block[contract], 16)
        assert codes.shape == (-(-free // 16) * 16, -(-contracted // side) * side)
        expected = plain.data.view(torch.uint8)
        assert torch.equal(codes[:free, :contracted], expected if contract == 1 else expected.t())
        assert not codes[free:].any() and not codes[:, contracted:].any()
        scale = plain.scale if contract == 1 else plain.scale.t()
        assert got.scale.dtype is scale.dtype
        assert torch.equal(
            cast.scale_fp32(plain._replace(scale=got.scale)), cast.scale_fp32(plain._replace(scale=scale))
        )


@pytest.mark.parametrize("contract", (0, 1))
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rows, cols", SIZES)
def test_tensors_in_layout_are_not_copied(rows: int, cols: int, block: tuple[int, int], contract: int):
    q = laid_out(make_quantized(rows, cols, CastSpec("e4m3", block, "pow2")), contract)
    got = layout.k_major(q, contract)
    assert got.codes.untyped_storage().data_ptr() == q.data.untyped_storage().data_ptr()
    assert got.scale.untyped_storage().data_ptr() == q.scale.untyped_storage().data_ptr()


def test_row_block_scales_cover_padding():
    q = make_quantized(33, 260, CastSpec("e4m3", (1, 128), "pow2"))
    got = layout.k_major(laid_out(q, 1), 1)
    assert got.codes.shape == (48, 384) and got.scale.stride() == (1, 48)
    full = got.scale.as_strided((48, 3), (1, 48))
    assert torch.equal(full[:33], q.scale) and bool((full[33:] == 1).all())


def test_square_block_scales_are_padded_to_four():
    for contract, shape in ((1, (300, 700)), (0, (700, 300))):
        got = layout.k_major(laid_out(make_quantized(*shape, CastSpec("e4m3", (128, 128), "pow2")), contract), contract)
        assert got.scale.shape == (3, 6) and got.scale.stride() == (8, 1)
        assert bool((got.scale.as_strided((3, 8), (8, 1))[:, 6:] == 1).all())


def test_scales_with_short_storage_are_copied():
    """Strides alone do not show that there is padding behind the last scale."""
    q = make_quantized(33, 256, CastSpec("e4m3", (1, 128), "pow2"))
    short = torch.empty(48 + 33).as_strided((33, 2), (1, 48)).copy_(q.scale)
    got = layout.k_major(Quantized(q.data, short, q.spec), 1)
    assert got.scale.untyped_storage().nbytes() >= 4 * 96 and torch.equal(got.scale, q.scale)


def test_row_scales_have_strides_of_one():
    """One column scale [1, n] transposed is contiguous in torch's eyes with any stride; scaled_mm wants 1."""
    q = make_quantized(5, 80, CastSpec("e4m3", (-1, 1), "pow2"))
    assert layout.k_major(q, 0).scale.stride() == (1, 1)


def test_empty_matrices():
    for rows, cols in ((0, 16), (16, 0), (0, 0)):
        for contract in (0, 1):
            q = cast.quantize(torch.empty(rows, cols), CastSpec("e4m3", (1, 128), "pow2"))
            got = layout.k_major(q, contract)
            assert (got.free, got.contracted) == ((rows, cols) if contract == 1 else (cols, rows))
            assert not got.codes.view(torch.uint8).any()


def test_grids_and_rounding():
    assert layout.grid_shape(0, 0, CastSpec("e4m3", (-1, 1))) == (1, 0)
    assert layout.grid_shape(130, 300, CastSpec("e4m3", (128, 128))) == (2, 3)
    assert [layout.round_up(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert [layout.ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize("op, dims", (("fwd", (1, 1)), ("dgrad", (1, 0)), ("wgrad", (0, 0))))
@pytest.mark.parametrize("name", RECIPES)
def test_triton_casts_have_layout(name: str, op: str, dims: tuple[int, int]) -> None:
    """No GEMM copies what the kernels of this package wrote for it."""
    triton = registry.get("triton")
    if triton.supports("quantize", CastSpec(), torch.device("cpu"), None) is not None:
        pytest.skip("Triton's interpreter is off")
    gemm = recipe(name).gemm(op)
    for spec, contract in zip((gemm.a, gemm.b), dims, strict=True):
        q = triton.quantize(torch.rand(33, 140, generator=torch.Generator().manual_seed(0)), spec, contract)
        got = layout.k_major(q, contract)
        assert got.codes.untyped_storage().data_ptr() == q.data.untyped_storage().data_ptr()
        assert got.scale.untyped_storage().data_ptr() == q.scale.untyped_storage().data_ptr()
        codes = got.codes.view(torch.uint8)
        assert not codes[got.free :].any() and not codes[:, got.contracted :].any()


@pytest.mark.parametrize("contract", (0, 1))
def test_weights_of_experts(contract: int) -> None:
    """Each expert as k_major lays it out, and no copy of what lies so already."""
    spec = CastSpec("e4m3", (128, 128), "pow2")
    each = [make_quantized(150, 200, spec, seed) for seed in range(3)]
    data = torch.stack([q.data.view(torch.uint8) for q in each]).view(torch.float8_e4m3fn)
    q = Quantized(data, torch.stack([q.scale for q in each]), spec)
    got = layout.experts_k_major(q, contract)
    assert (got.free, got.contracted) == ((150, 200) if contract == 1 else (200, 150))
    for e in range(3):
        one = layout.k_major(each[e], contract)
        assert torch.equal(got.codes[e].view(torch.uint8), one.codes.view(torch.uint8))
        assert torch.equal(got.scale[e], one.scale)
    view = got.codes[:, : got.free, : got.contracted]
    again = layout.experts_k_major(q._replace(data=view if contract == 1 else view.transpose(1, 2)), contract)
    assert again.codes.data_ptr() == got.codes.data_ptr() and again.codes.shape == got.codes.shape


def test_is_k_major_matches_layout() -> None:
    q = make_quantized(33, 144, CastSpec("e4m3", (1, -1), "pow2"))
    assert not layout.is_k_major(q, 1) and not layout.is_k_major(q, 0)
    for contract in (0, 1):
        right = laid_out(q, contract)
        assert layout.is_k_major(right, contract) and not layout.is_k_major(right, 1 - contract)
