"""NaN and infinity in tensors of every kind, found by name."""

from __future__ import annotations

import pytest
import torch

from octavo import fp8
from octavo.fp8.weights import Fp8Weight, codes_of_frozen


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("at", [0, 1, 4095, 70_000])
def test_nonfinite_values_are_found(dtype: torch.dtype, value: float, at: int):
    top = torch.finfo(dtype).max
    good = torch.tensor([top, -top, 0.0], dtype=torch.float64).repeat(30_000).to(dtype)
    bad = good.view(-1, 2).mT.clone()
    bad[at % 2, at // 2] = value  # not contiguous
    named = [("empty", good[:0]), ("b", bad), ("good", good), ("whole", torch.arange(3)), ("a", bad.mT)]
    assert fp8.find_nonfinite(named) == ["b", "a"]


def test_codes_scales_and_masters_are_checked():
    weight = torch.randn(130, 256)
    e8m0 = torch.tensor([0, 254, 127], dtype=torch.uint8)
    values = {"frozen": fp8.freeze_weight(weight), "e8m0": e8m0.view(torch.float8_e8m0fnu)}
    values["master"] = Fp8Weight.of(weight, fp8.freeze_weight(weight).source)
    assert not fp8.find_nonfinite(values.items())
    codes_of_frozen(values["frozen"]).data.view(torch.uint8)[129, 255] = 0xFF
    assert fp8.find_nonfinite(values.items()) == ["frozen"]
    values["scaled"] = fp8.freeze_weight(weight)
    codes_of_frozen(values["scaled"]).scale[1, 1] = torch.inf
    e8m0[2] = 0xFF
    weight[3, 4] = torch.nan
    assert fp8.find_nonfinite(values.items()) == ["frozen", "e8m0", "master", "scaled"]
