"""Patches and features of a batch's images, computed from input shapes and by the model."""

from __future__ import annotations

import pytest
import torch

from octavo import models
from octavo.base.model_families import trained_families
from tests.models.conftest import some_image

OWN = {"llavaonevision1_5": 2}  # class tokens, one an image, which are no patches


@pytest.mark.parametrize("family", trained_families("images"))
def test_patches_and_features_are_those_of_the_model(checkpoint, family):
    """FLOPs, planned tokens and the distribution over ranks depend on these."""
    model, processor = models.load(checkpoint(family)), models.load_processor(checkpoint(family))
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "first?"}]}]
    text = processor.apply_chat_template(turn, tokenize=False)
    images = [some_image(0, (40, 24)), some_image(1, (16, 16))]
    batch = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    described, seen = models.describe(model), []
    first = next(block for name, block in described.layers(model) if name.startswith(described.tower))

    def count(module, args, kwargs):
        [hidden] = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)][:1]
        seen.append(hidden.shape[:-1].numel())

    first.register_forward_pre_hook(count, with_kwargs=True)
    with torch.no_grad():
        model(**batch)
    vision = models.vision_of(model.config)
    patches = vision.patches(batch)
    assert sum(patches) == sum(seen) - OWN.get(family, 0)
    if family == "llava_onevision":  # what of a tile is padding is left out behind the projector
        return
    places = int((batch["input_ids"] == described.image_token_id).sum())
    assert sum(vision.features(count) + vision.ends for count in patches) == places
