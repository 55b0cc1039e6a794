"""NVILA's folders in three-folder, one-folder and VILA 1.5 layouts: reading, writing and conversion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, SiglipVisionModel

from octavo import checkpoint as checkpoint_
from octavo import models
from octavo.checkpoint import convert
from octavo.checkpoint.export import export
from octavo.checkpoint.verify import verify
from octavo.fp8.weights import is_frozen
from octavo.models.custom.nvila.three_folders import MEDIA
from octavo.models.folder.folder import PARTS
from octavo.parallel import World
from tests.models.conftest import batch, some_image
from tests.models.three_folders import edit, split, without_media


def test_one_folder_is_saved_back_name_by_name(checkpoint, tmp_path) -> None:
    folder = checkpoint("nvila_lite")
    before = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    drawn = {name: torch.randn_like(value) for name, value in before.items()}
    save_file(drawn, tmp_path / "model.safetensors", {"format": "pt"})
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    before = load_file(tmp_path / "model.safetensors")
    assert {name.partition(".")[0] for name in before} == {"llm", "vision_tower", "mm_projector"}
    AutoModelForImageTextToText.from_pretrained(tmp_path).save_pretrained(tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["NVILALiteForConditionalGeneration"]  # by which servers choose a class


def files_of(folder) -> dict[str, dict[str, torch.Tensor]]:
    return {str(file.relative_to(folder)): load_file(file) for file in folder.rglob("*.safetensors")}


def test_three_folders_equal_one_folder_and_are_saved_back(checkpoint, tmp_path) -> None:
    """Folders are found by name, independent of the paths in the configuration; remote code never runs."""
    one = checkpoint("nvila_lite")
    folder = split(one, tmp_path / "three", {"model_type": "vila", "auto_map": {"AutoModel": "modeling_vila.Evil"}})
    model, processor = models.load(folder, torch.bfloat16), models.load_processor(folder)
    inputs, wanted = batch(processor, image=True), models.load(one, torch.bfloat16)
    assert torch.equal(inputs["pixel_values"], batch(models.load_processor(one), image=True)["pixel_values"])
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, wanted(**inputs).logits)
    assert model.generation_config.eos_token_id == processor.tokenizer.eos_token_id
    checkpoint_.save_hf(model, folder, tmp_path / "out", World())
    before, after = files_of(folder), files_of(tmp_path / "out")
    assert set(before) == set(after) == {f"{part}/model.safetensors" for part in PARTS}
    for file, tensors in before.items():
        assert list(tensors) == list(after[file])
        assert all(torch.equal(value, after[file][name]) for name, value in tensors.items())
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))
    assert names == sorted(str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*"))
    again = models.load(checkpoint_.save_hf(model, folder, tmp_path / "out", World()), torch.bfloat16)  # over itself
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_decoder_that_ties_its_head(checkpoint, tmp_path) -> None:
    """Small models have no lm_head in llm/: this holds in all layouts, although only the decoder's part is tied."""
    folder = split(checkpoint("nvila_lite"), tmp_path / "three")
    edit(folder / "llm" / "config.json", tie_word_embeddings=True)
    file = folder / "llm" / "model.safetensors"
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file, {"format": "pt"})
    one = export(models.iter_weights(folder), folder, tmp_path / "one", "bf16").directory
    edit(one / "config.json", "tie_word_embeddings")
    assert "llm.lm_head.weight" not in load_file(one / "model.safetensors")
    for place in (folder, one):
        model = models.load(place, torch.bfloat16)
        assert model.lm_head.weight is model.get_input_embeddings().weight
        checkpoint_.save_hf(model, place, tmp_path / "out" / place.name, World())
        before, after = files_of(place), files_of(tmp_path / "out" / place.name)
        assert before.keys() == after.keys()
        for name, held in before.items():
            assert held.keys() == after[name].keys()
            assert all(torch.equal(value, after[name][leaf]) for leaf, value in held.items())


def test_missing_media_tokens_get_ids_after_the_table(checkpoint, tmp_path) -> None:
    folder = without_media(split(checkpoint("nvila_lite"), tmp_path / "three"))
    config, processor = models.read_config(folder), models.load_processor(folder)
    rows = config.text_config.vocab_size
    assert (config.image_token_id, config.video_token_id) == (rows + 1, rows + 2)
    assert processor.tokenizer.convert_tokens_to_ids(list(MEDIA)) == [rows, rows + 1, rows + 2]


def test_three_folders_are_exported_as_one(checkpoint, tmp_path) -> None:
    """Servers read this layout: its tokenizer has the media tokens, its configuration a class that they know."""
    folder = without_media(split(checkpoint("nvila_lite"), tmp_path / "three"))
    with pytest.raises(models.ModelError, match="octavo export .*three DIR --format bf16. writes it as one"):
        verify(folder)
    with pytest.raises(models.ModelError, match="octavo convert supports only models in one folder"):
        convert.hf_to_dcp(folder, tmp_path / "dcp")
    exported = export(models.iter_weights(folder), folder, tmp_path / "one", "bf16").directory
    assert not any(file.is_dir() for file in exported.iterdir())
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["NVILALiteForConditionalGeneration"] and config["dtype"] == "bfloat16"
    one, three = (models.load_processor(place) for place in (exported, folder))
    inputs = batch(one, image=True)
    assert torch.equal(inputs["input_ids"], batch(three, image=True)["input_ids"])
    before = files_of(folder)
    named = {f"{Path(file).parent}.{name}": value for file, held in before.items() for name, value in held.items()}
    after = load_file(exported / "model.safetensors")
    assert named.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in named.items())
    with torch.no_grad():
        octavo_model, stock = models.load(exported)(**inputs).logits, models.load(folder)(**inputs).logits
    assert torch.equal(octavo_model, stock)
    assert [one.kind for one in verify(exported).findings] == ["own-family"]


def test_tokens_outside_the_table_cause_a_warning(checkpoint, tmp_path) -> None:
    """Media tokens are outside the table by design."""
    folder = shutil.copytree(checkpoint("nvila"), tmp_path / "m")
    assert [one.kind for one in verify(folder).findings] == ["own-family"]
    tokenizer = models.load_processor(folder).tokenizer
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)
    assert sorted(one.kind for one in verify(folder).findings) == ["own-family", "token-ids"]


@pytest.mark.parametrize("family", ["nvila", "llavaonevision1_5"])
def test_fp8_folders_of_custom_families_round_trip(checkpoint, tmp_path, family) -> None:
    """An FP8 model whose names on disk differ from those in memory is read back with the original values."""
    folder, components = checkpoint(family), ("image_encoder", "image_projector")
    exported = export(
        models.iter_weights(folder), folder, tmp_path / "fp8", "fp8-dynamic", include=components
    ).directory
    actual, original = models.load(exported), dict(models.load(folder).named_parameters())
    codes = {name: p for name, p in actual.named_parameters() if is_frozen(p)}
    assert {models.describe(actual).component_of(name) for name in codes} >= {"foundation", *components}
    for name, weight in codes.items():
        error = (weight.dequantize() - original[name]).norm() / original[name].norm()
        assert 0 < error < 0.05, name
    again = export(
        models.iter_weights(exported), exported, tmp_path / "again", "fp8-dynamic", include=components
    ).directory
    first, second = (load_file(place / "model.safetensors") for place in (exported, again))
    assert list(first) == list(second)
    assert all(torch.equal(value.view(torch.uint8), second[name].view(torch.uint8)) for name, value in first.items())
    assert verify(exported, against=folder).ok


def test_head_of_tower_is_detected_from_weights(checkpoint, tmp_path) -> None:
    """VILA 1.5 may have a head without a configuration field for it; it is unused and saved back."""
    folder = split(checkpoint("nvila_lite"), tmp_path / "three")
    edit(folder / "vision_tower" / "config.json", "vision_use_head")
    assert not models.read_config(folder).vision_config.vision_use_head
    config = models.read_config(folder).vision_config
    config.vision_use_head = True
    head = {f"vision_model.{n}": torch.randn_like(p) for n, p in SiglipVisionModel(config).state_dict().items()
            if n.startswith("head.")}  # fmt: skip
    file = folder / "vision_tower" / "model.safetensors"
    save_file(load_file(file) | {n: value.bfloat16() for n, value in head.items()}, file, {"format": "pt"})
    model = models.load(folder, torch.bfloat16)
    assert model.config.vision_config.vision_use_head
    checkpoint_.save_hf(model, folder, tmp_path / "out", World())
    before, after = load_file(file), load_file(tmp_path / "out" / "vision_tower" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"image_aspect_ratio": "anyres"}, "image_aspect_ratio 'anyres'"),
        ({"mm_vision_select_layer": -1}, "mm_vision_select_layer -1"),
        ({"mm_vision_select_feature": "patch"}, "mm_vision_select_feature 'patch'"),
        ({"mm_use_im_start_end": True}, "mm_use_im_start_end True"),
        ({"s2": True}, "s2 True"),
        ({"ps3": True}, "ps3 True"),
        ({"dynamic_s2": True}, "dynamic_s2 True"),
        ({"vision_resolution": 980}, "vision_resolution 980"),
        (
            {"image_encoder": '{"_target_": "llava.model.encoders.TSPImageEncoder"}'},
            "image_encoder._target_ .*TSPImageEncoder'",
        ),
        ({"image_encoder": {"start_tokens": "<"}}, "image_encoder.start_tokens '<'"),
        ({"image_encoder": {"end_tokens": "#"}}, "image_encoder.end_tokens '#'"),
        ({"image_aspect_ratio": "dynamic_s2", "dynamic_s2": False}, "dynamic_s2 False"),
        ({"image_aspect_ratio": "dynamic_s2", "s2_resize_output_to_scale_idx": 0}, "s2_resize_output_to_scale_idx 0"),
        ({"image_aspect_ratio": "dynamic_s2", "s2_resize_output_to_scale_idx": None}, "to_scale_idx None"),
    ],
)
def test_three_folders_with_different_arithmetic_are_rejected(checkpoint, tmp_path, more, message) -> None:
    with pytest.raises(models.ModelError, match=f"{message}, but Octavo's NVILA supports only"):
        models.read_config(split(checkpoint("nvila_lite"), tmp_path / "three", more))


@pytest.mark.parametrize("kind", ["llava_llama", "vila"])
def test_incomplete_model_is_rejected(checkpoint, tmp_path, kind) -> None:
    """Otherwise the error would name transformers, or the code in the folder."""
    folder = split(checkpoint("nvila_lite"), tmp_path / "three", {"model_type": kind, "auto_map": {"AutoModel": "a.B"}})
    (folder / "mm_projector" / "config.json").write_text("{}")
    with pytest.raises(models.ModelError, match="mm_projector/config.json gives mm_projector_type None"):
        models.read_config(folder)
    shutil.rmtree(folder / "mm_projector")
    with pytest.raises(models.ModelError, match=f"{kind}', .* three folders .*mm_projector has no config.json"):
        models.read_config(folder)


def test_image_encoder_determines_line_breaks(checkpoint, tmp_path) -> None:
    """The prompt adds one line break per tile."""
    folder = split(checkpoint("nvila_lite"), tmp_path / "three")
    for cut, encoder, ends in (
        ("dynamic", {}, 2), ("dynamic", '{"end_tokens": null}', 1), ("resize", {}, 1), ("resize", None, 0),
    ):  # fmt: skip
        edit(folder / "config.json", image_aspect_ratio=cut, image_encoder=encoder)
        assert models.read_config(folder).newlines == ends


@pytest.fixture(scope="module")
def vila_1_5(checkpoint, tmp_path_factory) -> Path:
    folder = split(checkpoint("nvila_lite"), tmp_path_factory.mktemp("vila") / "three")
    edit(folder / "config.json", "image_encoder", image_aspect_ratio="resize")
    (folder / "llm" / "chat_template.jinja").unlink()
    return folder


def test_vila_1_5_has_one_tile_and_no_line_break(vila_1_5) -> None:
    made = models.load_processor(vila_1_5)(text=["<image>"], images=[some_image(0, (16, 40))])
    assert len(made["pixel_values"]) == 1 and len(made["input_ids"][0]) == 4


def test_vila_1_5_has_the_chat_template_of_its_tokenizer(vila_1_5, tmp_path) -> None:
    """Its folders have no template, or one that VILA ignores. The line break after an image is text and occurs once."""
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nfirst?"}]}]
    answered = [*messages, {"role": "assistant", "content": "3"}]

    def written(folder: Path, turns: list[dict]) -> str:
        processor = models.load_processor(folder)
        return processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=len(turns) % 2 == 1)

    assert written(vila_1_5, answered).endswith("user's questions. USER: <image>\nfirst? ASSISTANT: 3</s>")
    assert written(vila_1_5, messages).endswith("questions. USER: <image>\nfirst? ASSISTANT:")
    assert written(vila_1_5, [{"role": "system", "content": "Be."}, *answered[:1]])[:11] == "Be. USER: <"
    folder = Path(shutil.copytree(vila_1_5, tmp_path / "three"))
    for file in (folder / "llm").glob("*token*.json"):  # one that Llama 3 has
        file.write_text(file.read_text().replace("[BOS]", "<|eot_id|>"))
    tokenizer = models.load_tokenizer(folder)
    tokenizer.chat_template = "Llama's own"
    tokenizer.save_pretrained(folder / "llm", save_jinja_files=False)
    four = written(folder, [*answered, *messages, answered[1]])
    assert four.count("<|start_header_id|>user<|end_header_id|>\n\n<image>\nfirst?<|eot_id|>") == 2
    assert "3<|eot_id|><|start" in four and four.endswith("3<|end_of_text|>")
    edit(folder / "config.json", chat_template="qwen2")  # NVILA's, by its name
    assert written(folder, answered) == written(folder, messages) + "3<|im_end|>\n"
    (folder / "llm" / "chat_template.jinja").write_text("{{ messages | length }} mine")
    assert written(folder, answered) == "2 mine"
    edit(folder / "config.json", chat_template="mistral")
    (folder / "llm" / "chat_template.jinja").unlink()
    with pytest.raises(
        models.ModelError, match="'mistral' of VILA's code, but Octavo has only qwen2, .*chat_template.jinja"
    ):
        models.load_processor(folder)
