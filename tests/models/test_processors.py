"""Processors, with torchvision and without."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from octavo import models
from octavo.base.model_families import tiny_families, trained_families
from octavo.models import processors
from tests.models.conftest import batch, conversation, some_image

# of a whole image, with its tiles and line breaks
FEATURES = {"llava": 16, "llava_onevision": 36, "smolvlm": 20, "nvila": 17, "nvila_lite": 6}


@pytest.mark.parametrize("family", trained_families("images"))
def test_an_image_becomes_as_many_tokens_as_features(checkpoint, family):
    model = models.load(checkpoint(family))
    processor = models.load_processor(checkpoint(family))
    inputs = batch(processor, image=True)
    assert (inputs["input_ids"] == models.describe(model).image_token_id).sum() == FEATURES.get(family, 4)
    assert "pixel_values" in inputs
    with torch.no_grad():
        seen, other = (model(**batch(processor, image=True, seed=s)).logits for s in (0, 1))
    assert not torch.equal(seen, other)


@pytest.mark.parametrize("family", tiny_families())
def test_text_and_answers(checkpoint, family):
    processor = models.load_processor(checkpoint(family))
    inputs = batch(processor, image=False)
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape and "pixel_values" not in inputs
    prompt = processor.apply_chat_template(conversation(False)[:1], tokenize=False, add_generation_prompt=True)
    whole = processor.apply_chat_template(conversation(False)[:2], tokenize=False)
    assert whole.startswith(prompt) and whole.rstrip().endswith(processor.tokenizer.eos_token)
    # transformers splits words of Qwen3.5 by a rule of its own, whatever tokenizer.json says: a digit stands alone
    digit = "3" if family.startswith("qwen3_5") else " 3"
    assert len(processor.tokenizer(digit, add_special_tokens=False)["input_ids"]) == 1


@pytest.mark.parametrize("family", tiny_families())
def test_system_turns_and_any_text_are_rendered(checkpoint, family):
    tokenizer = models.load_tokenizer(checkpoint(family))
    messages = [{"role": "system", "content": "Answer in German."}, *conversation(False)]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "Answer in German." in text and text.index("German") < text.index("first?")
    for sample in (text, "Grüße, 世界 🙂\n\n\ttab  two", "", " "):
        assert tokenizer.decode(tokenizer(sample, add_special_tokens=False)["input_ids"]) == sample


def test_rows_with_and_without_images_in_one_call(checkpoint):
    processor = models.load_processor(checkpoint("qwen3_vl"))
    texts = [processor.apply_chat_template(conversation(image), tokenize=False) for image in (True, False)]
    inputs = processor(text=texts, images=[some_image()], padding=True, return_tensors="pt")
    assert inputs["input_ids"].shape[0] == 2 and inputs["image_grid_thw"].tolist() == [[1, 4, 4]]


@pytest.mark.parametrize("family", ["qwen3", "llama", "mpt"])
def test_a_text_model_refuses_images(checkpoint, family):
    processor = models.load_processor(checkpoint(family))
    assert isinstance(processor, models.TextProcessor)
    with pytest.raises(models.ModelError, match="a text-only model received 1 image"):
        processor(text=["first?"], images=[some_image()])
    with pytest.raises(models.ModelError, match="max_pixels is set, but .* is a text-only model"):
        models.load_processor(checkpoint(family), max_pixels=4096)


@pytest.mark.parametrize(
    ("limits", "tokens"), [({}, 64), ({"max_pixels": 1024}, 16), ({"max_pixels": 64}, 1), ({"min_pixels": 16384}, 256)]
)
def test_pixel_limits_of_qwen(checkpoint, limits, tokens):
    processor = models.load_processor(checkpoint("qwen3_vl"), **limits)
    text = processor.apply_chat_template(conversation(True), tokenize=False)
    inputs = processor(text=[text], images=[some_image(size=(64, 64))], return_tensors="pt")
    assert inputs["image_grid_thw"].prod().item() == 4 * tokens
    assert (inputs["input_ids"] == processor.image_token_id).sum() == tokens


@pytest.mark.parametrize(("family", "tokens"), [("glm4v", 4), ("ernie4_5_vl_moe", 4), ("mistral3", 4), ("smolvlm", 4)])
def test_max_pixels_limits_each_image(checkpoint, family, tokens):
    """Also for GLM, whose limit counts both frames of an image."""
    processor = models.load_processor(checkpoint(family), max_pixels=256)
    text = processor.apply_chat_template(conversation(True), tokenize=False)
    inputs = processor(text=[text], images=[some_image(size=(64, 64))], return_tensors="pt")
    assert (inputs["input_ids"] == processor.image_token_id).sum() == tokens


@pytest.mark.parametrize(
    ("family", "file", "entry", "message"),
    [
        ("gemma3", "processor_config.json", {"image_seq_length": 5}, "has image_seq_length 5, .* requires 4"),
        ("smolvlm", "preprocessor_config.json", {"max_image_size": {"longest_edge": 32}}, "has max_image_size"),
        ("llava_onevision", "preprocessor_config.json", {"image_grid_pinpoints": [[16, 16]]}, "image_grid_pinpoints"),
        ("mistral3", "processor_config.json", {"spatial_merge_size": 1}, "spatial_merge_size 1, .* requires 2"),
    ],
)  # fmt: skip
def test_processor_files_that_contradict_the_model(checkpoint, tmp_path, family, file, entry, message):
    folder = Path(shutil.copytree(checkpoint(family), tmp_path / "model"))
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | entry))
    with pytest.raises(models.ModelError, match=message):
        models.load_processor(folder)


@pytest.mark.parametrize(
    ("limits", "tiles"), [({}, 5), ({"max_pixels": 700}, 3), ({"max_pixels": 256}, 1), ({"min_pixels": 1281}, 7)]
)
def test_tile_limits_of_internvl(checkpoint, limits, tiles):
    processor = models.load_processor(checkpoint("internvl"), **limits)
    text = processor.apply_chat_template(conversation(True), tokenize=False)
    inputs = processor(text=[text], images=[some_image(size=(96, 16))], return_tensors="pt")
    assert inputs["pixel_values"].shape == (tiles, 3, 16, 16)
    assert (inputs["input_ids"] == processor.image_token_id).sum() == 4 * tiles


@pytest.mark.parametrize(
    ("family", "limits", "message"),
    [
        ("qwen3_vl", {"max_pixels": 63}, "max_pixels 63 is smaller than one token of this model. Use at least 64"),
        ("internvl", {"max_pixels": 255}, "max_pixels 255 is smaller than one tile of this model. Use at least 256"),
        ("qwen3_vl", {"max_pixels": 100, "min_pixels": 200}, "min_pixels 200 is larger than max_pixels 100"),
        ("qwen3_vl", {"min_pixels": 0}, "min_pixels 0 is smaller than one token"),
        (
            "mistral3",
            {"min_pixels": 64},
            "min_pixels cannot be applied to PixtralImageProcessor.*has a fixed rule for enlarging images",
        ),
        ("gemma3", {"max_pixels": 64}, "max_pixels cannot be applied to Gemma3ImageProcessor.*one of fixed sizes"),
        ("llava_onevision", {"max_pixels": 64}, "max_pixels cannot be applied to LlavaOnevisionImageProcessor"),
    ],
)
def test_impossible_limits(checkpoint, family, limits, message):
    with pytest.raises(models.ModelError, match=message):
        models.load_processor(checkpoint(family), **limits)


def test_incomplete_folders(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint("qwen3_vl"), tmp_path / "model"))
    (folder / "processor_config.json").unlink()
    assert models.load_processor(folder).tokenizer is not None  # the published folders have no such file
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(models.ModelError, match="has no preprocessor_config.json"):
        models.load_processor(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(models.ModelError, match="tokenizer.json is not JSON"):
        models.load_processor(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(models.ModelError, match="has no tokenizer.json"):
        models.load_processor(folder)


def test_a_vision_family_that_is_not_described(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint("qwen3_vl"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "vipllava"}))
    with pytest.raises(models.ModelError, match="no processor for model_type 'vipllava'"):
        models.load_processor(folder)


def rewrite(file: Path, **changes) -> None:
    """Change fields of a JSON file; None removes one."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("processor_config.json", {"image_seq_length": 10**9}),
        ("processor_config.json", {"image_seq_length": 0}),
        ("processor_config.json", {"image_seq_length": -1}),
        ("processor_config.json", {"image_seq_length": 5}),
        ("preprocessor_config.json", {"size": {"height": 32, "width": 32}}),
        ("config.json", {"image_token_id": 3}),
    ],
)
def test_unsupported_tiles_are_rejected(checkpoint, tmp_path, file, changes):
    folder = Path(shutil.copytree(checkpoint("internvl"), tmp_path / "model"))
    rewrite(folder / file, **changes)
    with pytest.raises(models.ModelError, match=f"{folder}.*{next(iter(changes)).replace('size', 'sizes')}"):
        models.load_processor(folder)


def test_the_layout_of_published_qwen_folders(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint("qwen2_5_vl"), tmp_path / "model"))
    (folder / "processor_config.json").unlink()
    (folder / "video_preprocessor_config.json").unlink()
    # Qwen2.5-VL: limits beside the sizes, the slow class's name, the template as JSON
    rewrite(folder / "preprocessor_config.json", size=None, min_pixels=256, max_pixels=1024)
    rewrite(folder / "preprocessor_config.json", image_processor_type="Qwen2VLImageProcessorFast")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    for limits, tokens in (({}, 16), ({"max_pixels": 512}, 4), ({"min_pixels": 4096}, 64)):
        processor = models.load_processor(folder, **limits)
        text = processor.apply_chat_template(conversation(True), tokenize=False)
        inputs = processor(text=[text], images=[some_image(size=(64, 64))], return_tensors="pt")
        assert (inputs["input_ids"] == processor.image_token_id).sum() == tokens


def test_processor_equals_auto_processor_with_torchvision(checkpoint):
    pytest.importorskip("torchvision")
    from transformers import AutoProcessor

    for family in trained_families("images"):
        if family == "smolvlm":  # its stock class also wants num2words
            continue
        stock = AutoProcessor.from_pretrained(checkpoint(family))
        octavo_model = models.load_processor(checkpoint(family))
        assert type(stock) in type(octavo_model).__mro__ or family == "mistral3"
        assert type(stock.image_processor) is type(octavo_model.image_processor)
        assert models.image_backend(octavo_model) == "torchvision"
        assert family in ("mistral3", "gemma3") or stock.video_processor is not None
        expected, actual = batch(stock, image=True), batch(octavo_model, image=True)
        assert set(expected) == set(actual)
        assert all(torch.equal(expected[key], actual[key]) for key in expected)


def test_pillow_is_used_without_torchvision(checkpoint):
    if importlib.util.find_spec("torchvision"):
        pytest.skip("torchvision is installed")
    assert models.image_backend(models.load_processor(checkpoint("internvl"))) == "pil"
    assert models.image_backend(models.load_processor(checkpoint("qwen3"))) is None


def test_a_torchvision_or_torchaudio_of_another_torch(checkpoint, monkeypatch):
    """The PyPI build raises on import with a CPU build of torch."""
    for name in ("stock", "audio"):
        monkeypatch.delitem(sys.modules, f"{processors.__name__}.{name}", raising=False)
        monkeypatch.delattr(processors, name, raising=False)

    def broken() -> bool:
        raise RuntimeError("nms")

    monkeypatch.setattr("transformers.utils.is_torchvision_available", broken)
    monkeypatch.setitem(sys.modules, "transformers.models.qwen2_audio.processing_qwen2_audio", None)
    for family, message in (("qwen3_vl", r"\(RuntimeError: nms\)"), ("qwen2_audio", r"\(\w*Error: .*\)")):
        with pytest.raises(
            models.ModelError, match=rf"cannot be imported {message}\. .*install the build for this torch"
        ):
            models.load_processor(checkpoint(family))
