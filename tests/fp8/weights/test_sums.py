"""Checksums of weights and of their codes: every change is seen, nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.weights import changed_weights, sums, weight_sums

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 6))
    return fp8.apply(made, fp8.plan(made, "blockwise"))


def changed(m: nn.Module, write) -> list[str]:
    before = weight_sums(m)
    with torch.no_grad():
        write()
    return changed_weights(before, weight_sums(m))


def test_reads_and_recasts_do_not_change_sums():
    m = model()
    assert not changed(m, lambda: m(X)) and not changed(m, lambda: fp8.invalidate(m)) and not changed(m, lambda: m(X))
    m(X).sum().backward()
    assert not changed(m, lambda: m.zero_grad())


@pytest.mark.parametrize("row", [0, 31])
def test_flipped_bit_and_swapped_words_change_sum(row: int):
    m = model()
    weight, bias = m[0].weight.data, m[1].bias.data
    assert changed(m, lambda: weight[row].view(torch.int32)[7].bitwise_xor_(1)) == ["0.weight"]
    assert changed(m, lambda: weight.copy_(weight.roll(row + 1, 0))) == ["0.weight"] * (row == 0)
    assert changed(m, lambda: bias.copy_(bias.flip(0))) == ["1.bias"]


def test_codes_have_separate_sums():
    m = model()
    m(X)
    (codes,) = m[0]._site.codes._codes.values()
    (name,) = changed(m, lambda: codes.data.view(torch.uint8)[4, 4].bitwise_xor_(1))
    assert name.startswith("0.weight (its codes in e4m3")
    (name,) = changed(m, lambda: codes.scale.mul_(2))
    assert name.startswith("0.weight (the scales of its codes in")


def test_swapped_pieces_change_sum(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sums, "_WORDS_ON_CPU", 8)
    m = model()
    m.register_parameter("odd", nn.Parameter(torch.arange(1, 8, dtype=torch.float16)))
    m.register_parameter("none", nn.Parameter(torch.zeros(0)))
    assert not changed(m, lambda: m.odd.neg_().neg_()) and weight_sums(m)["none"] == 0
    assert changed(m, lambda: m.odd[6].add_(1)) == ["odd"]
    assert changed(m, lambda: m[0].weight.copy_(m[0].weight.flatten().roll(16).view(32, 64))) == ["0.weight"]
