"""Exchanges in FP8 codes give the same values as casting after the exchange."""

from __future__ import annotations

import pytest
import torch

from octavo import fp8
from octavo.fp8.arithmetic.cast import CastSpec, dequantize, quantize
from octavo.fp8.dense import WireFormat
from octavo.parallel import Layout, World, WorldError, enable_fp8_exchange


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "spec", [CastSpec(), CastSpec("e4m3", (1, 32), "e8m0"), CastSpec("e5m2")], ids=["1x128", "1x32", "e5m2"]
)
def test_cast_after_exchange_equals_cast_before_exchange(spec: CastSpec, dtype: torch.dtype):
    """Blocks with all magnitudes, zeros, NaN, infinity and values that underflow."""
    torch.manual_seed(0)
    rows = (torch.randn(300, 256) * torch.exp(4 * torch.randn(300, 256))).to(dtype)
    rows[3], rows[4, 5], rows[5], rows[6], rows[7, 200] = 0, float("nan"), 1e-35, 1e30, float("inf")
    coding = WireFormat(spec)
    sent = coding.pack(rows)
    assert sent.shape[1] == coding.bytes_per_value * 256
    came = coding.unpack(sent, 256, dtype)
    wanted, actual = (dequantize(quantize(x, spec)) for x in (rows, came))
    assert torch.equal(wanted.isnan(), actual.isnan())
    assert torch.equal(wanted.nan_to_num(), actual.nan_to_num())
    assert coding.unpack(coding.pack(rows[:0]), 256, dtype).shape == (0, 256)


def test_codes_are_exchanged_only_where_exact():
    block = fp8.recipe("blockwise")
    assert WireFormat.for_inputs(block, 128) == WireFormat.for_gradients(block, 256) == WireFormat(CastSpec())
    refused = [(block, 96), (fp8.recipe("rowwise"), 128), (fp8.recipe("blockwise", wgrad="bf16"), 128), (None, 128)]
    assert [WireFormat.for_inputs(recipe, piece) for recipe, piece in refused] == [None] * 4
    with pytest.raises(WorldError, match="no layer casts exchanged values"):
        enable_fp8_exchange(torch.nn.Linear(2, 2), World(size=2, layout=Layout(context=2)), 128)
