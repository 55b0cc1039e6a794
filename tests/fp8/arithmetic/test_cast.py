"""Casts against the NumPy oracle, bit for bit, on difficult inputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.metrics import sqnr, underflow
from tests.fp8 import oracle

KINDS = ("fp32", "pow2", "e8m0")
BLOCKS = ((1, 128), (128, 1), (128, 128), (1, -1), (-1, 1), (-1, -1), (1, 32), (32, 1), (3, 5), (-1, 4), (2, -1))
CASTS = [(fmt, kind) for fmt in oracle.FACTS for kind in KINDS]
ALL_SPECS = [CastSpec(fmt, block, kind) for block in BLOCKS for fmt, kind in CASTS]
MIXED_SPECS = [CastSpec(CASTS[i % 6][0], block, CASTS[i % 6][1]) for i, block in enumerate(BLOCKS)]
FMAX = {fmt: facts[3] for fmt, facts in oracle.FACTS.items()}


def check(x: torch.Tensor, spec: CastSpec) -> Quantized:
    """Quantize x and compare codes, scales and dequantized values with the oracle, bit for bit."""
    q = cast.quantize(x, spec)
    matrix = x.detach().float().reshape(x.shape[:-1].numel(), x.shape[-1]).numpy()
    codes, scales = oracle.quantize(matrix, spec.format, spec.block, spec.scale)
    assert q.data.shape == x.shape and q.data.dtype == spec.fmt.dtype and q.data.is_contiguous() and q.spec == spec
    assert q.scale.dtype == (torch.float8_e8m0fnu if spec.scale == "e8m0" else torch.float32)
    np.testing.assert_array_equal(q.scale.float().double().numpy(), scales, strict=True)
    np.testing.assert_array_equal(q.data.view(torch.uint8).reshape(matrix.shape).numpy(), codes, strict=True)
    with np.errstate(over="ignore"):
        expected = oracle.dequantize(codes, scales, spec.format, spec.block).astype(np.float32)
    np.testing.assert_array_equal(cast.dequantize(q).reshape(matrix.shape).numpy(), expected)
    return q


def ties(fmt: str) -> np.ndarray:
    """Return every finite value, every midpoint between neighbors, and the fp32 numbers next to both, with both
    signs."""
    finite = oracle.FINITE[fmt]
    points = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]).astype(np.float32)
    around = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    around = around[around <= finite[-1]]
    return np.concatenate([around, -around])


# --- every code, every tie, both ends of the range -----------------------------------------------------------------


@pytest.mark.parametrize("fmt", oracle.FACTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [-90, -20, -1, 0, 1, 33, 110])
def test_every_code_and_every_tie(fmt: str, kind: str, shift: int) -> None:
    shift -= 0 if fmt == "e4m3" else 7  # keeps FMAX * 2^shift finite and above the floor
    values = ties(fmt).astype(np.float64) * 2.0**shift
    x = torch.from_numpy(values.astype(np.float32))  # subnormal results may round: then they are just more inputs
    q = check(x, CastSpec(fmt, (1, -1), kind))
    assert float(q.scale.float()) == 2.0**shift


@pytest.mark.parametrize("fmt", oracle.FACTS)
def test_codes_survive_a_round_trip(fmt: str) -> None:
    values = torch.from_numpy(np.concatenate([oracle.FINITE[fmt], -oracle.FINITE[fmt]]).astype(np.float32))
    spec = CastSpec(fmt, (-1, -1), "pow2")
    q = cast.quantize(values, spec)
    assert torch.equal(cast.dequantize(q), values)
    assert q.data.view(torch.uint8).unique().numel() == values.numel()


@pytest.mark.parametrize("fmt", oracle.FACTS)
@pytest.mark.parametrize("kind", KINDS)
def test_amax_at_every_exponent(fmt: str, kind: str) -> None:
    mantissas = np.array([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF], dtype=np.uint32)  # 1.75 is 0x600000
    bits = (np.arange(0, 255, dtype=np.uint32)[:, None] << 23 | mantissas).reshape(-1)
    amax = bits.view(np.float32)
    fill = np.random.default_rng(0).uniform(-1, 1, (amax.size, 6)).astype(np.float32) * amax[:, None]
    x = torch.from_numpy(np.concatenate([fill, amax[:, None]], 1))
    check(x, CastSpec(fmt, (1, -1), kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_floor_is_exactly_two_to_the_minus_100(kind: str) -> None:
    at = np.float32(2.0**-100)
    x = torch.tensor([[at], [np.nextafter(at, np.float32(0))]])
    q = check(x, CastSpec("e4m3", (1, -1), kind))
    assert float(q.scale.float()[0, 0]) < 1 and float(q.scale.float()[1, 0]) == 1
    assert q.data.view(torch.uint8)[1, 0] == 0


def test_powers_of_two_round_up_so_that_nothing_saturates() -> None:
    spec = CastSpec("e4m3", (1, -1), "pow2")
    just_above = np.nextafter(np.float32(448), np.float32(1e9))
    q = check(torch.tensor([[448.0], [just_above]]), spec)
    assert q.scale.flatten().tolist() == [1.0, 2.0]
    assert q.data.view(torch.uint8).flatten().tolist() == [0x7E, 0x76]  # 448 and 224


# --- bad values ----------------------------------------------------------------------------------------------------

NEGATIVE_NAN = np.array([0xFFC12345], dtype=np.uint32).view(np.float32)[0]
SIGNALING_NAN = np.array([0x7F800001], dtype=np.uint32).view(np.float32)[0]


@pytest.mark.parametrize(
    ("dtype", "kind", "least", "most"),
    [
        (torch.bfloat16, "fp32", 1.1e-3, 1.5e-3),
        (torch.float32, "fp32", 0.0, 1e-5),
        (torch.bfloat16, "pow2", 0.0, 0.0),
    ],
)
def test_fp32_quotient_changes_few_codes(dtype: torch.dtype, kind: str, least: float, most: float) -> None:
    """The share of codes that differ from a quotient rounded once is the one in `docs/numerics.md`."""
    x = torch.randn(10_000, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = cast.quantize(x, CastSpec(block=(1, 128), scale=kind))
    points = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    exact = (x.double() / q.scale.double()).abs()  # 53 bits tell a tie of 5 bits from its neighbours
    middle = (points[1:] + points[:-1]) / 2
    nearest = torch.bucketize(exact, middle)
    moved = (q.data.double().abs() != points[nearest]) & ~torch.isin(exact, middle)
    assert least <= float(moved.double().mean()) <= most


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, NEGATIVE_NAN, SIGNALING_NAN], ids=str)
@pytest.mark.parametrize("spec", MIXED_SPECS, ids=str)
def test_bad_value_affects_only_its_block(bad: float, spec: CastSpec) -> None:
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(67, 133)).astype(np.float32))
    x[40, 90] = torch.from_numpy(np.array([bad], dtype=np.float32))[0]
    q = check(x, spec)
    spoiled = cast.dequantize(q).isnan()
    assert bool(spoiled[40, 90]) and int(q.scale.float().isnan().sum()) == 1
    assert bool((q.data.view(torch.uint8)[spoiled] == 0x7F).all())


def test_bad_value_in_ragged_corner() -> None:
    x = torch.zeros(130, 130)
    x[129, 129] = math.inf
    q = check(x, CastSpec("e4m3", (128, 128), "pow2"))
    assert int(cast.dequantize(q).isnan().sum()) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bad_values_in_16_bits(dtype: torch.dtype) -> None:
    x = torch.ones(4, 128, dtype=dtype)
    x[1, 3], x[2, 5] = math.nan, -math.inf
    q = check(x, CastSpec())
    assert q.scale.isnan().flatten().tolist() == [False, True, True, False]


# --- small values and signs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", MIXED_SPECS, ids=str)
def test_zero_blocks_and_signed_zeros(spec: CastSpec) -> None:
    x = torch.zeros(130, 131)
    x[::2] = -0.0
    q = check(x, spec)
    assert bool((q.scale.float() == 1).all())
    assert q.data.view(torch.uint8)[:2, 0].tolist() == [0x80, 0x00]


def test_underflow_keeps_sign() -> None:
    x = torch.tensor([[-1e-40, -0.0, 1e-40, 0.0], [-1e-40, -1e-9, 1e-9, 400.0]])
    q = check(x, CastSpec("e4m3", (1, -1), "pow2"))
    assert q.data.view(torch.uint8)[:, :3].tolist() == [[0x80, 0x80, 0x00], [0x80, 0x80, 0x00]]


@pytest.mark.parametrize("magnitude", [1e-7, 1e-12, 1e-25, 1e25])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_any_magnitude_keep_precision(magnitude: float, kind: str) -> None:
    x = torch.from_numpy((np.random.default_rng(2).normal(size=(64, 256)) * magnitude).astype(np.float32))
    q = check(x, CastSpec("e4m3", (1, 128), kind))
    assert sqnr(x, q) > 31 and underflow(x, q) < 0.001


# --- shapes and strides --------------------------------------------------------------------------------------------

SHAPES = [(1, 1), (1, 128), (7, 3420), (5, 1176), (1, 4304), (129, 127), (128, 256), (257, 65), (31, 33), (0, 64)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_on_every_shape(shape: tuple[int, int], block: tuple[int, int]) -> None:
    generator = np.random.default_rng(3)
    exponents = generator.integers(-12, 12, size=(shape[0], 1)) + generator.integers(-12, 12, size=(1, shape[1]))
    x = torch.from_numpy((generator.normal(size=shape) * 2.0**exponents).astype(np.float32))
    check(x, CastSpec("e4m3", block, "pow2"))


@pytest.mark.parametrize("spec", ALL_SPECS, ids=str)
def test_every_spec(spec: CastSpec) -> None:
    check(torch.randn(34, 260, generator=torch.Generator().manual_seed(5)), spec)


@pytest.mark.parametrize("spec", MIXED_SPECS, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0), (2, 0, 5), (0,)], ids=str)
def test_empty_tensors(shape: tuple[int, ...], spec: CastSpec) -> None:
    q = check(torch.zeros(shape), spec)
    rows, cols = torch.Size(shape[:-1]).numel(), shape[-1]
    r, c = spec.block
    assert tuple(q.scale.shape) == (1 if r == -1 else -(-rows // r), 1 if c == -1 else -(-cols // c))


@pytest.mark.parametrize("shape", [(5,), (300,), (2, 3, 130), (2, 1, 3, 7, 129)], ids=str)
def test_leading_dimensions_are_rows(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for spec in (CastSpec(), CastSpec("e4m3", (128, 1), "fp32"), CastSpec("e5m2", (4, 4), "e8m0")):
        q = check(x, spec)
        assert cast.dequantize(q).shape == shape


def strided() -> dict[str, torch.Tensor]:
    base = torch.randn(2, 132, 30, generator=torch.Generator().manual_seed(4))
    return {
        "transposed": base[0].t(),
        "steps": base[0, ::3, 1::2],
        "permuted": base.permute(2, 0, 1),
        "expanded": base[0, :1].expand(9, -1),
        "offset": base[0].reshape(-1)[1 : 1 + 11 * 359].view(359, 11),
        "channels_last": base.view(2, 12, 11, 30).to(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("name", strided())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strides_do_not_matter(name: str, dtype: torch.dtype) -> None:
    x = strided()[name].to(dtype)
    for block in BLOCKS:
        check(x, CastSpec("e4m3", block, "pow2"))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_shapes_values_and_blocks(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=3)))
    sides = st.sampled_from((-1, 1, 2, 3, 8, 16, 64))
    spec = CastSpec(
        data.draw(st.sampled_from(tuple(oracle.FACTS))),
        (data.draw(sides), data.draw(sides)),
        data.draw(st.sampled_from(KINDS)),
    )
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    raw = generator.integers(0, 2**32, size=shape, dtype=np.uint32)
    if data.draw(st.booleans()):
        raw &= np.uint32(0xBFFFFFFF)  # exponents below 2: no bad values
    x = torch.from_numpy(np.atleast_1d(raw.view(np.float32)))
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    check(x.to(dtype), spec)


# --- what a cast leaves alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_input_is_not_modified(block: tuple[int, int]) -> None:
    x = torch.randn(130, 131)
    before = x.clone()
    q = cast.quantize(x, CastSpec("e4m3", block, "pow2"))
    assert torch.equal(x, before)
    codes, scale = q.data.view(torch.uint8).clone(), q.scale.clone()
    cast.dequantize(q).zero_()
    assert torch.equal(q.data.view(torch.uint8), codes) and torch.equal(q.scale, scale)


def test_codes_are_detached() -> None:
    x = torch.randn(4, 128, requires_grad=True)
    q = cast.quantize(x * 2, CastSpec())
    assert not q.data.requires_grad and not q.scale.requires_grad
    assert torch.equal(cast.quantize(torch.nn.Parameter(x.detach() * 2), CastSpec()).scale, q.scale)


def test_inference_mode_and_autocast_change_nothing() -> None:
    x = torch.randn(9, 200)
    plain = cast.quantize(x, CastSpec())
    with torch.inference_mode():
        frozen = cast.quantize(x, CastSpec())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = cast.quantize(x, CastSpec())
        values = cast.dequantize(mixed)
    assert values.dtype == torch.float32
    for other in (frozen, mixed):
        assert torch.equal(other.data.view(torch.uint8), plain.data.view(torch.uint8))
        assert torch.equal(other.scale, plain.scale)


@pytest.mark.parametrize("spec", MIXED_SPECS, ids=str)
def test_asynchronous_devices_follow_same_rules(spec: CastSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast, "_can_read_values", lambda tensor: False)
    x = torch.randn(66, 133, generator=torch.Generator().manual_seed(6))
    check(x, spec)
    x[3, 5], x[65, 131], x[:, 32:64], x[2:4] = math.nan, -math.inf, 1e-38, 0.0
    check(x, spec)
    one = CastSpec(spec.format, (-1, -1), spec.scale)
    assert bool(cast.dequantize(cast.quantize_with_scale(x, torch.tensor(1.0), one)).isnan().all())
    assert bool(cast.dequantize(cast.quantize_with_scale(x[2:4], torch.tensor(1.0), one)).isfinite().all())


def test_dequantize_rounds_once() -> None:
    x = torch.randn(33, 70)
    for kind in KINDS:
        q = cast.quantize(x, CastSpec("e4m3", (4, 32), kind))
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(cast.dequantize(q, dtype), cast.dequantize(q).to(dtype))


# --- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_unsupported_dtypes_are_rejected(dtype: torch.dtype) -> None:
    with pytest.raises(CastError, match=f"{dtype}.*float32, bfloat16 or float16.*x.float"):
        cast.quantize(torch.zeros(2, 2).to(dtype), CastSpec())


def test_scalar_is_rejected() -> None:
    with pytest.raises(CastError, match="without dimensions.*reshape"):
        cast.quantize(torch.tensor(1.0), CastSpec())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("e4m3fn",), "format='e4m3fn' is not an FP8 format; use one of e4m3, e5m2"),
        (("e4m3", (1, 128), "fp16"), "scale='fp16' is not a kind of scale; use one of fp32, pow2, e8m0"),
        (("e4m3", (0, 128)), "side below 1; only -1 means the whole side"),
        (("e4m3", (1, -2)), "side below 1"),
        (("e4m3", 128), "must be a tuple of two integers"),
        (("e4m3", [1, 128]), "must be a tuple"),
        (("e4m3", (1, 128.0)), "must be a tuple of two integers"),
        (("e4m3", (True, 128)), "must be a tuple of two integers"),
        (("e4m3", (1, 128, 1)), "must be a tuple of two integers"),
    ],
)
def test_invalid_specs_are_rejected(arguments: tuple, message: str) -> None:
    with pytest.raises(CastError, match=message):
        CastSpec(*arguments)


@pytest.mark.parametrize("block", [(1, 128), (-1, -1), (1, -1), (-1, 1), (-1, 4), (128, 128)])
def test_spec_is_parsed_from_its_str(block: tuple[int, int]) -> None:
    spec = CastSpec("e5m2", block, "fp32")
    assert CastSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("e4m3 1x128", "is not a cast; use FORMAT BLOCK SCALE"),
        ("e4m3 rows pow2", "is not a cast; .* where BLOCK is tensor, row, column or ROWSxCOLUMNS"),
        ("e4m3 1x128 pow2 ", "is not a cast"),
        ("e4m3 1x" + "9" * 5000 + " pow2", "is not a cast"),
        ("e4m3 0x128 pow2", "has a side below 1"),
        ("e4m4 1x128 pow2", "format='e4m4' is not an FP8 format"),
        ("e4m3 1x128 pow3", "scale='pow3' is not a kind of scale"),
    ],
)
def test_text_that_is_no_spec_is_rejected(text: str, message: str) -> None:
    with pytest.raises(CastError, match=message):
        CastSpec.parse(text)


def test_spec_is_value_with_readable_str() -> None:
    assert str(CastSpec()) == "e4m3 1x128 pow2"
    assert str(CastSpec("e5m2", (-1, -1), "fp32")) == "e5m2 tensor fp32"
    assert [str(CastSpec("e4m3", b)).split()[1] for b in ((1, -1), (-1, 1), (-1, 4))] == ["row", "column", "allx4"]
    assert CastSpec() == CastSpec() and len({CastSpec(), CastSpec(), CastSpec("e5m2")}) == 2
    with pytest.raises(AttributeError):
        CastSpec().format = "e5m2"  # type: ignore[misc]


def test_mismatched_scales_are_rejected() -> None:
    q = cast.quantize(torch.randn(4, 256), CastSpec())
    with pytest.raises(CastError, match=r"need scales of shape \(4, 2\), found \(4, 1\).*same cast"):
        cast.dequantize(Quantized(q.data, q.scale[:, :1], q.spec))
