"""Another attention in stock models: the same losses and outputs, through transformers' own registry."""

from __future__ import annotations

import json

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from octavo import models
from octavo.fp8.blocks.attention import grouped_attention
from octavo.models import attention, tiny
from tests.models.conftest import batch

FAMILIES = [f for f in tiny.FAMILIES if f != "mpt"]  # MPT computes its scores itself


def step(model, inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def padded(inputs: dict) -> dict:
    """Two rows, the second with padding in front: a mask for every layer."""
    twice = {name: torch.cat((x, x)) if name != "image_grid_thw" else x.repeat(2, 1) for name, x in inputs.items()}
    twice["attention_mask"][1, :3] = 0
    return twice


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pad", [False, True])
def test_losses_are_those_of_sdpa(checkpoint, family, pad):
    model = models.load(checkpoint(family)).train()
    inputs = dict(batch(models.load_processor(checkpoint(family)), image=models.describe(model).has_vision))
    inputs = padded(inputs) if pad else inputs
    loss, grads = step(model, inputs)
    calls = []

    def counted(*args, **kwargs):
        calls.append(args[0].shape)
        return grouped_attention(*args, **kwargs)

    name = models.use_attention(model, counted)
    assert name == "octavo_counted"
    ours, own = step(model, inputs)
    assert torch.equal(loss, ours)
    assert len(calls) >= model.config.get_text_config().num_hidden_layers
    for key, grad in grads.items():
        assert torch.allclose(own[key], grad, rtol=1e-4, atol=1e-6), key
    before = len(calls)
    with torch.no_grad():
        model(**inputs)
    assert len(calls) == before, "without gradient the stock attention runs"


def test_vision_towers_take_it_too(checkpoint):
    model = models.load(checkpoint("qwen3_vl")).train()
    inputs = dict(batch(models.load_processor(checkpoint("qwen3_vl")), image=True))
    heads = []

    def seen(q, k, v, *rest, **kwargs):
        heads.append((q.shape[1], k.shape[1], kwargs["is_causal"]))
        return grouped_attention(q, k, v, *rest, **kwargs)

    models.use_attention(model, seen)
    step(model, inputs)
    assert {h for h in heads if not h[2]} and {h for h in heads if h[2]}


def test_nothing_of_it_is_saved_and_it_can_be_taken_back(checkpoint, tmp_path):
    source = checkpoint("qwen3")
    model = models.load(source)
    models.use_attention(model, grouped_attention)
    models.use_attention(model, grouped_attention)  # twice is once
    out = models.save_hf(model, source, tmp_path / "hf")
    assert "octavo" not in (out / "config.json").read_text()
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3"
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_does_not_use_sdpa_is_refused(checkpoint):
    model = models.load(checkpoint("qwen3"))
    model.set_attn_implementation("eager")
    with pytest.raises(models.ModelError, match="by 'eager', and only 'sdpa'"):
        models.use_attention(model, grouped_attention)
    with pytest.raises(models.ModelError):
        models.use_attention(models.load(checkpoint("mpt")), grouped_attention)


def test_decoding_and_special_arguments_stay_stock(monkeypatch):
    asked = []
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, attention.STOCK, lambda *a, **k: asked.append(k))
    forward = attention._called_as_transformers_does(lambda *a, **k: pytest.fail("called"))
    x = torch.ones(1, 2, 4, 8)
    forward(torch.nn.Module(), x[:, :, :1], x, x, None)
    forward(torch.nn.Module(), x[:, :, :2], x, x, None)
    forward(torch.nn.Module(), x, x, x, None, position_bias=x)
    assert len(asked) == 3


def test_generation_is_that_of_sdpa(checkpoint):
    model = models.load(checkpoint("qwen3"))
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = model.generate(ids, max_new_tokens=6, do_sample=False)
    models.use_attention(model, grouped_attention)
    assert torch.equal(plain, model.generate(ids, max_new_tokens=6, do_sample=False))
