"""The parts of delayed scaling: amax, the scale of an amax, and casts with a given scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastError, CastSpec
from octavo.fp8.metrics import saturation
from tests.fp8 import oracle

TENSOR = {fmt: CastSpec(fmt, (-1, -1), "fp32") for fmt in oracle.FACTS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_is_fp32_scalar(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -3.5], [2.0, 0.0]], dtype=dtype, requires_grad=True)
    results = cast.amax(x)
    assert results.dtype == torch.float32 and results.dim() == 0 and not results.requires_grad and float(results) == 3.5


def test_amax_of_empty_tensor_and_bad_values() -> None:
    assert float(cast.amax(torch.zeros(0, 4))) == 0.0
    assert math.isnan(cast.amax(torch.tensor([1.0, math.nan, math.inf])))
    assert math.isinf(cast.amax(torch.tensor([1.0, -math.inf])))


@pytest.mark.parametrize("fmt", oracle.FACTS)
@pytest.mark.parametrize("kind", ["fp32", "pow2", "e8m0"])
def test_scale_from_amax_equals_scale_of_cast(fmt: str, kind: str) -> None:
    spec = CastSpec(fmt, (-1, -1), kind)
    for value in (0.0, 1e-40, 2.0**-100, 1e-7, 1.0, 448.0, 449.0, 57344.0, 3e38, math.inf, math.nan):
        amax = torch.tensor(value)
        scale = cast.scale_from_amax(amax, spec)
        assert scale.shape == amax.shape and scale.dtype == torch.float32
        q = cast.quantize(amax.reshape(1, 1), spec)
        np.testing.assert_array_equal(scale.numpy(), q.scale.float()[0, 0].numpy())
        np.testing.assert_array_equal(float(scale), oracle.scale_of(float(amax), fmt, kind))


@pytest.mark.parametrize("fmt", oracle.FACTS)
def test_values_beyond_the_scale_saturate(fmt: str) -> None:
    largest = oracle.FACTS[fmt][3]
    x = torch.tensor([[0.5, -1.0, 3.0, -1e38, largest * 2, -0.0]])
    q = cast.quantize_with_scale(x, torch.tensor(0.5), TENSOR[fmt])
    codes = oracle.encode((x / 0.5).numpy(), fmt)
    np.testing.assert_array_equal(q.data.view(torch.uint8).numpy(), codes)
    assert cast.dequantize(q)[0, 3:5].tolist() == [-largest / 2, largest / 2]
    assert q.scale.tolist() == [[0.5]]
    assert saturation(x, q) == pytest.approx(2 / 6)


def test_cast_with_current_scale_equals_current_cast() -> None:
    x = torch.randn(37, 129)
    for fmt, spec in TENSOR.items():
        current = cast.quantize(x, spec)
        for amax in (None, cast.amax(x)):
            inputs = cast.quantize_with_scale(x, cast.scale_from_amax(cast.amax(x), spec), spec, amax)
            assert torch.equal(inputs.data.view(torch.uint8), current.data.view(torch.uint8)), fmt
            assert torch.equal(inputs.scale, current.scale)
    blockwise = CastSpec("e4m3", (16, 32), "e8m0")
    current = cast.quantize(x, blockwise)
    inputs = cast.quantize_with_scale(x, current.scale, blockwise)
    assert torch.equal(inputs.data.view(torch.uint8), current.data.view(torch.uint8))
    assert torch.equal(inputs.scale.view(torch.uint8), current.scale.view(torch.uint8))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("with_amax", [False, True])
def test_bad_value_makes_tensor_nan(bad: float, with_amax: bool) -> None:
    x = torch.randn(5, 6)
    x[2, 3] = bad
    q = cast.quantize_with_scale(x, torch.tensor(0.1), TENSOR["e4m3"], cast.amax(x) if with_amax else None)
    assert bool((q.data.view(torch.uint8) == 0x7F).all()) and bool(q.scale.isnan().all())


def test_bad_value_makes_only_its_block_nan() -> None:
    x = torch.ones(4, 64)
    x[1, 40] = math.inf
    q = cast.quantize_with_scale(x, torch.tensor(1.0), CastSpec("e4m3", (1, 32), "pow2"))
    assert cast.dequantize(q).isnan().sum() == 32 and bool(cast.dequantize(q)[1, 32:].isnan().all())


def test_nan_scale_gives_nan_and_empty_tensor_keeps_scale() -> None:
    q = cast.quantize_with_scale(torch.ones(2, 2), torch.tensor(math.nan), TENSOR["e4m3"])
    assert bool(cast.dequantize(q).isnan().all())
    q = cast.quantize_with_scale(torch.ones(0, 2), torch.tensor(3.0), TENSOR["e4m3"])
    assert q.data.shape == (0, 2) and q.scale.tolist() == [[3.0]]


def test_inputs_are_not_modified() -> None:
    x, scale = torch.tensor([[1.0, 1e9]]), torch.tensor([0.25])
    cast.quantize_with_scale(x, scale, TENSOR["e4m3"], torch.tensor(1e9))
    assert x.tolist() == [[1.0, 1e9]] and scale.tolist() == [0.25]


@pytest.mark.parametrize("name", ["scale", "amax"])
def test_mismatched_scale_is_rejected(name: str) -> None:
    arguments = {"scale": torch.tensor(1.0), "amax": None, name: torch.ones(3, 2)}
    with pytest.raises(CastError, match=rf"{name} has shape \(3, 2\).*4 x 2 blocks; give one {name} per block"):
        cast.quantize_with_scale(torch.zeros(4, 256), spec=CastSpec(), **arguments)  # type: ignore[arg-type]
