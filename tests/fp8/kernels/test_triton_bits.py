"""The arithmetic inside Triton kernels against the executable specification, for each bit pattern."""

# ruff: noqa: E402 (nothing here can be imported without triton)
from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.arithmetic.formats import FORMATS
from octavo.fp8.kernels.triton_kernels import bits
from octavo.fp8.kernels.triton_kernels.launch import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def encode_kernel(x_ptr, hard_ptr, soft_ptr, E5M2: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(hard_ptr + at, bits.encode_bits(x, E5M2))
    tl.store(soft_ptr + at, bits.encode_integers(x, E5M2))


@triton.jit
def scale_kernel(x_ptr, scale_ptr, bad_ptr, POW2: tl.constexpr, E5M2: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    scale, bad = bits.scale_of(bits.amax_bits(tl.load(x_ptr + at)), POW2, E5M2)
    tl.store(scale_ptr + at, scale)
    tl.store(bad_ptr + at, bad.to(tl.uint8))


@triton.jit
def decode_kernel(codes_ptr, out_ptr, E5M2: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, bits.decode_bits(tl.load(codes_ptr + at), E5M2))


@triton.jit
def round_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + at, bits.round_to(tl.load(x_ptr + at), out_ptr.dtype.element_ty))


@triton.jit
def widen_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + at, bits.widen(tl.load(x_ptr + at)))


N = 1 << 15


def patterns(n: int = 1 << 18) -> torch.Tensor:
    """fp32: every upper half of a pattern with lower halves that make, break and just miss a tie; then random ones."""
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x8000, 0xFFFF], dtype=torch.int32)
    grid = (upper[:, None] | lower).reshape(-1)
    gen = torch.Generator().manual_seed(5)
    loose = torch.randint(-(2**31), 2**31, (n,), generator=gen).to(torch.int32)
    return torch.cat([grid, loose]).view(torch.float32).to(DEVICE)


def ties(fmt: str) -> torch.Tensor:
    """All finite values of a format, the middles between neighbours, and one fp32 step to either side of each."""
    top = {"e4m3": 0x7E, "e5m2": 0x7B}[fmt]
    values = torch.arange(top + 1, dtype=torch.uint8).view(FORMATS[fmt].dtype).float()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, values * 1.25])
    pattern = points.view(torch.int32)
    near = torch.cat([pattern - 1, pattern, pattern + 1]).clamp(min=0).view(torch.float32)
    near = torch.cat([near, -near])
    return torch.cat([near, torch.zeros(-len(near) % N)]).to(DEVICE)


def expected_codes(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """By torch's own cast of clamped values on the CPU; NaN becomes 0x7F."""
    x = x.cpu()
    top = FORMATS[fmt].max
    codes = x.clamp(-top, top).to(FORMATS[fmt].dtype).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, codes)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("make", [patterns, ties])
def test_encoders_match_torch(fmt, make):
    x = make() if make is patterns else make(fmt)
    hard = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    soft = torch.empty_like(hard)
    launch(encode_kernel, (len(x) // N,), x, hard, soft, E5M2=fmt == "e5m2", N=N)
    want = expected_codes(x, fmt)
    for name, got in (("encode_bits", hard.cpu()), ("encode_integers", soft.cpu())):
        wrong = (got != want).nonzero().flatten()
        at = int(wrong[0]) if len(wrong) else 0
        assert not len(wrong), f"{name}: {len(wrong)} codes; {float(x[at])!r} gave {got[at]:#x}, not {want[at]:#x}"


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", ["fp32", "pow2"])
def test_scales_match_reference(fmt, kind):
    amax = patterns()
    scale = torch.empty_like(amax)
    bad = torch.empty(len(amax), dtype=torch.uint8, device=DEVICE)
    launch(scale_kernel, (len(amax) // N,), amax, scale, bad, POW2=kind == "pow2", E5M2=fmt == "e5m2", N=N)
    want = cast.scale_from_amax(amax.cpu(), CastSpec(fmt, (-1, -1), kind))
    assert torch.equal(scale.cpu().view(torch.int32), want.view(torch.int32))
    assert torch.equal(bad.cpu().bool(), ~amax.cpu().isfinite())


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_all_codes_decode_exactly(fmt):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    out = torch.empty(256, device=DEVICE)
    launch(decode_kernel, (1,), codes.to(DEVICE), out, E5M2=fmt == "e5m2", N=256)
    want = codes.view(FORMATS[fmt].dtype).float()
    same = (out.cpu().view(torch.int32) == want.view(torch.int32)) | (out.cpu().isnan() & want.isnan())
    assert bool(same.all()), codes[~same]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_matches_torch(dtype):
    x = patterns()
    out = torch.empty(len(x), dtype=dtype, device=DEVICE)
    launch(round_kernel, (len(x) // N,), x, out, N=N)
    want, got = x.cpu().to(dtype), out.cpu()
    full = torch.int32 if dtype is torch.float32 else torch.int16
    assert bool(((got.view(full) == want.view(full)) | (got.isnan() & want.isnan())).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widening_is_exact_for_all_patterns(dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).to(DEVICE)
    out = torch.empty(1 << 16, device=DEVICE)
    launch(widen_kernel, ((1 << 16) // N,), x, out, N=N)
    want, got = x.cpu().float(), out.cpu()
    assert bool(((got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())).all())
