"""Codes that outlive a write which no layer can see are found, whatever wrote; codes that are right never are."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.weights import stale_codes, stale_codes_message
from tests.fp8.moe.expert_modules import FAMILIES, E, H

X = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))


def network(recipe: str = "blockwise", **more: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 150), nn.Linear(150, 136), nn.Linear(136, 120))
    return fp8.apply(model, fp8.plan(model, fp8.Policy(recipe, **more)))


def numpy_write(weight: torch.Tensor) -> None:
    weight.detach().numpy()[...] *= 1.01


WRITES = {
    "average": lambda w: w.data.lerp_(torch.ones_like(w), 1e-2),
    "swap": lambda w: w.data.copy_(torch.randn_like(w)),
    "foreach": lambda w: torch._foreach_mul_([w.data], 1.01),
    "a view": lambda w: w.data.view(-1)[5000:5050].zero_(),
    "numpy": numpy_write,
    "dlpack": lambda w: torch.from_dlpack(torch.utils.dlpack.to_dlpack(w.detach())).data.mul_(1.01),
    "by hand": lambda w: w.data.sub_(w.grad.mul(1e-1)),
    "one row": lambda w: w.data[77].mul_(1.5),
}


@pytest.mark.parametrize("how", WRITES)
def test_write_through_data_is_found_and_named(how: str) -> None:
    model = network()
    model(X).square().sum().backward()
    assert stale_codes(model) == []
    WRITES[how](model[1].weight)
    assert stale_codes(model) == ["1"]
    fp8.invalidate(model)
    assert stale_codes(model) == []
    model(X)
    assert stale_codes(model) == []


@pytest.mark.parametrize("recipe", fp8.RECIPES)
@pytest.mark.parametrize("codes", ["keep", "both", "recast"])
def test_only_hidden_writes_leave_stale_codes(recipe: str, codes: str) -> None:
    model = network(recipe, weight_codes=codes)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(3):
        model(X * 10.0**step).square().sum().backward()
        assert stale_codes(model, draw=step) == []
        optimizer.step()
        assert stale_codes(model) == [], "what a step makes old is cast again, and no fault"
    model(X)
    model[2].weight.data.mul_(1.01)
    assert stale_codes(model) == (["2"] if codes != "recast" else [])


def test_edge_values_are_not_stale() -> None:
    model = network("rowwise")
    with torch.no_grad():
        model[0].weight[3], model[0].weight[4, 5] = 0.0, float("nan")
        model[1].weight[:, 7], model[1].weight[8, 9] = 1e-30, float("inf")
    model(X)
    assert stale_codes(model) == []
    with torch.no_grad():
        model[0].weight[5] = 0.0
    model(X)
    model[0].weight.data[5].neg_()  # a zero of the other sign
    assert stale_codes(model) == []
    model[1].weight.data[:, 100] = 3.0
    assert stale_codes(model) == ["1"]


def test_large_weight_is_sampled_over_all_rows() -> None:
    model = nn.Sequential(nn.Linear(1024, 512, bias=False), nn.Linear(512, 512))
    fp8.apply(model, fp8.plan(model, "tensorwise"))
    model(torch.randn(2, 1024))
    model[0].weight.data[19].mul_(1.5)
    seen = [draw for draw in range(16) if stale_codes(model, draw) == ["0"]]
    assert len(seen) == 1, "a sample of 32 rows of 512"


def test_detected_writes_are_not_stale() -> None:
    model = network()
    model(X)
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[1].weight.copy_(torch.randn_like(model[1].weight))
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    assert stale_codes(model) == []


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "delayed"])
def test_stale_codes_of_experts_are_found(family: str, recipe: str) -> None:
    """Stored as [E, N, K], or transposed."""
    model = nn.ModuleDict({"experts": FAMILIES[family]()})
    fp8.apply(model, fp8.plan(model, recipe))
    chosen = torch.arange(8).view(4, 2) % E
    model["experts"](torch.randn(4, H), chosen, torch.rand(4, 2)).sum().backward()
    assert stale_codes(model) == []
    model["experts"].down_proj.data[1].mul_(1.01)
    assert stale_codes(model) == ["experts.down_proj"]


@pytest.mark.parametrize("how", ["merge_adapter", "merge_and_unload"])
def test_peft_merge_on_fp8_layers_is_found(how: str) -> None:
    model = network()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["1"], init_lora_weights=False))
    wrapped(X)
    assert stale_codes(wrapped) == []
    merged = getattr(wrapped, how)() or wrapped
    (name,) = stale_codes(merged)
    assert name.split(".")[-2:] == ["1", "base_layer"] if how == "merge_adapter" else name == "1"
    assert "Call octavo.fp8.invalidate(model)" in stale_codes_message([name])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_small_change_of_zero_weight_is_found(recipe: str) -> None:
    """The scale of a block of zeros is 1, under which what a first small step writes is zero again."""
    model = network(recipe)
    with torch.no_grad():
        model[1].weight.zero_()
    model(X)
    assert stale_codes(model) == []
    model[1].weight.data.copy_(torch.randn_like(model[1].weight) * 1e-5)
    assert stale_codes(model) == ["1"]
    fp8.invalidate(model)
    model(X)
    assert stale_codes(model) == []
