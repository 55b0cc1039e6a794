"""NVILA's model code and processor."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import SiglipVisionModel
from transformers.models.internvl.modeling_internvl import InternVLModel

from octavo import data, models
from octavo.models.custom import nvila
from octavo.models.custom.nvila.images import NvilaImages
from octavo.models.custom.nvila.projector import Downsample, Projector
from octavo.models.custom.nvila.tower import Tower
from tests.models.conftest import batch, conversation, some_image
from tests.models.three_folders import edit


def colours(rows: int, columns: int, side: int) -> Image.Image:
    """An image of tiles in row order, each with a different gray value."""
    greys = np.arange(rows * columns, dtype=np.uint8).reshape(rows, columns) * 10
    return Image.fromarray(greys.repeat(side, 0).repeat(side, 1))


# --- the tower ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [False, True])
def test_features_are_those_of_the_last_layer_but_one(head: bool) -> None:
    config = models.tiny_config("nvila_lite").vision_config
    config.vision_use_head = head
    torch.manual_seed(0)
    stock, tower = SiglipVisionModel(config).eval(), Tower(config).eval()
    names = {name.removeprefix("vision_model."): value for name, value in stock.state_dict().items()}
    tower.load_state_dict(names)  # all names, the layer that is not run and the head too
    pixels = torch.randn(2, 3, 16, 16)
    wanted = stock(pixels, output_hidden_states=True).hidden_states[-2]
    assert torch.equal(tower(pixels).flatten(1, 2), wanted)
    assert not torch.equal(wanted, stock(pixels).last_hidden_state)


def test_every_parameter_is_trained_and_unused_layer_has_no_parameters(checkpoint) -> None:
    model = models.load(checkpoint("nvila_lite")).train()
    inputs = batch(models.load_processor(checkpoint("nvila_lite")), image=True)
    model(**inputs).logits.square().mean().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    unread = [name for name, _ in model.named_buffers() if "layers.2." in name or "post_layernorm" in name]
    assert len(unread) == 18
    assert not any("layers.2" in name for name, _ in models.describe(model).layers(model))


# --- the projector --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cells", "side", "tokens"), [(32, 2, 256), (32, 3, 121), (27, 2, 196)])
def test_tokens_of_a_tile(cells: int, side: int, tokens: int) -> None:
    result = Downsample(side)(torch.ones(1, cells, cells, 2))
    assert result.flatten(1, 2).shape == (1, tokens, 2 * side * side)
    whole = -(-cells // side) * side
    assert result.sum() == cells * cells * 2 and (result[:, -1, -1] == 0).any() == (
        whole > cells
    )  # padded below and right


def test_channels_of_a_token_are_row_by_row() -> None:
    """The 2 x 2 case equals transformers' InternVL."""
    patches = torch.arange(16.0).reshape(1, 4, 4, 1)
    result = Downsample(2)(patches)
    assert result[0, 0, 1].tolist() == [2, 3, 6, 7] and result[0, 1, 0].tolist() == [8, 9, 12, 13]
    wide = patches.repeat(1, 1, 1, 2) + torch.tensor([0.0, 100.0])
    assert Downsample(2)(wide)[0, 0, 0].tolist() == [0, 100, 1, 101, 4, 104, 5, 105]
    assert torch.equal(InternVLModel.pixel_shuffle(None, wide, 0.5), Downsample(2)(wide))


def test_weights_have_the_published_numbers() -> None:
    assert sorted({name.split(".")[1] for name in Projector(2, 8, 16).state_dict()}) == ["1", "2", "4"]
    three = Projector(3, 8, 16)
    shapes = {name: tuple(value.shape) for name, value in three.state_dict().items() if name.endswith("weight")}
    assert shapes == {
        "layers.1.weight": (72,), "layers.2.weight": (24, 72), "layers.4.weight": (24,),
        "layers.5.weight": (16, 24), "layers.7.weight": (16, 16),
    }  # fmt: skip
    assert all(layer.approximate == "none" for layer in three.modules() if isinstance(layer, nn.GELU))


def test_another_projector_or_tower_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="the projector 'mlp2x_gelu' is not supported; it must be one of .*mlp_downsample_3x3_fix"
    ):
        nvila.NvilaLiteConfig(projector_type="mlp2x_gelu")
    with pytest.raises(ValueError, match="the tower is a 'intern_vit_6b'"):
        nvila.NvilaLiteConfig(vision_config={"model_type": "intern_vit_6b"})


# --- images ---------------------------------------------------------------------------------------------------------


def test_tiles_are_row_by_row_and_the_whole_image_comes_last() -> None:
    images = NvilaImages(size={"height": 8, "width": 8}, max_patches=6)
    made = images(images=[colours(2, 3, 8)])
    assert made["grids"] == [(7, 1, 1)] == [images.grid(16, 24)]
    greys = [float(np.mean(tile)) for tile in made["pixel_values"]]
    wanted = [(10 * n / 255 - 0.5) / 0.5 for n in range(6)]
    assert np.allclose(greys[:6], wanted, atol=1e-6) and abs(greys[6] - np.mean(wanted)) < 0.01
    assert made["pixel_values"][0].shape == (3, 8, 8)


HOW_MANY = [((8, 8), 1), ((80, 80), 10), ((9, 16), 3), ((8, 100), 13), ((20, 20), 10), ((16, 16), 5)]


@pytest.mark.parametrize(("size", "tiles"), HOW_MANY)
def test_how_many_tiles(size: tuple[int, int], tiles: int) -> None:
    """The closest aspect ratio; on ties the larger grid if the image fills half of it; no thumbnail of one tile."""
    assert images_of().grid(*size) == (tiles, 1, 1)


def images_of(**limits: int) -> NvilaImages:
    """A processor of a model with tiles of 8 x 8 pixels."""
    images = NvilaImages(size={"height": 8, "width": 8})
    images.configure(nvila.NvilaLiteConfig(vision_config={"image_size": 8, "patch_size": 2}, **limits))
    return images


def test_model_config_limits_tiles() -> None:
    """12 by default; configured values may exceed the default of transformers' processor."""
    assert images_of().grid(8, 800)[0] == 13 and images_of(max_tiles=20).grid(8, 800)[0] == 21
    assert images_of(min_tiles=3).grid(8, 8)[0] == 5
    for limits, most in (
        ({}, 13),
        ({"max_tiles": 1}, 1),
        ({"s2_scales": [448, 896]}, 12),
    ):  # planned for
        assert models.vision_of(nvila.NvilaLiteConfig(**limits)).most == most
    for limits in ({"min_tiles": 0}, {"max_tiles": 0}, {"min_tiles": 7, "max_tiles": 6}, {"max_tiles": 65}):
        with pytest.raises(
            ValueError, match=r"min_tiles is \d and max_tiles \d+; they must be from 1 to 64 and in order"
        ):
            images_of(**limits)


@pytest.mark.parametrize("field", ["image_token_id", "newline_token_id", "newlines", "max_tiles", "s2_scales"])
@pytest.mark.parametrize("value", ["1", True, -1, [1.5], {}], ids=str)
def test_nonfinite_numbers_are_rejected(field, value) -> None:
    with pytest.raises(ValueError, match=f"{field} is .*; it must be an integer of at least 0"):
        nvila.NvilaLiteConfig(**{field: value})
    with pytest.raises(ValueError, match="newlines is 65; it must be at most 64"):
        nvila.NvilaLiteConfig(newlines=65)


def test_tiles_are_made_bicubic() -> None:
    image = some_image(1, (20, 9))
    (*tiles, whole) = images_of()(images=[image])["pixel_values"]
    for size, result in (((16, 8), np.concatenate(tiles, 2)), ((8, 8), whole)):
        wanted = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC), dtype=np.float64)
        assert np.allclose(result, ((wanted / 255 - 0.5) / 0.5).transpose(2, 0, 1), atol=1e-5)


# --- text -----------------------------------------------------------------------------------------------------------


def test_placeholders_and_line_breaks_of_tiles(checkpoint) -> None:
    """Each tile has its tokens and two line breaks, which are embeddings of that token in any context."""
    folder = checkpoint("nvila_lite")
    model, processor = models.load(folder), models.load_processor(folder)
    image, text = some_image(0, (16, 40)), "<image>\n\nfirst?"  # as text, line breaks may become one token
    ids = processor(text=[text], images=[image], return_tensors="pt")
    assert len(ids["pixel_values"]) == 4 and (ids["input_ids"] == processor.image_token_id).sum() == 4 * 6
    features = model.model.get_image_features(ids["pixel_values"]).pooler_output
    newline = model.get_input_embeddings().weight[model.config.newline_token_id]
    assert features.shape[:2] == (4, 6) and torch.equal(features[:, 4:], newline.expand(4, 2, -1))
    assert processor._get_num_multimodal_tokens([(40, 16)])["num_image_tokens"] == [24]
    with pytest.raises(ValueError, match="1 placeholder for 2 images"):
        processor(text=[text], images=[image, image])


def test_media_tokens_are_outside_the_table_and_not_labels(checkpoint, tmp_path) -> None:
    folder = checkpoint("nvila_lite")
    model, processor = models.load(folder), models.load_processor(folder)
    rows = model.get_input_embeddings().num_embeddings
    assert rows == model.lm_head.out_features <= model.config.image_token_id
    some_image().save(tmp_path / "a.png")
    turns = [{"from": "human", "value": "<image>\nfirst?"}, {"from": "gpt", "value": "3"}]
    row = data.parse({"image": "a.png", "conversations": turns}, "llava", file="a", row=0, images=tmp_path)
    sample = data.Encoder(processor, 256, train_on_prompt=True).encode(row)
    assert sample.input_ids.max() >= rows and (sample.labels[sample.input_ids >= rows] == -100).all()
    ids, pixels = torch.from_numpy(sample.input_ids)[None], torch.from_numpy(sample.pixel_values)
    labels = torch.from_numpy(sample.labels)[None]
    assert torch.isfinite(model(input_ids=ids, pixel_values=pixels, labels=labels).loss)
    with pytest.raises(IndexError):
        model.get_input_embeddings()(ids)


@pytest.mark.parametrize("word", ["<vila/video>", "<vila/sentinel>"])
def test_media_tokens_in_text_are_rejected(checkpoint, word) -> None:
    """The embedding table has no rows for them."""
    turns = [{"from": "human", "value": "first?"}, {"from": "gpt", "value": f"a {word}"}]
    row = data.parse({"conversations": turns}, "llava", file="a", row=0, images=None)
    with pytest.raises(data.BadSample, match=f"contains the model's placeholder '{word}'"):
        data.Encoder(models.load_processor(checkpoint("nvila_lite")), 256).encode(row)


def test_line_break_in_rows_is_that_of_the_image(checkpoint) -> None:
    """As in VILA's data, images end with their own line breaks, and the first one after a placeholder is dropped."""
    processor = models.load_processor(checkpoint("nvila_lite"))

    def written(*words: str) -> str:
        content = [{"type": "image"} if word == "I" else {"type": "text", "text": word} for word in words]
        return processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)

    assert written("I", "\nfirst?") == written("I", "first?")
    assert written("a\n", "I", "\n", "I", "\n\nb").endswith("user\na\n<image><image>\nb<|im_end|>\n")


def test_templates_get_texts(checkpoint) -> None:
    """The published template concatenates contents with +, which fails for parts."""
    processor = models.load_processor(checkpoint("nvila_lite"))
    text = processor.apply_chat_template(conversation(True), tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\n<image>first?")


def test_folder_with_inconsistent_parts_is_rejected(checkpoint, tmp_path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(checkpoint("nvila_lite"), folder)
    for key, value in (("image_token_id", 7), ("newline_token_id", 199), ("vision_config", {"image_size": 32})):
        raw = json.loads((checkpoint("nvila_lite") / "config.json").read_text())
        raw[key] = {**raw[key], **value} if isinstance(value, dict) else value
        (folder / "config.json").write_text(json.dumps(raw))
        message = f"{key} is {value} in config.json" if isinstance(value, int) else "has size"
        with pytest.raises(models.ModelError, match=message):
            models.load_processor(folder)
    shutil.copy(checkpoint("nvila_lite") / "config.json", folder)
    edit(folder / "preprocessor_config.json", size=1_000_000)  # no image is made so large to find out
    with pytest.raises(models.ModelError, match="preprocessor_config.json has size .* but config.json requires"):
        models.load_processor(folder)
