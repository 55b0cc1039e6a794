"""`octavo compose`: an image encoder, a fresh projector and a decoder become a folder that transformers alone loads."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    CLIPConfig,
    CLIPModel,
    InternVLConfig,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.internvl.modeling_internvl import InternVLModel, InternVLMultiModalProjector
from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchMerger

from octavo import models
from octavo.cli import terminal
from octavo.cli.main import main
from octavo.config import load_config
from octavo.config.sections.model import folder_of_parts
from octavo.models.compose.compose import Parts, compose
from octavo.models.compose.template import add_images
from octavo.models.compose.tile import resize_positions
from tests.models.conftest import conversation, some_image
from tests.models.small_towers import LEADING, PATCH, SIDE, SMALL, SQUARE, TOWERS, copy, encode, write_settings
from tests.requirements_real import require

DECODERS = ("llama", "qwen3", "qwen3_moe")  # untied, tied, experts


@pytest.fixture(scope="module")
def composed(tower, checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(tower, decoder) -> folder of their model."""
    home = tmp_path_factory.mktemp("composed")

    def get(kind: str, decoder: str) -> Path:
        folder = home / f"{kind}-{decoder}"
        if not folder.exists():
            compose(Parts(tower(kind), checkpoint(decoder), init_std=0.1), folder)
        return folder

    return get


@pytest.mark.parametrize(
    ("kind", "decoder"), [*((kind, "qwen3") for kind in TOWERS), ("clip", "llama"), ("siglip", "qwen3_moe")]
)
def test_stock_model_has_the_features_of_the_tower_and_the_text_of_the_decoder(
    kind: str, decoder: str, tower, checkpoint, composed
) -> None:
    folder = composed(kind, decoder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == (
        "octavo_llava" if LEADING[kind] > 1 else "llava"
    )
    stock = AutoModelForImageTextToText.from_pretrained(folder).eval()
    alone, language = (
        TOWERS[kind][0].from_pretrained(tower(kind)).eval(),
        AutoModelForCausalLM.from_pretrained(checkpoint(decoder)).eval(),
    )
    processor = models.load_processor(folder)
    inputs = encode(processor, some_image(1, (40, 30)).convert("RGB"))
    assert (inputs["input_ids"] == stock.config.image_token_id).sum() == (SIDE // PATCH) ** 2
    with torch.no_grad():
        hidden = alone(inputs["pixel_values"], output_hidden_states=True).hidden_states[-2]
        expected = stock.model.multi_modal_projector(hidden[:, LEADING[kind] :])
        (features,) = stock.get_image_features(inputs["pixel_values"]).pooler_output
        assert torch.equal(features, expected[0]) and features.std() > 0.01
        ids = torch.tensor([[5, 6, 7, 8, 9]])
        rows = language.config.vocab_size
        assert torch.equal(stock(input_ids=ids).logits[..., :rows], language(input_ids=ids).logits)
    # Octavo reads the same model, and describes its parts.
    ours = models.load(folder).eval()
    with torch.no_grad():
        assert torch.equal(ours(**inputs).logits, stock(**inputs).logits)
    assert set(models.describe(ours).components) == {"image_encoder", "image_projector", "foundation", "lm_head"}


@pytest.mark.parametrize("kind", ["siglip", "dinov3"])
def test_stock_model_generates_the_tokens_of_octavo(kind: str, composed) -> None:
    folder = composed(kind, "qwen3")
    processor, image = models.load_processor(folder), some_image().convert("RGB")
    inputs = encode(processor, image)
    stock = AutoModelForImageTextToText.from_pretrained(folder)
    tokens = stock.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    answer = models.generate(models.load(folder), processor, [{"role": "user", "content": parts}], [image], 6)
    assert answer == processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()


@pytest.mark.parametrize("decoder", DECODERS)
def test_text_is_rendered_and_encoded_as_before(decoder: str, checkpoint, composed) -> None:
    before, after = (
        AutoTokenizer.from_pretrained(checkpoint(decoder)),
        AutoTokenizer.from_pretrained(composed("clip", decoder)),
    )
    for turns in (
        conversation(False),
        conversation(False)[:1],
        [{"role": "system", "content": "Be brief."}, *conversation(False)],
    ):
        text = before.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert after.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == text
        assert after(text)["input_ids"] == before(text)["input_ids"]


def test_line_breaks_at_the_beginning_of_a_template_stay(checkpoint) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("qwen3"))
    turns = [{"role": "user", "content": "Hello"}]
    for begins in ("\n\n", "  ", "{# a comment #}", "{% if true %}\nx{% endif %}"):
        template = begins + "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        texts = [
            tokenizer.apply_chat_template(turns, chat_template=t, tokenize=False)
            for t in (template, add_images(template))
        ]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(("decoder", "tied"), [("llama", False), ("qwen3", True)])
def test_embeddings_grow_only_where_a_row_is_missing(
    decoder: str, tied: bool, tower, checkpoint, tmp_path: Path
) -> None:
    """A mini checkpoint has rows to spare; without them a multiple of 64 is added, with the mean of all rows."""
    spare = compose(Parts(tower("siglip"), checkpoint(decoder)), tmp_path / "spare")
    full = Path(shutil.copytree(checkpoint(decoder), tmp_path / "decoder"))
    tokenizer = AutoTokenizer.from_pretrained(full)
    rows = AutoModelForCausalLM.from_pretrained(full).config.vocab_size
    tokenizer.add_tokens([f"<word{n}>" for n in range(rows - len(tokenizer))])
    tokenizer.save_pretrained(full)
    grown = compose(Parts(tower("siglip"), full), tmp_path / "grown")
    first, second = (AutoModelForImageTextToText.from_pretrained(done.directory) for done in (spare, grown))
    assert first.config.text_config.vocab_size == rows and first.config.image_token_id < rows
    assert second.config.text_config.vocab_size == rows + 64 and second.config.image_token_id == rows
    before, after = first.get_input_embeddings().weight, second.get_input_embeddings().weight
    assert torch.equal(before, after[:rows]) and torch.allclose(after[rows:], before.mean(0).expand(64, -1))
    head = second.get_output_embeddings().weight
    assert (head is after) == tied == (grown.parameters["lm_head"] == 0)
    assert torch.allclose(head[rows:], head[:rows].mean(0).expand(64, -1)) and head.shape == after.shape


def test_projector_depends_on_seed_and_deviation(tower, checkpoint, tmp_path: Path) -> None:
    weights = []
    for number, (seed, std) in enumerate([(0, None), (0, None), (1, None), (0, 0.5)]):
        done = compose(Parts(tower("clip"), checkpoint("qwen3"), seed=seed, init_std=std), tmp_path / str(number))
        model = models.load(done.directory)
        assert not model.model.multi_modal_projector.linear_1.bias.any()
        weights.append(model.model.multi_modal_projector.linear_1.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert float(weights[0].std()) == pytest.approx(0.06, rel=0.1) and float(weights[3].std()) == pytest.approx(
        0.5, rel=0.1
    )


@pytest.mark.parametrize("kind", TOWERS)
def test_another_image_size_interpolates_positions(kind: str, tower, checkpoint, tmp_path: Path) -> None:
    done = compose(Parts(tower(kind), checkpoint("qwen3"), image_size=24), tmp_path / "model")
    assert done.image_tokens == 36 and done.image_size == 24
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval()
    alone = TOWERS[kind][0].from_pretrained(tower(kind)).eval()
    inputs = encode(models.load_processor(tmp_path / "model"), some_image(2, (40, 30)).convert("RGB"))
    assert inputs["pixel_values"].shape[-2:] == (24, 24)
    options = {} if kind.startswith("dino") else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        hidden = alone(inputs["pixel_values"], output_hidden_states=True, **options).hidden_states[-2]
        expected = stock.model.multi_modal_projector(hidden[:, LEADING[kind] :])[0]
        (features,) = stock.get_image_features(inputs["pixel_values"]).pooler_output
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["norm_mlp2", "merge_mlp2", "pixel_shuffle_mlp2"])
def test_projector_computes_what_its_source_does(kind: str, tower, checkpoint, tmp_path: Path) -> None:
    """Qwen2-VL's merger, InternVL's pixel shuffle and projector, and LLaVA's layers after a norm, with the same
    weights."""
    done = compose(Parts(tower("siglip"), checkpoint("qwen3"), kind, init_std=0.1), tmp_path / "model")
    assert done.why.endswith(f"because LLaVA's class has no projector {kind}") and done.projector == kind
    model = models.load(tmp_path / "model").eval()
    projector, side = model.model.multi_modal_projector, SIDE // PATCH
    for parameter in (projector.norm.weight, projector.norm.bias, projector.linear_1.bias):
        torch.nn.init.normal_(parameter, 1.0)
    inputs = encode(models.load_processor(tmp_path / "model"), some_image(1, (40, 30)).convert("RGB"))
    tokens = side**2 if kind == "norm_mlp2" else side**2 // 4
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == tokens == done.image_tokens
    with torch.no_grad():
        output = model.model.get_image_features(inputs["pixel_values"])
        (patches,), (features,) = output.last_hidden_state, output.pooler_output
        first, second, norm = projector.linear_1, projector.linear_2, projector.norm
        if kind == "merge_mlp2":
            merger = PatchMerger(dim=len(second.bias), context_dim=patches.shape[1])
            merger.load_state_dict(
                {"ln_q.weight": norm.weight, "ln_q.bias": norm.bias, "mlp.0.weight": first.weight,
                 "mlp.0.bias": first.bias, "mlp.2.weight": second.weight, "mlp.2.bias": second.bias}
            )  # fmt: skip
            # Qwen's processor orders patches so that the four of a token follow each other.
            order = torch.arange(side**2).view(side // 2, 2, side // 2, 2).transpose(1, 2).flatten()
            expected = merger(patches[order])
        else:
            if kind == "pixel_shuffle_mlp2":
                patches = InternVLModel.pixel_shuffle(None, patches.contiguous().view(1, side, side, -1), 0.5)[
                    0
                ].flatten(0, 1)
            if kind == "pixel_shuffle_mlp2":
                config = InternVLConfig(vision_config={"hidden_size": 64}, text_config=model.config.text_config)
                source = InternVLMultiModalProjector(config)
                source.layer_norm = norm if norm.eps == source.layer_norm.eps else source.layer_norm
                source.linear_1, source.linear_2 = first, second
                expected = source(patches)
            else:  # LLaVA's layers after a norm
                expected = second(torch.nn.functional.gelu(first(norm(patches))))
    torch.testing.assert_close(features, expected)
    assert features.std() > 0.1 and features.shape == (tokens, len(second.bias))


def test_dinov3_does_not_move_its_positions_at_random(tower, checkpoint, tmp_path: Path) -> None:
    """Its configuration asks for random positions in training, with which no step could be repeated."""
    assert json.loads((tower("dinov3") / "config.json").read_text())["pos_embed_rescale"] == 2.0
    compose(Parts(tower("dinov3"), checkpoint("qwen3")), tmp_path / "model")
    model, pixels = models.load(tmp_path / "model").train(), torch.randn(1, 3, SIDE, SIDE)
    one, two = (model.model.get_image_features(pixels).pooler_output for _ in range(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("alone", [False, True], ids=["whole model", "tower alone"])
def test_tower_for_images_of_any_size_keeps_its_features(family: str, alone: bool, checkpoint, tmp_path: Path) -> None:
    """The merger is new, so the composed model's tower is compared before it, and its features by that merger."""
    whole = models.load(checkpoint(family)).eval()
    folder = checkpoint(family)
    if alone:
        folder = tmp_path / "tower"
        whole.model.visual.save_pretrained(folder)
        shutil.copy(checkpoint(family) / "preprocessor_config.json", folder)
    done = compose(Parts(folder, checkpoint("llama"), init_std=0.1), tmp_path / "model")
    assert done.why.startswith("Octavo's shape (model_type octavo_vlm), because ") and done.image_tokens is None
    composed = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval()
    processor = models.load_processor(tmp_path / "model")
    inputs = encode(processor, some_image(1, (40, 32)).convert("RGB"))
    tokens = int(inputs["image_grid_thw"].prod()) // 4
    assert (inputs["input_ids"] == composed.config.image_token_id).sum() == tokens > 4
    visual, grid = composed.model.visual, inputs["image_grid_thw"]
    with torch.no_grad():
        before = whole.model.visual(inputs["pixel_values"], grid_thw=grid).last_hidden_state
        output = visual(inputs["pixel_values"], grid_thw=grid)
        assert torch.equal(output.last_hidden_state, before)
        (features,) = composed.get_image_features(inputs["pixel_values"], grid).pooler_output
        assert torch.equal(features, output.pooler_output) and features.shape == (tokens, 64) and features.std() > 0.01
        assert (
            not visual.merger.state_dict().keys() & {"linear_fc1.weight"}
            or visual.merger.linear_fc1.weight.std() > 0.05
        )
        assert composed(**inputs).logits.isfinite().all()
    language = AutoModelForCausalLM.from_pretrained(checkpoint("llama")).eval()
    with torch.no_grad():
        ids = torch.tensor([[5, 6, 7, 8, 9]])
        assert torch.equal(composed(input_ids=ids).logits, language(input_ids=ids).logits)
    assert done.parameters["image_projector"] == sum(p.numel() for p in visual.merger.parameters())


def test_composed_model_answers_as_transformers_generates(checkpoint, tmp_path: Path) -> None:
    compose(Parts(checkpoint("qwen2_5_vl"), checkpoint("qwen3")), tmp_path / "model")
    model, processor = models.load(tmp_path / "model"), models.load_processor(tmp_path / "model")
    image = some_image(0, (24, 16)).convert("RGB")
    inputs = encode(processor, image)
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    tokens = stock.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    answer = models.generate(model, processor, [{"role": "user", "content": parts}], [image], 5)
    assert answer == processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()


def test_parts_that_published_folders_have_are_taken(tower, checkpoint, tmp_path: Path) -> None:
    """A size that leaves out pixels, an older name of the image processor, a crop from a larger image, and templates
    with names."""
    torch.manual_seed(0)
    SiglipVisionModel(SiglipVisionConfig(**SMALL, image_size=18)).save_pretrained(tmp_path / "odd")
    write_settings(
        tmp_path / "odd", {"size": {"height": 18, "width": 18}, "image_processor_type": "SiglipImageProcessor"}
    )
    assert compose(Parts(tmp_path / "odd", checkpoint("qwen3")), tmp_path / "a").image_tokens == 16
    inputs = encode(models.load_processor(tmp_path / "a"), some_image(0, (40, 30)).convert("RGB"))
    assert models.load(tmp_path / "a")(**inputs).logits.isfinite().all()
    old = copy(tower("clip"), tmp_path / "old")
    write_settings(old, {"feature_extractor_type": "CLIPFeatureExtractor", "size": SIDE, "crop_size": SIDE})
    compose(Parts(old, checkpoint("qwen3")), tmp_path / "b")
    cropped = copy(tower("dinov2"), tmp_path / "cropped")
    settings = {"size": {"shortest_edge": 20}, "crop_size": SQUARE, "image_processor_type": "BitImageProcessor"}
    write_settings(cropped, settings)
    compose(Parts(cropped, checkpoint("qwen3")), tmp_path / "c")
    written = json.loads((tmp_path / "c" / "preprocessor_config.json").read_text())
    assert written["size"] == {"shortest_edge": 20} and written["crop_size"] == SQUARE
    decoder = copy(checkpoint("qwen3"), tmp_path / "decoder", initializer_range=0.0)
    template = (decoder / "chat_template.jinja").read_text()
    (decoder / "chat_template.jinja").unlink()
    file = decoder / "tokenizer_config.json"
    named = [{"name": "default", "template": template}, {"name": "tools", "template": "x"}]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": named}))
    compose(Parts(tower("clip"), decoder), tmp_path / "d")
    assert models.load(tmp_path / "d").model.multi_modal_projector.linear_1.weight.std() > 0.01


def test_positions_of_the_same_size_do_not_change() -> None:
    positions = torch.randn(1 + 16, 8)
    assert torch.equal(resize_positions(positions, 1, 4), positions)


def test_tower_of_a_whole_clip(checkpoint, tmp_path: Path) -> None:
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    whole = CLIPModel(CLIPConfig(text_config=text, vision_config={**SMALL, "image_size": SIDE}, projection_dim=16))
    whole.save_pretrained(tmp_path / "clip")
    write_settings(tmp_path / "clip", TOWERS["clip"][2])
    compose(Parts(tmp_path / "clip", checkpoint("qwen3")), tmp_path / "model")
    inner = models.load(tmp_path / "model").model.vision_tower
    for name, value in whole.vision_model.state_dict().items():
        assert torch.equal(inner.state_dict()[name], value), name


def test_command_writes_the_folder_and_says_what_it_has(
    tower, checkpoint, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "WIDTH", 300)  # temporary folders may have long names
    words = ["compose", "--image-encoder", str(tower("siglip")), "--foundation", str(checkpoint("qwen3"))]
    assert main([*words, "-o", str(tmp_path / "one")]) == 0
    said = capsys.readouterr().out
    assert "one: LLaVA's shape (model_type llava), because siglip_vision_model gives each image 16 features" in said
    assert "images of 16 pixels" in said and "lm_head" in said and "tied" in said and "next: octavo generate" in said
    assert main([*words, "-o", str(tmp_path / "two"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["image_tokens"] == 16 and found["parameters"]["image_projector"] == 2 * 65 * 64
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
    bare = copy(tower("siglip"), tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    words[2] = str(bare)
    assert main([*words, "-o", str(tmp_path / "three")]) == 1 and "no weights to load" in capsys.readouterr().err
    assert main([*words, "-o", str(tmp_path / "three"), "--init", "image_encoder"]) == 0
    assert "new, " in capsys.readouterr().out.partition("image_projector")[0]
    assert main([*words, "-o", str(tmp_path / "four"), "--init", "foundation"]) == 1
    assert "--init foundation: only image_encoder can" in capsys.readouterr().err
    assert main([*words, "-o", str(tmp_path / "one")]) == 1
    assert "one is not empty, and nothing is overwritten" in capsys.readouterr().err


@pytest.mark.long
def test_real_decoder_keeps_its_text(tower, tmp_path: Path) -> None:
    folder = require("real")
    compose(Parts(tower("siglip"), folder), tmp_path / "vlm")
    stock, before = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / "vlm"),
        AutoModelForCausalLM.from_pretrained(folder),
    )
    ids = AutoTokenizer.from_pretrained(folder)("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = stock(input_ids=ids).logits
        assert torch.equal(logits[..., : before.config.vocab_size], before(input_ids=ids).logits)
    assert stock.config.text_config.vocab_size % 64 == 0 and stock.dtype == before.dtype == torch.bfloat16


def parts_file(folder: Path, encoder: Path, decoder: Path, **model: object) -> Path:
    """A configuration whose model is composed of parts."""
    parts = {"image_encoder": {"path": str(encoder)}, "foundation": {"path": str(decoder)}, **model}
    rows = [
        {"image": "a.png", "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "3"}]}
    ]
    some_image().save(folder / "a.png")
    (folder / "rows.json").write_text(json.dumps(rows * 4))
    train = {"steps": 2, "warmup": 0, "micro_batch": 2, "global_batch": 2, "seq_length": 128}
    content = {
        "model": parts,
        "data": {"train": [{"path": "rows.json"}]},
        "train": train,
        "run": {"dir": str(folder / "run")},
    }
    (folder / "parts.yaml").write_text(json.dumps(content))
    return folder / "parts.yaml"


@pytest.mark.usefixtures("no_pages")
def test_configuration_with_parts_composes_its_model_once(
    tower, checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    encoder = Path(shutil.copytree(tower("siglip"), tmp_path / "siglip"))
    file = parts_file(tmp_path, encoder, checkpoint("qwen3"), image_projector={"init_std": 0.1})
    folder = Path(load_config(file).model.path)
    assert folder.parent == tmp_path / "cache" / "composed" and not folder.exists()
    assert main(["plan", str(file)]) == 0 and "LLaVA's shape" in capsys.readouterr().err
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert main(["train", str(file), "model.freeze=[image_encoder, foundation, lm_head]"]) == 0
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    first, trained = models.load(folder).state_dict(), models.load(tmp_path / "run" / "hf").state_dict()
    changed = {name for name in first if not torch.equal(first[name], trained[name])}
    assert changed and all("multi_modal_projector" in name for name in changed)
    # A touched file is the same model. Other files of a part are another, and a folder that is named is used as it is.
    os.utime(encoder / "model.safetensors")
    assert load_config(file).model.path == str(folder)
    template = tmp_path / "template.jinja"
    paths = []
    for text in ("a", "b"):
        template.write_text(text)
        paths.append(load_config(file, [f"model.foundation.chat_template={template}"]).model.path)
    assert len({*paths, str(folder)}) == 3
    (encoder / "preprocessor_config.json").write_text((encoder / "preprocessor_config.json").read_text() + " ")
    assert load_config(file).model.path != str(folder)
    assert load_config(file, [f"model.path={folder}"]).model.path == str(folder)
    # The configuration that the run has written names the same folder.
    assert load_config(tmp_path / "run" / "config.yaml").model.path == str(folder)


def test_cached_model_of_parts_depends_on_the_middle_of_their_files(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(8 << 20))
    parts = {"image_encoder": {"path": str(tmp_path)}}
    before = folder_of_parts(parts)
    with file.open("r+b") as content:
        content.seek(3 << 20)
        content.write(b"x" * (32 << 10))
    assert folder_of_parts(parts) != before


def test_verify_says_that_no_server_has_a_class_for_a_composed_model(composed, capsys) -> None:
    assert main(["verify", str(composed("dinov3", "qwen3")), "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert {loader: one["verdict"] for loader, one in verdicts.items()} == {
        "transformers": "ok",
        "vLLM": "refuses",
        "SGLang": "refuses",
    }


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"foundation": None}, "model.foundation: required, but absent: a composed model has"),
        ({"image_encoder": {"path": "nowhere"}}, r"model.image_encoder.path: there is no folder .*nowhere"),
        ({"image_projector": {"kind": "mlp3"}}, "model.image_projector.kind"),
        ({"revision": "main"}, "model.revision: a composed model is on no hub; remove it"),
        (
            {"foundation": {"path": "rows.json", "revision": "v1"}},
            "model.foundation.revision: has no effect on a",
        ),
        ({"image_encoder": {"path": "tower", "image_size": 15}}, "octavo train: an image of 15 pixels cannot be cut"),
        (
            {"image_encoder": {"path": "tower", "feature_layer": 9}},
            "model.image_encoder.feature_layer 9: .* has 3",
        ),
        (
            {"image_encoder": {"path": "rows.json", "imagesize": 3}},
            "image_encoder.imagesize: unknown key; did you mean",
        ),
    ],
)
def test_wrong_parts_are_reported_with_their_key(
    model: dict[str, object], problem: str, tower, checkpoint, tmp_path: Path, capsys
) -> None:
    (tmp_path / "tower").symlink_to(tower("clip"))
    file = parts_file(tmp_path, tower("clip"), checkpoint("qwen3"), **model)
    assert main(["train", str(file)]) == 2
    assert re.search(problem, capsys.readouterr().err)
