"""The dummy image runs the tower without changing results."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from octavo import models
from octavo.base.model_families import trained_families
from octavo.models.forward.unused_towers import attach_dummy_image, attach_dummy_sound, attach_idle_experts
from tests.models.conftest import batch

VISION = trained_families("images")


def step(model, inputs):
    model.zero_grad(set_to_none=True)
    last = model.config.get_text_config().vocab_size - 1  # NVILA's image token has no embedding
    loss = model(**inputs, labels=inputs["input_ids"].clamp(max=last)).loss
    loss.backward()
    return loss.detach(), {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def of_images(family, name: str) -> bool:
    return family.component_of(name.rpartition(".")[0]) in ("image_encoder", "image_projector")


@pytest.mark.parametrize("family", VISION)
def test_a_batch_without_images_reaches_the_tower_with_zero_gradients_and_the_same_loss(checkpoint, family):
    model = models.load(checkpoint(family))
    described = models.describe(model)
    inputs, seen = (batch(models.load_processor(checkpoint(family)), image=image) for image in (False, True))
    # Features of a LLaVA are a hidden state before the tower's last layers, which have no gradient with images either.
    unused = {name for name, grad in step(model, seen)[1].items() if grad is None}
    loss, grads = step(model, inputs)
    assert all(grad is None for name, grad in grads.items() if of_images(described, name))

    entered = []

    @contextmanager
    def guard():
        entered.append(1)
        yield

    handle = attach_dummy_image(model, described, lambda: True, guard)
    idle = attach_idle_experts(model, described, guard)
    assert bool(idle) == (family == "ernie4_5_vl_moe")
    with_dummy, dummy_grads = step(model, inputs)
    assert torch.equal(loss, with_dummy)
    assert entered == [1] * (1 + len(idle) // 3)  # three hooks a layer
    assert not unused or "llava" in family or all("e_score_correction_bias" in name for name in unused)
    for name, grad in dummy_grads.items():
        if name in unused:
            assert grad is None
        elif of_images(described, name):
            assert grad is not None and torch.count_nonzero(grad) == 0, name
        else:
            assert torch.equal(grad, grads[name]), name
    for each in (handle, *idle):
        each.remove()
    _, again = step(model, inputs)
    assert all(grad is None for name, grad in again.items() if of_images(described, name))


def test_frozen_tower_runs_without_gradients(checkpoint):
    model = models.load(checkpoint("qwen3_vl"))
    family = models.describe(model)
    models.freeze(model, family, ["image_encoder", "image_projector"])
    calls = []
    model.get_submodule(family.tower).register_forward_hook(lambda *_: calls.append(1))
    attach_dummy_image(model, family, lambda: True)
    _, grads = step(model, batch(models.load_processor(checkpoint("qwen3_vl")), image=False))
    assert calls == [1]
    assert all(grad is None for name, grad in grads.items() if of_images(family, name))


def test_dummy_adds_no_tower_gradients_to_real_images(checkpoint):
    model = models.load(checkpoint("qwen3_vl"))
    family = models.describe(model)
    inputs = batch(models.load_processor(checkpoint("qwen3_vl")), image=True)
    loss, grads = step(model, inputs)
    attach_dummy_image(model, family, lambda: True)
    with_dummy, dummy_grads = step(model, inputs)
    assert torch.equal(loss, with_dummy)
    assert all(torch.equal(grad, dummy_grads[name]) for name, grad in grads.items())
    assert any(torch.count_nonzero(grad) for name, grad in grads.items() if of_images(family, name))


def test_image_experts_that_ran_do_not_run_again(checkpoint):
    model = models.load(checkpoint("ernie4_5_vl_moe"))
    inputs = batch(models.load_processor(checkpoint("ernie4_5_vl_moe")), image=True)
    loss, grads = step(model, inputs)
    attach_idle_experts(model, models.describe(model), lambda: pytest.fail("they ran again"))
    again, same = step(model, inputs)
    assert torch.equal(loss, again)
    assert all(grad is None if (own := same[name]) is None else torch.equal(grad, own) for name, grad in grads.items())


def test_nonfinite_dummy_features_do_not_change_language_model(checkpoint):
    model = models.load(checkpoint("qwen3_vl"))
    family = models.describe(model)
    inputs = batch(models.load_processor(checkpoint("qwen3_vl")), image=False)
    loss, grads = step(model, inputs)
    with torch.no_grad():
        model.model.visual.merger.linear_fc2.bias.fill_(float("inf"))
    attach_dummy_image(model, family, lambda: True)
    with_dummy, dummy_grads = step(model, inputs)
    assert torch.equal(loss, with_dummy)
    assert all(torch.equal(grad, dummy_grads[name]) for name, grad in grads.items() if not of_images(family, name))


def test_disabled_hook_has_no_effect(checkpoint):
    model = models.load(checkpoint("internvl"))
    family = models.describe(model)
    calls = []
    model.get_submodule(family.tower).register_forward_hook(lambda *_: calls.append(1))
    attach_dummy_image(model, family, lambda: False)
    model(**batch(models.load_processor(checkpoint("internvl")), image=False))
    assert calls == []


def test_a_text_model_has_no_dummy_image(checkpoint):
    model = models.load(checkpoint("qwen3"))
    with pytest.raises(models.ModelError, match="qwen3 does not take images"):
        attach_dummy_image(model, models.describe(model), lambda: True)


def test_silence_reaches_the_tower_of_sound_with_zero_gradients_and_the_same_loss(checkpoint):
    model = models.load(checkpoint("qwen2_audio"))
    family = models.describe(model)
    inputs = {"input_ids": torch.arange(5, 15)[None], "attention_mask": torch.ones(1, 10, dtype=torch.int64)}
    loss, grads = step(model, inputs)
    attach_dummy_sound(model, family, lambda: True)
    with_dummy, dummy_grads = step(model, inputs)
    assert torch.equal(loss, with_dummy)
    positions = "model.audio_tower.embed_positions.weight"  # sinusoids, which transformers freezes
    for name, grad in dummy_grads.items():
        if "audio" in family.component_of(name.rpartition(".")[0]):
            assert grads[name] is None and (name == positions or torch.count_nonzero(grad) == 0), name
        else:
            assert torch.equal(grad, grads[name]), name
    with pytest.raises(models.ModelError, match="does not take audio"):
        text = models.load(checkpoint("qwen3"))
        attach_dummy_sound(text, models.describe(text), lambda: True)
