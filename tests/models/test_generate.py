"""Greedy answers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from PIL import Image

from octavo import models
from octavo.base.model_families import tiny_families
from octavo.checkpoint import verify
from tests.models.conftest import conversation, labels, some_image


def teach(model, processor, answer: str, image: bool) -> None:
    """A few steps on one conversation, enough to generate its answer."""
    turns = [conversation(image)[0], {"role": "assistant", "content": answer}]
    text = processor.apply_chat_template(turns, tokenize=False)
    inputs = processor(
        text=[text], images=[some_image()] if image else None, return_tensors="pt", add_special_tokens=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(12):
        model(**inputs, labels=labels(model, inputs)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# Families whose images are many tokens would want more steps than these
@pytest.mark.parametrize("family", [f for f in tiny_families() if f not in ("llava", "llava_onevision", "smolvlm")])
def test_trained_model_generates_learned_answer(checkpoint, family):
    model = models.load(checkpoint(family)).train()
    processor = models.load_processor(checkpoint(family))
    image = models.describe(model).has_vision
    teach(model, processor, "7 8", image)
    answer = models.generate(
        model, processor, conversation(image)[:1], [some_image()] if image else [], max_new_tokens=6
    )
    assert answer == "7 8"
    assert model.training


def test_max_new_tokens_and_determinism(checkpoint):
    model, processor = models.load(checkpoint("qwen3")), models.load_processor(checkpoint("qwen3"))
    one, again = (models.generate(model, processor, conversation(False)[:1], [], 3) for _ in range(2))
    assert one == again and len(processor.tokenizer(one)["input_ids"]) <= 4


@pytest.mark.parametrize(
    ("messages", "images", "tokens", "message"),
    [
        (conversation(True)[:1], [], 4, "1 image part for 0 images"),
        (conversation(False)[:1], [some_image()], 4, "0 image parts for 1 image"),
        ([], [], 4, "there are no messages"),
        (conversation(False)[:1], [], 0, "max_new_tokens is 0"),
    ],
)
def test_errors(checkpoint, messages, images, tokens, message):
    model, processor = models.load(checkpoint("qwen3_vl")), models.load_processor(checkpoint("qwen3_vl"))
    with pytest.raises(models.ModelError, match=message):
        models.generate(model, processor, messages, images, tokens)


def test_processor_errors_are_reported(checkpoint):
    model, processor = models.load(checkpoint("qwen3_vl")), models.load_processor(checkpoint("qwen3_vl"))
    spelt = [{"role": "user", "content": "<|image_pad|>"}]
    with pytest.raises(models.ModelError, match="the processor rejects the prompt or its images"):
        models.generate(model, processor, spelt, [], 2)
    thin = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    with pytest.raises(models.ModelError, match="Images must be at least one patch wide"):
        models.generate(model, processor, thin, [Image.new("RGB", (2000, 2))], 2)


def test_missing_chat_template_and_invalid_stop_tokens_are_reported(checkpoint, tmp_path):
    folder = tmp_path / "qwen3"
    shutil.copytree(checkpoint("qwen3"), folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(models.ModelError, match=r"no chat template \(chat_template.jinja\)"):
        models.generate(models.load(folder), models.load_processor(folder), [{"role": "user", "content": "a"}])
    for text, why in (
        ("[]", "contains a list; expected an object"),
        ("[1", "is not JSON"),
        ('{"eos_token_id": "x"}', "eos_token_id is 'x'"),
    ):
        (folder / "generation_config.json").write_text(text)
        with pytest.raises(models.ModelError, match=f"generation_config.json.* {why}"):
            models.load(folder)
        assert any(f.file == "generation_config.json" for f in verify(folder, quick=True).findings)


#: in version 0.4.0 each changed an answer, ended it with a traceback, or was passed over in silence
SETTINGS = {
    "do_sample": True, "num_beams": 3, "repetition_penalty": 50.0, "no_repeat_ngram_size": 1, "guidance_scale": 3.0,
    "forced_eos_token_id": 5, "suppress_tokens": [*range(440)], "begin_suppress_tokens": [*range(440)],
    "sequence_bias": [[[5], 50.0]], "max_time": 1e-4, "stop_strings": ["a"],
    "return_dict_in_generate": True, "dola_layers": "high",
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_greedy_and_ignored_settings_are_reported(checkpoint, text_folder, name):
    folder, answer = text_folder
    options = json.loads((checkpoint("qwen3") / "generation_config.json").read_text()) | {name: SETTINGS[name]}
    (folder / "generation_config.json").write_text(json.dumps(options))
    model, processor = models.load(folder), models.load_processor(folder)
    before = model.generation_config.to_dict()
    assert models.generate(model, processor, conversation(False)[:1], [], 6) == answer
    assert model.generation_config.to_dict() == before
    assert f"settings {name}=" in models.ignored_settings(model)


@pytest.fixture(scope="module")
def text_folder(checkpoint, tmp_path_factory):
    """A copy of a text model's folder whose generation settings have only the end token, and its answer."""
    folder = tmp_path_factory.mktemp("greedy") / "qwen3"
    shutil.copytree(checkpoint("qwen3"), folder)
    model = models.load(folder)
    assert models.ignored_settings(model) is None
    return folder, models.generate(model, models.load_processor(folder), conversation(False)[:1], [], 6)


def test_tokens_that_end_an_answer_are_kept(checkpoint, text_folder):
    model, processor = models.load(checkpoint("qwen3")), models.load_processor(checkpoint("qwen3"))
    model.generation_config.eos_token_id = processor.tokenizer.encode(text_folder[1])[-1:]
    answer = models.generate(model, processor, conversation(False)[:1], [], 6)
    assert answer != text_folder[1] and text_folder[1].startswith(answer)
