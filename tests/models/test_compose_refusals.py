"""Parts that cannot be composed: one sentence for each problem, before weights are read, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PhiConfig,
    PhiForCausalLM,
)

from octavo import models
from octavo.models.compose.compose import Parts, compose
from octavo.models.errors import ModelError
from tests.models.small_towers import TOWERS, copy, write_settings


@pytest.mark.parametrize(
    ("change", "settings", "size", "problem"),
    [
        ({}, {"patch_size": 8}, None, "preprocessor_config.json has patch_size 8, but config.json requires 4"),
        ({}, {}, 32, "--image-size: qwen2_5_vl_vision takes images of any size; limit them with data.max_pixels"),
        ({"vision_config": {"depth": "two"}}, {}, None, "config.json cannot be used"),
    ],
)
def test_grid_towers_that_do_not_fit_are_refused(
    change: dict[str, object], settings: dict[str, object], size: int | None, problem: str, checkpoint, tmp_path: Path
) -> None:
    folder = copy(checkpoint("qwen2_5_vl"), tmp_path / "part", **change)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    with pytest.raises(ModelError, match=problem):
        compose(Parts(folder, checkpoint("qwen3"), image_size=size), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["clip", "qwen2_5_vl"])
def test_weights_that_are_not_plain_values_are_refused_before_any_are_read(
    kind: str, tower, checkpoint, tmp_path: Path
) -> None:
    """Codes without their scales would be weights of another size."""
    source = tower(kind) if kind in TOWERS else checkpoint(kind)
    coded = copy(source, tmp_path / "coded")
    weights = load_file(coded / "model.safetensors")
    name = next(name for name, value in weights.items() if value.dim() == 2 and ("visual" in name or kind == "clip"))
    save_file({**weights, name: weights[name].to(torch.float8_e4m3fn)}, coded / "model.safetensors")
    marked = copy(source, tmp_path / "marked", quantization_config={"quant_method": "fp8"})
    bare = copy(source, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    pickled = copy(source, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    cut = copy(source, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-100])
    for folder, problem in (
        (coded, "is quantized"),
        (marked, "quant"),
        (bare, "no weights to load"),
        (pickled, "pickle"),
        (cut, "truncated"),
    ):
        with pytest.raises(ModelError, match=problem):
            compose(Parts(folder, checkpoint("qwen3")), tmp_path / "out", pytest.fail)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "settings", "parts", "problem"),
    [
        ({}, {}, {"feature_layer": 0}, "--feature-layer 0: .* has 3 layers; name one of -4 to -1, or 1 to 3"),
        ({"num_channels": 1}, {}, {}, "config.json: num_channels is 1; images have 3"),
        ({"hidden_act": "foo"}, {}, {}, "cannot be composed: .*foo"),
        (
            {},
            {"image_processor_type": "ViTImageProcessor"},
            {},
            "image_processor_type is 'ViTImageProcessor'; expected",
        ),
        ({}, {"crop_size": {"height": 16, "width": 32}}, {}, "makes images that are not square"),
        ({}, {"image_processor": "x"}, {}, "image_processor is 'x'; it must be a mapping"),
    ],
)
def test_image_encoders_that_could_not_see_are_refused(
    changes: dict[str, object], settings: dict[str, object], parts: dict[str, int], problem: str, tower, checkpoint,
    tmp_path: Path,
) -> None:  # fmt: skip
    folder = copy(tower("clip"), tmp_path / "clip", **changes)
    write_settings(folder, {**TOWERS["clip"][2], **settings})
    if "image_processor" in settings:
        (folder / "processor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=problem):
        compose(Parts(folder, checkpoint("qwen3"), **parts), tmp_path / "out", pytest.fail)
    with pytest.raises(ModelError, match="has a merger, which takes the output of the last block; remove it"):
        compose(Parts(checkpoint("qwen2_5_vl"), checkpoint("qwen3"), feature_layer=-3), tmp_path / "out")


def test_decoders_that_the_class_cannot_hold_are_refused(tower, checkpoint, tmp_path: Path) -> None:
    small = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    decoders = {
        "head has a bias": PhiForCausalLM(PhiConfig(**small, intermediate_size=128)),
        "embed_tokens": GPT2LMHeadModel(
            GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, eos_token_id=1, bos_token_id=1)
        ),
    }
    for number, (problem, decoder) in enumerate(decoders.items()):
        folder = copy(checkpoint("llama"), tmp_path / str(number))
        decoder.save_pretrained(folder)
        for encoder in (tower("clip"), checkpoint("qwen2_5_vl")):
            with pytest.raises(ModelError, match=problem):
                compose(Parts(encoder, folder), tmp_path / "out")
    broken = copy(tower("clip"), tmp_path / "nan")
    weights = load_file(broken / "model.safetensors")
    name = next(name for name in weights if name.endswith("pre_layrnorm.weight"))
    weights[name][0] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="nan: .* has NaN or infinity in float32, the dtype"):
        compose(Parts(broken, checkpoint("qwen3")), tmp_path / "out")


def test_targets_that_cannot_be_written_are_refused_first(tower, checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target, problem in (
        (tmp_path / "file", "file is a file; name a folder"), (tmp_path / "file" / "sub", "is a file"),
        (Path("/proc/octavo/model"), "cannot be written"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=problem):
            compose(Parts(tower("clip"), checkpoint("qwen3")), target, pytest.fail)


def test_weights_of_a_grid_tower_are_checked(checkpoint, tmp_path: Path) -> None:
    folder = copy(checkpoint("qwen2_5_vl"), tmp_path / "part")
    other = models.load(folder)
    other.model.visual.blocks[1].mlp.gate_proj.weight = torch.nn.Parameter(torch.zeros(4, 4))
    other.save_pretrained(folder)
    with pytest.raises(
        ModelError, match="blocks.1.mlp.gate_proj.weight of the image encoder is missing or has another"
    ):
        compose(Parts(folder, checkpoint("qwen3")), tmp_path / "out")


def test_all_problems_are_reported_at_once_and_nothing_is_written(tower, checkpoint, tmp_path: Path) -> None:
    bare = copy(checkpoint("qwen3"), tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("kept")
    encoder = copy(tower("clip"), tmp_path / "clip")
    write_settings(encoder, {**TOWERS["clip"][2], "image_processor_type": "ViTImageProcessor"})
    parts = Parts(encoder, bare, projector="mlp2x_gelu", image_size=18, init_std=3.0, feature_layer=9)
    with pytest.raises(ModelError) as error:
        compose(parts, tmp_path / "out")
    lines = str(error.value).splitlines()
    assert [
        line
        for line in lines
        if line.startswith((f"{tmp_path}/out is not empty", "--projector mlp2x_gelu: the projectors are mlp2"))
    ] == lines[:2]
    assert lines[2].startswith("--init-std 3.0: it must be above 0")
    assert "image_processor_type is 'ViTImageProcessor'; expected one of " in lines.pop(3)
    assert lines[3] == "an image of 18 pixels cannot be cut into patches of 4; the nearest sizes are 16 and 20"
    assert lines[4].startswith("--feature-layer 9: ") and lines[4].endswith(
        "has 3 layers; name one of -4 to -1, or 1 to 3"
    )
    assert lines[5].endswith("bare has no chat template; give one with --chat-template FILE") and len(lines) == 6
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("part", "changes", "problem"),
    [
        ("clip", {"model_type": "siglip2"}, "'siglip2' cannot be composed: NaFlex images have any size"),
        ("clip", {"model_type": "dinov3_convnext"}, "'dinov3_convnext' cannot be composed: it has no patches"),
        (
            "clip",
            {"model_type": "clip_vision"},
            "cannot be composed: the image encoders are clip, .* mean 'clip_vision_model'",
        ),
        ("clip", {"hidden_size": None}, "config.json: hidden_size is None; an image encoder needs a number above 0"),
        ("dinov2", {"num_attention_heads": 5}, "num_attention_heads is 5, which does not divide hidden_size 64"),
        (
            "clip",
            {"image_size": 32},
            "preprocessor_config.json makes images of 16 pixels, but .*config.json takes 32; name",
        ),
        ("qwen3", {"max_position_embeddings": 16}, "its rows have at most 16 tokens, and an image has 16; use smaller"),
        ("qwen3", {"model_type": "vit"}, "qwen3-part.*config.json: model_type 'vit' is no decoder of text"),
        ("qwen3", {"vocab_size": 64}, "qwen3-part"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    part: str, changes: dict[str, object], problem: str, tower, checkpoint, tmp_path: Path
) -> None:
    changed = copy(tower(part) if part in TOWERS else checkpoint(part), tmp_path / f"{part}-part", **changes)
    encoder, decoder = (changed, checkpoint("qwen3")) if part in TOWERS else (tower("clip"), changed)
    with pytest.raises(ModelError, match=problem):
        compose(Parts(encoder, decoder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"size": {"shortest_edge": 16}, "do_center_crop": False}, "makes 24 x 16 pixels of an image of 48 x 31, and"),
        (
            {"size": {"height": 16, "width": 24}, "do_center_crop": False},
            "not square, and .*; name one size with --image-size",
        ),
        ({"size": {"height": 3, "width": 3}, "do_center_crop": False}, "an image of 3 .* of 4; the nearest size is 4$"),
        ({"do_resize": False, "do_center_crop": False}, "makes 48 x 31 pixels of an image of 48 x 31, and"),
        ({"crop_size": {"height": True, "width": True}}, "True is no size of an image; expected a number of pixels"),
        ({"crop_size": "16"}, "'16' is no size of an image"),
        ({"image_std": [0, 0, 0]}, "makes NaN or infinity of an image"),
        ({"image_mean": [0.5]}, "preprocessor_config.json cannot process an image"),
        ({"resample": 99}, "preprocessor_config.json cannot process an image"),
    ],
)
def test_processors_that_make_no_squares_are_refused_before_weights_are_read(
    changes: dict[str, object], problem: str, tower, checkpoint, tmp_path: Path
) -> None:
    folder = copy(tower("dinov2_with_registers"), tmp_path / "tower")
    write_settings(folder, {**TOWERS["dinov2_with_registers"][2], **changes})
    read: list[str] = []
    with pytest.raises(ModelError, match=problem) as error:
        compose(Parts(folder, checkpoint("qwen3")), tmp_path / "out", read.append)
    assert not (tmp_path / "out").exists() and read == [] and "\n" not in str(error.value)


def test_a_processor_of_no_squares_is_adapted_to_a_size_that_is_named(tower, checkpoint, tmp_path: Path) -> None:
    folder = copy(tower("siglip"), tmp_path / "tower")
    write_settings(folder, {"size": {"height": 16, "width": 24}, "image_processor_type": "SiglipImageProcessor"})
    assert compose(Parts(folder, checkpoint("qwen3"), image_size=16), tmp_path / "out").image_tokens == 16


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"projector": None}, "projector is None; expected one of mlp2"),
        ({"vision_feature_layer": 99}, "vision_feature_layer is 99, and vision_config has 3 layers"),
        ({"vision_feature_layer": 0}, "vision_feature_layer is 0, and"),
        ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer"),
    ],
)
def test_an_edited_configuration_of_a_composed_model_is_refused(
    changes: dict[str, object], problem: str, tower, checkpoint, tmp_path: Path
) -> None:
    compose(Parts(tower("dinov3"), checkpoint("qwen3"), "merge_mlp2"), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelError, match=problem):
        models.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("family", "projector", "size", "problem"),
    [
        (
            "siglip",
            "merge_mlp2",
            20,
            "merges 2 x 2 patches, and an image of 20 pixels has 5 x 5 of 4; .* --image-size 24",
        ),
        ("siglip", "pixel_shuffle", None, "projectors are mlp2, .*Did you mean 'pixel_shuffle_mlp2'"),
        (
            "qwen2_vl",
            "mlp2",
            None,
            "--projector mlp2: .* has a merger, which is the projector; remove it, or name merge_",
        ),
    ],
)
def test_projectors_that_do_not_fit_are_refused(
    family: str, projector: str, size: int | None, problem: str, tower, checkpoint, tmp_path: Path
) -> None:
    encoder = tower(family) if family in TOWERS else checkpoint(family)
    with pytest.raises(ModelError, match=problem):
        compose(Parts(encoder, checkpoint("qwen3"), projector, size), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}",
            "no turn of the user",
        ),
        (
            "{% for m in messages %}{{ m.content[-1].text if m.content is not string else m.content }}{% endfor %}",
            "writes <image> 0 times",
        ),
        ("{{ raise_exception('no') }}", "template.jinja cannot be used: .*rejects every conversation"),
    ],
)
def test_templates_without_user_or_image_are_refused(
    template: str, problem: str, tower, checkpoint, tmp_path: Path
) -> None:
    (tmp_path / "template.jinja").write_text(template)
    with pytest.raises(ModelError, match=problem):
        compose(Parts(tower("clip"), checkpoint("qwen3"), chat_template=tmp_path / "template.jinja"), tmp_path / "out")


def test_decoder_with_a_step_after_its_head_is_refused(tower, checkpoint, tmp_path: Path) -> None:
    """Gemma 2 limits its logits, which LLaVA's model class does not."""
    folder = copy(checkpoint("llama"), tmp_path / "gemma2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = Gemma2Config(
        vocab_size=len(tokenizer) // 64 * 64 + 64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, final_logit_softcapping=0.1,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(folder)
    with pytest.raises(ModelError, match="Gemma2ForCausalLM cannot be composed: .* a text has other logits"):
        compose(Parts(tower("clip"), folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()
