"""Casts by compiled Triton kernels against the executable specification, bit for bit.

The specification also runs on the GPU, where it is much faster than on a CPU. A separate test checks, for all kinds of
values, that both devices give the same results.
"""

# ruff: noqa: E402 (nothing here can be imported without triton)
from __future__ import annotations

import itertools

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl

from octavo.fp8.arithmetic import cast as reference
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.formats import FORMATS
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.groups import group_rows
from octavo.fp8.kernels.triton_kernels import bits, cast, grouped_cast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BLOCKS = ((-1, -1), (1, -1), (-1, 1), (1, 128), (128, 1), (128, 128), (1, 32), (32, 1), (1, 16), (64, 64))
PAIRS = (((1, 128), (128, 1)), ((1, 32), (32, 1)), ((1, -1), (-1, 1)), ((-1, -1), (-1, -1)))
KINDS = ("fp32", "pow2", "e8m0")
SHAPES = ((1, 3420), (300, 4304), (257, 1152), (1000, 1176), (128, 18944), (2048, 2048), (33, 40000))


def spread(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values whose magnitudes differ by row and by column, with a zero row and a tiny one."""
    gen = torch.Generator().manual_seed(1000 * rows + cols)
    x = torch.randn(rows, cols, generator=gen)
    x *= torch.exp2(torch.randint(-6, 4, (rows, 1), generator=gen).float())
    x *= torch.exp2(torch.randint(-6, 4, (1, cols), generator=gen).float())
    if rows > 8:
        x[3] = 0
        x[5] *= 1e-7
    return x.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """fp32 patterns are equal, or both NaN."""
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    return a.shape == b.shape and bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


def assert_same(got: Quantized, want: Quantized, note: str = "") -> None:
    codes, expected = got.data.view(torch.uint8).cpu(), want.data.view(torch.uint8).cpu()
    wrong = (codes != expected).nonzero()
    at = tuple(wrong[0].tolist()) if len(wrong) else ()
    assert not len(wrong), f"{note} {got.spec}: {len(wrong)} codes, at {at} {codes[at]:#x}, not {expected[at]:#x}"
    assert got.scale.dtype == want.scale.dtype
    assert same_bits(reference.scale_fp32(got), reference.scale_fp32(want)), f"{note} {got.spec}: scales"


def assert_laid(q: Quantized, contract: int) -> None:
    operand = layout.k_major(q, contract)
    assert operand.codes.data_ptr() == q.data.data_ptr() and operand.scale.data_ptr() == q.scale.data_ptr()
    codes = operand.codes.view(torch.uint8).clone()
    codes[: operand.free, : operand.contracted] = 0
    assert not bool(codes.any()), f"padding of {q.spec} for contraction {contract}"


@triton.jit
def encode_kernel(x_ptr, hard_ptr, soft_ptr, E5M2: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(hard_ptr + at, bits.encode_bits(x, E5M2))
    tl.store(soft_ptr + at, bits.encode_integers(x, E5M2))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_hardware_and_integer_encoders_agree(fmt):
    """All bf16 patterns with lower halves around a tie, and random fp32 patterns."""
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    loose = torch.randint(-(2**31), 2**31, (1 << 24,), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    x = torch.cat([(upper[:, None] | lower).reshape(-1), loose]).view(torch.float32)
    x = torch.cat([x, torch.zeros(-len(x) % 1024)])
    hard = torch.empty(len(x), dtype=torch.uint8, device="cuda")
    soft = torch.empty_like(hard)
    encode_kernel[(len(x) // 1024,)](x.cuda(), hard, soft, E5M2=fmt == "e5m2", N=1024)
    top = FORMATS[fmt].max
    want = torch.where(x.isnan(), 0x7F, x.clamp(-top, top).to(FORMATS[fmt].dtype).view(torch.uint8))
    for name, got in (("the instruction", hard.cpu()), ("the integers", soft.cpu())):
        wrong = (got != want).nonzero().flatten()
        at = int(wrong[0]) if len(wrong) else 0
        assert not len(wrong), f"{name}: {len(wrong)} codes; {float(x[at])!r} gave {got[at]:#x}, not {want[at]:#x}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_specification_is_equal_on_both_devices(block, kind):
    """All bf16 patterns, subnormal and huge fp32 values, a zero row: what the other tests hold kernels against."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(512, 128)
    fp32 = torch.randn(300, 1100, generator=torch.Generator().manual_seed(7))
    fp32 = torch.cat([fp32, fp32 * 2.0**-130, fp32 * 2.0**120])
    for x in (patterns, patterns[patterns.float().isfinite().all(1)], spread(300, 1152), fp32):
        for fmt in ("e4m3", "e5m2"):
            spec = CastSpec(fmt, block, kind)
            here, target = reference.quantize(x, spec), reference.quantize(x.cuda(), spec)
            assert_same(target, here)
            for dtype in (torch.float32, torch.bfloat16):
                a, b = reference.dequantize(here, dtype), reference.dequantize(target, dtype).cpu()
                assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_cast_of_model_sizes(block, kind):
    """Each block on every shape and with every kind of scale, a third of the shapes with each: compiling takes long."""
    third = SHAPES[(BLOCKS.index(block) + KINDS.index(kind)) % 3 :: 3]
    for shape, contract in itertools.product(third, (1, 0)):
        spec = CastSpec("e5m2" if contract == 0 else "e4m3", block, kind)
        x = spread(*shape).cuda()
        want = reference.quantize(x, spec)
        for name, y in (("rows", x), ("columns", x.t().contiguous().t())):
            q = cast.quantize(y, spec, contract)
            assert_same(q, want, f"{name} of {shape}")
            assert_laid(q, contract)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_both_layouts_at_once(pair, dtype):
    kind = {(1, 32): "e8m0", (-1, -1): "fp32"}.get(pair[0], "pow2")
    row, col = CastSpec("e4m3", pair[0], kind), CastSpec("e5m2", pair[1], kind)
    for shape in SHAPES:
        x = spread(*shape, dtype).cuda()
        first, second = cast.quantize_both(x, row, col)
        assert_same(first, reference.quantize(x, row), str(shape))
        assert_same(second, reference.quantize(x, col), str(shape))
        assert_laid(first, 1)
        assert_laid(second, 0)


@pytest.mark.parametrize("kind", ["fp32", "pow2"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_bf16_pattern_and_every_kind_of_bad_value(block, kind):
    """All 2^16 patterns, in rows with equal exponents; NaN and infinity affect only their blocks."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(512, 128)
    for fmt, y in itertools.product(("e4m3", "e5m2"), (x, x[x.float().isfinite().all(1)])):
        spec = CastSpec(fmt, block, kind)
        for contract in (1, 0):
            assert_same(cast.quantize(y.cuda(), spec, contract), reference.quantize(y, spec))


def test_random_fp32_patterns_divide_as_ieee_does():
    """Subnormals, huge and tiny values: no flush to zero, no reciprocal, no fp16 on the way."""
    gen = torch.Generator().manual_seed(11)
    x = torch.randint(-(2**31), 2**31, (4096, 1024), generator=gen).to(torch.int32).view(torch.float32)
    x = torch.where(x.isfinite(), x, 0.0)
    x = torch.cat([x, torch.randn(4096, 1024, generator=gen) * 2.0**-100, x * 2.0**-80]).cuda()
    for fmt, kind, block in itertools.product(
        ("e4m3", "e5m2"), ("fp32", "pow2"), ((1, 32), (1, 128), (1, -1), (-1, 1))
    ):
        spec = CastSpec(fmt, block, kind)
        assert_same(cast.quantize(x, spec), reference.quantize(x, spec))
    scale = torch.tensor(0.0123, device="cuda")
    for fmt in ("e4m3", "e5m2"):
        spec = CastSpec(fmt, (-1, -1), "fp32")
        for amax in (None, x.abs().max()):
            got = cast.quantize_with_scale(x, scale, spec, amax)
            assert_same(got, reference.quantize_with_scale(x, scale, spec, amax))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_dequantize_and_convert_layout(block):
    for shape in SHAPES:
        x = spread(*shape).cuda()
        for kind, contract in (("pow2", 1), ("e8m0", 0)):
            q = cast.quantize(x, CastSpec("e4m3", block, kind), contract)
            want = reference.quantize(x, q.spec)
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(cast.dequantize(q, dtype), reference.dequantize(want, dtype))
            for other in (1, 0):
                got, want = cast.convert_to_k_major(q, other), layout.k_major(q, other)
                assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))


@pytest.mark.parametrize("block", [b for b in BLOCKS if b != (1, 16)], ids=str)
def test_experts_are_cast_separately(block):
    sizes = [300, 0, 1, 128, 700]
    chosen = torch.cat([torch.full((n,), e) for e, n in enumerate(sizes)])
    groups = group_rows(chosen.cuda(), len(sizes)).groups
    x = spread(groups.rows, 3420).cuda()
    w = torch.stack([spread(700, 1176) * 4.0**e for e in range(5)]).cuda()
    for kind, contract in itertools.product(("fp32", "pow2", "e8m0"), (1, 0)):
        spec = CastSpec("e4m3", block, kind)
        q = grouped_cast.quantize_rows(x, spec, groups, contract)
        for e, (n, start) in enumerate(zip(sizes, groups.starts.tolist(), strict=False)):
            if n:
                want = reference.quantize(x[start : start + n], spec)
                at = e if block[0] == -1 else start // block[0]
                original = q.scale[at : at + want.scale.shape[0]]
                assert_same(Quantized(q.data[start : start + n], original, spec), want, f"expert {e}")
        experts = grouped_cast.quantize_experts(w, spec, contract)
        for e in range(5):
            one = Quantized(experts.data[e], experts.scale[e], spec)
            assert_same(one, reference.quantize(w[e], spec), f"weights of expert {e}")


def test_more_elements_than_int32():
    rows, cols = 70016, 32768
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    tail = spread(128, cols)
    x[-128:] = tail.cuda()
    row, col = CastSpec("e4m3", (1, 128)), CastSpec("e4m3", (128, 1))
    first, second = cast.quantize_both(x, row, col)
    assert_same(Quantized(first.data[-128:], first.scale[-128:], row), reference.quantize(tail, row))
    assert_same(Quantized(second.data[-128:], second.scale[-1:], col), reference.quantize(tail, col))
    again = cast.convert_to_k_major(first, 0).codes.view(torch.uint8)
    assert torch.equal(again[:, -128:].cpu(), first.data[-128:].view(torch.uint8).t().cpu())


def test_casts_do_not_synchronize_and_replay():
    row, col = CastSpec("e4m3", (1, -1)), CastSpec("e4m3", (-1, 1))
    x = spread(300, 3420).cuda()
    groups = group_rows(torch.arange(300, device="cuda") % 3, 3).groups
    padded = torch.zeros(groups.rows, 3420, dtype=torch.bfloat16, device="cuda")

    def step() -> tuple[Quantized, ...]:
        return *cast.quantize_both(x, row, col), grouped_cast.quantize_rows(padded, col, groups, 0)

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    new = spread(300, 3420) * 3
    x.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(outs[0], reference.quantize(new, row))
    assert_same(outs[1], reference.quantize(new, col))
