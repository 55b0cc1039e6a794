"""Custom attention in stock models gives the same losses and outputs, through transformers' registry."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from transformers import MptConfig, MptForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from octavo import models
from octavo.base.model_families import tiny_families
from octavo.checkpoint import save_hf
from octavo.fp8.blocks.attention import grouped_attention
from octavo.models import ModelError
from octavo.models.attention import attention, segments
from octavo.parallel import World
from tests.models.conftest import MANY, batch, labels, some_image

FAMILIES = list(tiny_families())
MASKS = ("gemma3", "qwen3_5", "ernie4_5_vl_moe")  # windows, images that see both ways, layers without attention


def step(model, inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs, labels=labels(model, inputs)).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def padded(inputs: dict) -> dict:
    """Two rows, the second with left padding, so that every layer needs a mask."""
    twice = {name: torch.cat((x, x)) if name != "image_grid_thw" else x.repeat(2, 1) for name, x in inputs.items()}
    twice["attention_mask"][1, :3] = 0
    return twice


@pytest.mark.parametrize(
    ("family", "pad"), [*((f, False) for f in FAMILIES), *((f, True) for f in FAMILIES if f in MANY or f in MASKS)]
)
def test_losses_equal_sdpa(checkpoint, family, pad):
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
    actual_value, own = step(model, inputs)
    assert torch.equal(loss, actual_value)
    assert len(calls) >= model.config.get_text_config().num_hidden_layers
    for key, grad in grads.items():
        assert torch.allclose(own[key], grad, rtol=1e-4, atol=1e-6), key
    before = len(calls)
    with torch.no_grad():
        model(**inputs)
    assert len(calls) == before, "without gradient the stock attention runs"


def test_vision_towers_use_the_attention(checkpoint):
    model = models.load(checkpoint("qwen3_vl")).train()
    inputs = dict(batch(models.load_processor(checkpoint("qwen3_vl")), image=True))
    heads = []

    def seen(q, k, v, *rest, **kwargs):
        heads.append((q.shape[1], k.shape[1], kwargs["is_causal"]))
        return grouped_attention(q, k, v, *rest, **kwargs)

    models.use_attention(model, seen)
    step(model, inputs)
    assert {h for h in heads if not h[2]} and {h for h in heads if h[2]}


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_tower_takes_all_images_in_one_call(checkpoint, family, monkeypatch):
    """Images of several sizes, with windows in Qwen2.5-VL; custom attention does not change the tower."""
    model = models.load(checkpoint(family)).train()
    processor = models.load_processor(checkpoint(family))
    images = [some_image(n, (24 + 8 * n, 32)) for n in range(3)]
    text = "".join(f"<|vision_start|>{processor.image_token}<|vision_end|>so" for _ in images)
    inputs = dict(processor(text=[text], images=images, return_tensors="pt"))
    wanted = step(model, inputs)
    calls = []
    own = segments.attend_images
    monkeypatch.setattr(segments, "attend_images", lambda *a: calls.append(a[3].tolist()) or own(*a))
    models.use_kernel(model, "varlen", "image_encoder")
    models.use_attention(model, grouped_attention)
    loss, grads = step(model, inputs)
    assert len(calls) == model.config.vision_config.depth and all(len(edges) > 3 for edges in calls)
    assert torch.allclose(loss, wanted[0], atol=1e-6)
    for key, grad in wanted[1].items():
        assert torch.allclose(grads[key], grad, rtol=1e-4, atol=1e-6), key


def test_each_component_has_its_kernel(checkpoint, monkeypatch):
    model = models.load(checkpoint("qwen3_vl")).train()
    inputs = dict(batch(models.load_processor(checkpoint("qwen3_vl")), image=True))
    calls = []
    monkeypatch.setattr(attention, "prefer_kernel", lambda kernel: calls.append(kernel) or nullcontext())
    tower, decoder = model.config.vision_config.depth, model.config.text_config.num_hidden_layers
    models.use_kernel(model, "math", "image_encoder")
    step(model, inputs)
    assert calls == ["math"] * tower
    models.use_kernel(model, "flash", "foundation")
    models.use_attention(model, grouped_attention)  # each keeps its own
    calls.clear()
    step(model, inputs)
    assert calls == ["math"] * tower + ["flash"] * decoder
    models.use_kernel(model, "sdpa", "image_encoder")
    models.use_kernel(model, "eager", "foundation")
    calls.clear()
    step(model, inputs)
    assert calls == []


def test_unsupported_kernels_of_a_component_are_rejected(checkpoint):
    text = models.load(checkpoint("qwen3"))
    with pytest.raises(ModelError, match="Qwen3ForCausalLM has no image_encoder"):
        models.use_kernel(text, "math", "image_encoder")
    with pytest.raises(ModelError, match="no tower with images of different sizes"):
        models.use_kernel(models.load(checkpoint("internvl")), "varlen", "image_encoder")
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(
        RuntimeError,
        match=r"needs CUDA, a 16-bit dtype and a head dimension of at most 256 that is a multiple of 8, got cpu, ",
    ):
        models.attend("varlen", q, q, q, True)


def test_attention_is_not_saved_and_can_be_undone(checkpoint, tmp_path):
    source = checkpoint("qwen3")
    model = models.load(source)
    models.use_attention(model, grouped_attention)
    models.use_attention(model, grouped_attention)  # twice is once
    out = save_hf(model, source, tmp_path / "hf", World())
    assert "octavo" not in (out / "config.json").read_text()
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3"
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_does_not_use_sdpa_is_refused(checkpoint):
    model = models.load(checkpoint("qwen3"))
    model.set_attn_implementation("eager")
    with pytest.raises(models.ModelError, match="attention 'eager', but only 'sdpa'"):
        models.use_attention(model, grouped_attention)
    with pytest.raises(models.ModelError):
        models.use_attention(
            MptForCausalLM(MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=32, max_seq_len=16)),
            grouped_attention,
        )


def test_decoding_and_special_arguments_stay_stock(monkeypatch):
    calls = []
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, attention.STOCK, lambda *a, **k: calls.append(k))
    forward = attention._transformers_attention(lambda *a, **k: pytest.fail("called"))
    x = torch.ones(1, 2, 4, 8)
    forward(torch.nn.Module(), x[:, :, :1], x, x, None)
    forward(torch.nn.Module(), x[:, :, :2], x, x, None)
    forward(torch.nn.Module(), x, x, x, None, position_bias=x)
    assert len(calls) == 3


def test_generation_equals_sdpa(checkpoint):
    model = models.load(checkpoint("qwen3"))
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = model.generate(ids, max_new_tokens=6, do_sample=False)
    models.use_attention(model, grouped_attention)
    assert torch.equal(plain, model.generate(ids, max_new_tokens=6, do_sample=False))
