"""A decoder with positions of three axes (of Qwen3.5) has the same ones in a composed model as in its own class."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3_5ForConditionalGeneration

from octavo import models
from octavo.models.compose.compose import Parts, compose
from octavo.models.folder.folder import silence_transformers
from octavo.models.forward.packed import Packed
from tests.models.conftest import some_image
from tests.models.small_towers import encode

SIZES = ((40, 32), (32, 64))


@pytest.fixture(scope="module")
def composed(tower, checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """model_type -> folder of a composed model with the decoder of Qwen3.5, whose layers all have full attention."""
    home = tmp_path_factory.mktemp("composed")
    whole = models.load(checkpoint("qwen3_5"))
    text = copy.deepcopy(whole.config.text_config)
    text.layer_types = ["full_attention"] * text.num_hidden_layers
    with silence_transformers():
        AutoModelForCausalLM.from_config(text).save_pretrained(home / "decoder")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(checkpoint("qwen3_5") / name, home / "decoder")
    encoders = {"octavo_vlm": (checkpoint("qwen2_5_vl"), None), "octavo_llava": (tower("dinov3"), "norm_mlp2")}

    def get(kind: str) -> Path:
        if not (home / kind).exists():
            encoder, projector = encoders[kind]
            compose(Parts(encoder, home / "decoder", projector, init_std=0.1), home / kind)
        return home / kind

    return get


def of_transformers(model, whole) -> Qwen3_5ForConditionalGeneration:
    """Qwen3.5's own class around the parts of a composed model."""
    config = whole.config
    config.image_token_id = model.config.image_token_id
    config.text_config = model.config.text_config
    reference = Qwen3_5ForConditionalGeneration(config).eval()
    config.vision_config.spatial_merge_size = model.config.vision.spatial_merge_size
    reference.model.visual, reference.model.language_model = model.model.visual, model.model.language_model
    reference.lm_head = model.lm_head
    reference.generation_config = model.generation_config
    return reference


def questions(processor, count: int = 2):
    """Conversations with one image each, of different sizes, padded on the left."""
    parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    turns = [{"role": "user", "content": parts}]
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    images = [some_image(number, size).convert("RGB") for number, size in enumerate(SIZES)][:count]
    return processor(
        text=[text] * count, images=images, return_tensors="pt", padding=True, padding_side="left",
        add_special_tokens=False,
    )  # fmt: skip


def test_positions_logits_and_answers_are_those_of_qwen3_5(composed, checkpoint) -> None:
    model = models.load(composed("octavo_vlm")).eval()
    processor = models.load_processor(composed("octavo_vlm"))
    reference = of_transformers(model, models.load(checkpoint("qwen3_5")))
    inputs = questions(processor)
    assert not inputs["attention_mask"].all()
    kinds = (inputs["input_ids"] == model.config.image_token_id).long()
    media = {**inputs, "mm_token_type_ids": kinds}
    positions = model.model.get_rope_index(inputs["input_ids"], inputs["image_grid_thw"], inputs["attention_mask"])
    expected = reference.model.get_rope_index(
        inputs["input_ids"], kinds, inputs["image_grid_thw"], attention_mask=inputs["attention_mask"]
    )
    assert all(torch.equal(a, b) for a, b in zip(positions, expected, strict=True))
    assert positions[1].min() < 0  # an image has more tokens than positions
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of transformers' decoders, for the old name of the cache
        assert torch.equal(model(**inputs).logits, reference(**media).logits)
        plain = torch.arange(inputs["input_ids"].shape[1])[None]
        assert not torch.equal(model(**inputs, position_ids=plain).logits, model(**inputs).logits)
        answers = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        assert torch.equal(answers, reference.generate(**media, max_new_tokens=6, do_sample=False))
        # A text after a question with an image counts from 0 again.
        ids = torch.tensor([[5, 6, 7, 8]])
        assert torch.equal(model(input_ids=ids).logits, reference(input_ids=ids).logits)
        assert torch.equal(
            model.generate(ids, max_new_tokens=4, do_sample=False),
            reference.generate(ids, max_new_tokens=4, do_sample=False),
        )


@pytest.mark.parametrize("kind", ["octavo_vlm", "octavo_llava"])
def test_forward_with_a_cache_continues_the_positions(kind: str, composed) -> None:
    model = models.load(composed(kind)).eval()
    processor = models.load_processor(composed(kind))
    inputs = questions(processor, 1)
    later = torch.tensor([[9, 8, 7]])
    both = torch.cat([inputs["input_ids"], later], 1)
    with torch.no_grad():
        media = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
        at_once = model(input_ids=both, **media).logits[:, -3:]
        cache = DynamicCache(config=model.config.text)
        model(input_ids=inputs["input_ids"], **media, past_key_values=cache, use_cache=True)
        continued = model(input_ids=later, past_key_values=cache, use_cache=True).logits
        assert torch.allclose(continued, at_once, atol=1e-5)
        assert model.model.rope_deltas is not None and int(model.model.rope_deltas) < 0
        # a second image, after the first conversation
        twice = torch.cat([both, inputs["input_ids"]], 1)
        two = {name: torch.cat([value, value]) for name, value in media.items()}
        length = inputs["input_ids"].shape[1]
        at_once = model(input_ids=twice, **two).logits[:, -length:]
        cache = DynamicCache(config=model.config.text)
        model(input_ids=both, **media, past_key_values=cache, use_cache=True)
        second = model(input_ids=inputs["input_ids"], **media, past_key_values=cache, use_cache=True)
        assert torch.allclose(second.logits, at_once, atol=1e-5)


@pytest.mark.parametrize("kind", ["octavo_vlm", "octavo_llava"])
def test_engine_and_packs_have_the_positions_of_the_model(kind: str, composed) -> None:
    model = models.load(composed(kind)).eval()
    processor, image = models.load_processor(composed(kind)), some_image(0, (40, 32)).convert("RGB")
    inputs = encode(processor, image)
    tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    answer = models.generate(model, processor, [{"role": "user", "content": parts}], [image], 6)
    assert answer == processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()
    # Two samples in a row have the logits of each alone.
    ids, length = inputs["input_ids"], inputs["input_ids"].shape[1]
    twice, grid = torch.cat([ids, ids], 1), inputs.get("image_grid_thw")
    media = {} if grid is None else {"image_grid_thw": torch.cat([grid, grid])}
    pixels = torch.cat([inputs["pixel_values"]] * 2)
    with torch.no_grad():
        alone = model(**inputs).logits
        packed = Packed(model, models.describe(model))
        positions = packed.positions([0, length, 2 * length], twice, [1, 1], None, media.get("image_grid_thw"))
        assert positions.shape == (4, 1, 2 * length) and int(positions[1:].max()) < length - 1
        with packed.forward([0, length, 2 * length], positions):
            logits = model(
                input_ids=twice, pixel_values=pixels, position_ids=positions, use_cache=False, **media
            ).logits
    for part in logits.split(length, 1):
        assert torch.allclose(part, alone, atol=1e-5)


def test_images_without_their_tokens_are_named(composed) -> None:
    model = models.load(composed("octavo_vlm"))
    token = model.config.image_token_id
    grid = torch.tensor([[1, 4, 4]])
    with pytest.raises(ValueError, match="more image tokens than images"):
        model.model.get_rope_index(torch.tensor([[token] * 5]), grid)
    with pytest.raises(ValueError, match="an image of 2 x 2 tokens has fewer image tokens"):
        model.model.get_rope_index(torch.tensor([[token] * 3 + [1]]), grid)
