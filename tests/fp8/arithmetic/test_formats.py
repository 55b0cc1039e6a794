"""Decoding of every byte of both formats, compared with the specification."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from octavo.fp8.arithmetic.formats import E4M3, E5M2, E8M0, FORMATS, decode, decode_e8m0
from tests.fp8 import oracle


@pytest.mark.parametrize("fmt", FORMATS)
def test_decode_of_every_byte(fmt: str) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FORMATS[fmt].dtype)
    np.testing.assert_array_equal(decode(codes).double().numpy(), oracle.TABLE[fmt])


def test_decode_of_every_pair_of_bytes_in_e4m3() -> None:
    pairs = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.uint8)
    np.testing.assert_array_equal(decode(pairs.view(E4M3.dtype)).double().numpy(), oracle.TABLE["e4m3"][pairs.numpy()])


@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 8])
def test_decode_any_offset_and_count(start: int, count: int) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(E4M3.dtype)
    np.testing.assert_array_equal(
        decode(codes[start : start + count]).numpy(), oracle.TABLE["e4m3"][start : start + count]
    )


def test_decode_follows_strides_and_keeps_the_shape() -> None:
    codes = torch.arange(252, dtype=torch.int32).to(torch.uint8).view(E4M3.dtype).view(2, 6, 21)
    turned = codes.permute(2, 0, 1)
    out = decode(turned)
    assert out.shape == (21, 2, 6) and out.is_contiguous()
    np.testing.assert_array_equal(out.numpy(), oracle.TABLE["e4m3"][turned.view(torch.uint8).numpy()])


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_format_constants(fmt) -> None:
    values = oracle.FINITE[fmt.name]
    assert fmt.max == values[-1] == 1.75 * 2.0**fmt.max_exponent == torch.finfo(fmt.dtype).max
    assert fmt.min_subnormal == values[1]
    assert fmt.min_normal == values[2**fmt.mantissa_bits] == torch.finfo(fmt.dtype).smallest_normal
    assert fmt.has_inf == bool(np.isinf(oracle.TABLE[fmt.name]).any())
    assert math.isnan(oracle.TABLE[fmt.name][0x7F])


def test_every_e8m0_byte() -> None:
    scale = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(E8M0)
    expected = np.array([2.0 ** (b - 127) for b in range(255)] + [math.nan])
    np.testing.assert_array_equal(decode_e8m0(scale).double().numpy(), expected)
