"""Small checkpoints are deterministic, complete and load in stock transformers."""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, GenerationConfig

from octavo import models
from octavo.base.model_families import tiny_families
from octavo.cli import tiny as command
from octavo.models.structure.skeleton import auto_class
from octavo.models.tiny import tiny
from octavo.models.tiny.configs import CHECKPOINTS
from tests.models.conftest import auto_config, batch, some_image


def contents(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("family", tiny_families())
def test_stock_classes_load_it_and_agree(checkpoint, family):
    folder = checkpoint(family)
    model = models.load(folder)
    vision = models.describe(model).has_vision
    auto = auto_class(model.config)
    inputs, config = batch(models.load_processor(folder), image=vision), auto_config(folder)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, auto.from_pretrained(folder, config=config)(**inputs).logits)
    assert type(AutoModel.from_pretrained(folder)).__name__.lower().startswith(family.split("_")[0])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    media = ("<vila/sentinel>", "<image>", "<vila/video>")  # behind the table, as published
    outside = sum(token in tokenizer.get_vocab() for token in media)
    assert len(tokenizer) - outside <= model.config.get_text_config().vocab_size <= 512
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
    text = model.config.get_text_config()
    assert (text.eos_token_id, text.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl"])
def test_config_and_tokenizer_agree_on_image_tokens(checkpoint, family):
    config, tokenizer = models.read_config(checkpoint(family)), models.load_tokenizer(checkpoint(family))
    for field, token in (
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ):
        assert getattr(config, field) == tokenizer.convert_tokens_to_ids(token) < len(tokenizer)


@pytest.mark.parametrize(
    ("family", "name", "image", "video"),
    [
        ("qwen3_vl", "Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"),
        ("qwen2_5_vl", "Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
        ("internvl", "InternVLProcessor", "GotOcr2ImageProcessor", "InternVLVideoProcessor"),
        ("glm46v", "Glm46VProcessor", "Glm46VImageProcessor", "Glm46VVideoProcessor"),
        ("glm4v_moe", "Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
    ],
)
def test_files_have_stock_class_names(checkpoint, family, name, image, video):
    def read(file):
        return json.loads((checkpoint(family) / file).read_text())

    assert read("processor_config.json")["processor_class"] == read("tokenizer_config.json")["processor_class"] == name
    assert read("preprocessor_config.json")["image_processor_type"] == image
    assert read("video_preprocessor_config.json")["video_processor_type"] == video


def test_the_command_names_every_family():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    [families] = [one.help for one in parser._actions if one.dest == "family"]
    assert families.startswith("one of ")
    assert sorted(families.removeprefix("one of ").split(", ")) == sorted(tiny_families())


@pytest.mark.parametrize("family", tiny_families())
def test_every_family_has_the_size_that_the_command_writes(family):
    ids = defaultdict(itertools.count().__next__)  # whatever its tokens are called
    config = CHECKPOINTS[family].config(tiny.SIZES[0], 512, ids)
    assert models.describe(models.empty(config)).layer_globs
    assert config.get_text_config().hidden_size == 128


def test_the_demos_model(tmp_path):
    folder = tiny.write("qwen3_vl", tmp_path / "demo")
    model = models.empty(folder)
    assert 1.1e6 < models.parameter_count(model) < 1.4e6
    assert model.config.vision_config.patch_size == 4 and len(model.config.vision_config.deepstack_visual_indexes) == 2
    processor = models.load_processor(folder)
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "first?"}]}]
    for question in ("second?", "third?", "fourth?"):
        turns += [{"role": "assistant", "content": "3"}, {"role": "user", "content": question}]
    turns.append({"role": "assistant", "content": "3"})
    text = processor.apply_chat_template(turns, tokenize=False)
    ids = processor(text=[text], images=[some_image()])["input_ids"][0]
    assert len(ids) == 38  # 6 around and in the image, 8 a question with its answer


def test_same_seed_same_bytes_another_seed_other_weights(tmp_path):
    first, same, other = (
        contents(tiny.write("qwen3", tmp_path / name, seed=seed, size="mini"))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == same
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_random_generator_is_unchanged(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    tiny.write("qwen3", tmp_path / "a", size="mini")
    assert torch.equal(torch.rand(1), expected)


def test_words_of_additional_texts_become_tokens(tmp_path):
    folder = tiny.write("qwen3", tmp_path / "a", size="mini", texts=["Elephants trumpet loudly."] * 50)
    tokenizer = models.load_tokenizer(folder)
    assert len(tokenizer("Elephants trumpet loudly.")["input_ids"]) == 3


def test_an_existing_directory(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    tiny.write("qwen3", folder, size="mini")  # empty: written
    before = contents(folder)
    tiny.write("qwen3", folder, size="mini")  # the same: left
    assert contents(folder) == before
    with pytest.raises(
        models.ModelError, match="is not the tiny qwen3 that would be written: model.safetensors differs"
    ):
        tiny.write("qwen3", folder, size="mini", seed=1)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(models.ModelError, match="notes.txt differs. Name another directory"):
        tiny.write("qwen3", folder, size="mini")
    assert contents(folder) == {**before, "notes.txt": b"mine"}
    with pytest.raises(models.ModelError, match="is a file"):
        tiny.write("qwen3", folder / "notes.txt", size="mini")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("qwen4_vl", None, "unknown tiny family 'qwen4_vl'; known families: qwen3_vl, "),
        ("qwen3", "big", "unknown size 'big'; known sizes: small, mini"),
    ],
)
def test_unknown_names(tmp_path, family, size, message):
    with pytest.raises(models.ModelError, match=message):
        tiny.write(family, tmp_path / "a", size=size)
    assert list(tmp_path.iterdir()) == []
