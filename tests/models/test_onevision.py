"""LLaVA-OneVision-1.5: published folders, and the tower against a plain implementation."""

from __future__ import annotations

import json
import math
import shutil
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForImageTextToText, PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octavo import models
from octavo.checkpoint.verify import verify
from octavo.checkpoint.verify.findings import LOADERS
from octavo.models import ModelError
from octavo.models.custom import onevision, register
from octavo.models.custom.onevision import segments
from octavo.models.custom.onevision.tower import rotate
from octavo.models.weights.random_init import init_deferred
from tests.models.conftest import batch
from tests.models.published import as_published

KIND = "llavaonevision1_5"


@pytest.fixture(scope="module")
def published(checkpoint, tmp_path_factory) -> Path:
    return as_published(checkpoint(KIND), tmp_path_factory.mktemp("published") / "LLaVA-OneVision-1.5")


@pytest.fixture(scope="module")
def loaded(published):
    return models.load(published)


# --- the folder -------------------------------------------------------------------------------------------------------


def test_published_folder_is_read_without_running_its_code(published, loaded):
    config = models.read_config(published)
    assert type(config) is onevision.LLaVAOneVision1_5_Config and not hasattr(config, "auto_map")
    assert config.vision_start_token_id == 151652
    assert config.text_config.rope_parameters["rope_theta"] == 5e6
    assert config.text_config.model_type == "LLaVAOneVision1_5_text"
    stock, info = AutoModelForImageTextToText.from_pretrained(published, output_loading_info=True)
    assert type(stock) is type(loaded) is onevision.LLaVAOneVision1_5_ForConditionalGeneration
    assert not any(info.values())


def test_names_on_disk_are_the_published_ones(published, loaded, tmp_path):
    """They are also saved in that layout with unchanged values."""
    layer = [f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer += [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names = {f"model.layers.{i}.{n}" for i in range(2) for n in layer}
    names |= {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    both = [f"{n}.{leaf}" for n in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
            for leaf in ("weight", "bias")]  # fmt: skip
    names |= {f"visual.blocks.{i}.{n}" for i in range(2) for n in both}
    rest = [f"{n}.{leaf}" for n in ("pre_layernorm", "merger.ln_q", "merger.mlp.0", "merger.mlp.2")
            for leaf in ("weight", "bias")]  # fmt: skip
    rest += ["patch_embed.proj.weight", "class_embedding", "class_pos_emb"]
    names |= {f"visual.{n}" for n in rest}
    first = load_file(published / "model.safetensors")
    assert set(first) == names
    loaded.save_pretrained(tmp_path)
    again = load_file(tmp_path / "model.safetensors")
    assert set(again) == names and all(torch.equal(first[name], again[name]) for name in names)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LLaVAOneVision1_5_ForConditionalGeneration"]
    assert (config["model_type"], config["text_config"]["model_type"]) == (KIND, "LLaVAOneVision1_5_text")
    assert config["vision_config"]["model_type"] == "rice_vit" and config["tie_word_embeddings"] is False


@pytest.mark.parametrize("how", [{}, {"load_in_fp8": {"image_encoder": "row"}}, {"dtype": torch.bfloat16}], ids=str)
def test_class_tokens_are_loaded_and_angles_computed(published, how):
    """Initialisation after loading would draw the first anew, and weights made on the meta device leave the second
    empty."""
    visual, disk = models.load(published, **how).model.visual, load_file(published / "model.safetensors")
    for name in ("class_embedding", "class_pos_emb"):
        assert torch.equal(getattr(visual, name), disk[f"visual.{name}"].to(visual.class_embedding.dtype))
    wanted = torch.tensor([1.0, 1e4 ** (-2 / 8), 1e4 ** (-4 / 8), 1e4 ** (-6 / 8)])
    assert (
        torch.allclose(visual.rotary_pos_emb.inv_freq, wanted) and visual.rotary_pos_emb.inv_freq.dtype is wanted.dtype
    )


def test_deferred_model_has_class_tokens_and_angles_before_its_weights(published, loaded):
    """Buffers are unsharded on every rank; an initialized model has a zero class token."""
    wanted = dict(loaded.named_buffers())
    for model in (models.load_deferred(published).model, init_deferred(published).model):
        assert all(p.is_meta for p in model.parameters())
        actual = dict(model.named_buffers())
        drawn = {name for name in wanted if not torch.equal(actual[name], wanted[name])}
        assert actual.keys() == wanted.keys() and drawn <= {
            "model.visual.class_embedding",
            "model.visual.class_pos_emb",
        }
        assert not any(actual[name].any() for name in drawn)


def test_known_problems_of_other_loaders_are_reported(published):
    """transformers has no such class."""
    actual = verify(published)
    assert actual.ok and [(one.kind, one.file) for one in actual.warnings] == [("own-family", "config.json")]
    assert {one.loader: (one.verdict, one.warns) for one in actual.verdicts} == dict.fromkeys(LOADERS, ("ok", True))
    assert actual.unread == ("configuration_llavaonevision1_5.py", "modeling_llavaonevision1_5.py")


def test_class_tokens_are_never_trained(loaded):
    names = {name for name, _ in loaded.named_parameters()}
    assert not any("class" in name for name in names)
    family = models.describe(loaded)
    assert family.component_of("model.visual.merger.mlp.0") == "image_projector"
    assert family.component_of("model.visual.pre_layernorm") == "image_encoder"


def test_tokens_equal_qwen3(published, loaded, tmp_path):
    """The head is the folder's own, though the configuration says that it is tied; logits have the rows of the table,
    not the vocab_size at the top."""
    config = json.loads((published / "config.json").read_text())
    text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    weights = load_file(published / "model.safetensors")
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    stock = Qwen3ForCausalLM(Qwen3Config(**{**text, "tie_word_embeddings": False}))
    stock.load_state_dict({name: value for name, value in weights.items() if not name.startswith("visual.")})
    ids = torch.arange(5, 45).reshape(2, 20)
    with torch.no_grad():
        wanted, actual = stock.eval()(input_ids=ids, labels=ids), loaded(input_ids=ids, labels=ids)
    assert torch.equal(actual.logits, wanted.logits) and torch.equal(actual.loss, wanted.loss)
    assert actual.logits.shape[-1] == len(weights["lm_head.weight"]) < loaded.config.vocab_size


def test_positions_count_tokens(loaded):
    """Also for images: the three axes of Qwen2.5-VL, whose processor this family uses, do not apply."""
    assert models.prompt_positions(loaded, models.describe(loaded), torch.arange(7))[0].tolist() == [
        [0, 1, 2, 3, 4, 5, 6]
    ]
    ids, pixels, grid = asked(loaded, (4, 4))
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid}
    with torch.no_grad():
        plain, counted = loaded(**inputs), loaded(**inputs, position_ids=torch.arange(ids.shape[1])[None])
    assert torch.equal(plain.logits, counted.logits)


def test_another_class_of_the_same_name_stays(published, monkeypatch):
    class Other(PreTrainedConfig):
        model_type = KIND

    monkeypatch.setitem(CONFIG_MAPPING._extra_content, KIND, Other)
    assert not register.is_custom(KIND)
    register._register(register.FAMILIES[KIND])
    assert CONFIG_MAPPING[KIND] is Other
    with pytest.raises(ModelError, match="requires Python code"):
        models.read_config(published)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"temporal_patch_size": 2}, "temporal_patch_size 2, but RICE-ViT takes single frames"),
        ({"embed_dim": 32}, "embed_dim 32 and hidden_size 64"),
        ({"num_heads": 32}, "vision_config has 32 heads for a width of 64"),
        ({"text_hidden_size": 32}, "hidden_size 64 and vision_config text_hidden_size 32"),
    ],
)
def test_invalid_tower_is_rejected(published, tmp_path, changes, why):
    folder = Path(shutil.copytree(published, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=why):
        models.read_config(folder)


# --- images -----------------------------------------------------------------------------------------------------------


def test_patches_are_of_one_frame(published, loaded, tmp_path):
    """transformers defaults to two frames, which would split every patch in two."""
    processor = models.load_processor(published)
    inputs = batch(processor, image=True)
    assert inputs["pixel_values"].shape == (16, 3 * 4 * 4)
    assert int((inputs["input_ids"] == loaded.config.image_token_id).sum()) == 4
    folder = Path(shutil.copytree(published, tmp_path / "model"))
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "temporal_patch_size": 2}))
    with pytest.raises(ModelError, match="temporal_patch_size is 1 in config.json but 2 in preprocessor_config.json"):
        models.load_processor(folder)
    twice = inputs["pixel_values"].repeat_interleave(2, 1)
    with pytest.raises(ValueError, match=r"takes \[patches, 48\].*Set temporal_patch_size to 1"):
        loaded(**{**inputs, "pixel_values": twice})


def test_patches_come_in_the_order_of_their_places(published):
    """An image whose patches have their number as brightness shows where rows of pixels were cut."""
    processor = models.load_processor(published).image_processor
    high, wide = 4, 8
    numbers = np.arange(high * wide, dtype=np.uint8).reshape(high, wide)
    picture = Image.fromarray(numbers.repeat(4, 0).repeat(4, 1))
    made = processor(images=[picture], return_tensors="pt")
    assert made["image_grid_thw"].tolist() == [[1, high, wide]]
    actual = ((made["pixel_values"] * 0.5 + 0.5) * 255).mean(1).round().long()
    rows, columns = segments.patch_positions([(1, high, wide)], 2, torch.device("cpu")).unbind(1)
    assert (rows * wide + columns).tolist() == actual.tolist()
    assert actual[:6].tolist() == [0, 1, wide, wide + 1, 2, 3]  # block by block of 2 x 2


def asked(model, *sizes: tuple[int, int], frames: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return (ids, pixels, grid) for images of given heights and widths in patches, two tokens before each and three at
    the end."""
    token, generator = model.config.image_token_id, torch.Generator().manual_seed(seed)
    ids: list[int] = []
    for high, wide in sizes:
        ids += [7, 8, *[token] * (frames * high * wide // 4)]
    grid = torch.tensor([(frames, *size) for size in sizes])
    pixels = torch.randn(int(grid.prod(1).sum()), 48, generator=generator)
    return torch.tensor([[*ids, 9, 10, 11]]), pixels, grid


def test_features_that_do_not_match_tokens_are_rejected(loaded):
    ids, pixels, grid = asked(loaded, (4, 4), (2, 4))
    with pytest.raises(ValueError, match="6 placeholder tokens .* for 4 image features"):
        loaded(input_ids=ids, pixel_values=pixels[:16], image_grid_thw=grid[:1])
    with pytest.raises(ValueError, match="16 patches were passed with grids of 24"):
        loaded(input_ids=ids, pixel_values=pixels[:16], image_grid_thw=grid)
    with pytest.raises(ValueError, match="pass input_ids, not inputs_embeds"):
        embeds = loaded.get_input_embeddings()(ids)
        loaded(inputs_embeds=embeds, pixel_values=pixels, image_grid_thw=grid)
    with pytest.raises(ValueError, match="2 sequences per prompt with images"):
        loaded.generate(input_ids=ids, pixel_values=pixels, image_grid_thw=grid, num_return_sequences=2, do_sample=True)


# --- the tower --------------------------------------------------------------------------------------------------------


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate features i and i + D / 2 of [heads, N, D] as complex numbers by angle i of [N, D / 2]."""
    one, other = x.chunk(2, -1)
    numbers = torch.complex(one, other) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([numbers.real, numbers.imag], -1)


def plain(visual: onevision.RiceViT, pixels: Tensor, high: int, wide: int) -> Tensor:
    """Compute the features of one image in fp64 from the documented formulas, without the tower's code."""
    p = {name: value.double() for name, value in visual.state_dict().items()}
    heads, eps, width = visual.config.num_heads, visual.config.layer_norm_eps, visual.config.hidden_size

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]
        )

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2

    at = [(2 * a + i, 2 * b + j) for a in range(high // 2) for b in range(wide // 2) for i in (0, 1) for j in (0, 1)]
    half = width // heads // 2
    f = [10000 ** (-2 * i / half) for i in range(half // 2)]
    angles = torch.tensor([[r * one for one in f] + [c * one for one in f] for r, c in at], dtype=torch.float64)
    angles = torch.cat([p["class_pos_emb"], angles])
    x = torch.cat([p["class_embedding"][None], pixels.double() @ p["patch_embed.proj.weight"].flatten(1).T])
    x = norm(x, "pre_layernorm")
    for i in range(visual.config.depth):
        block = f"blocks.{i}"
        q, k, v = linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv").view(len(x), 3, heads, -1).permute(1, 2, 0, 3)
        scores = turned(q, angles) @ turned(k, angles).mT / math.sqrt(2 * half)
        x = x + linear((scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), width), f"{block}.attn.proj")
        x = x + linear(gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1")), f"{block}.mlp.fc2")
    joined = norm(x[1:], "merger.ln_q").reshape(len(at) // 4, 4 * width)
    return linear(gelu(linear(joined, "merger.mlp.0")), "merger.mlp.2").float()


@pytest.mark.parametrize("eps", [1e-5, 0.3])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "varlen"])
def test_the_tower_is_a_plain_loop_over_images(published, attention, eps):
    model = models.load(published, attn_implementation="eager" if attention == "eager" else None)
    if attention == "varlen":
        models.use_kernel(model, "varlen", "image_encoder")
    visual = model.model.visual
    for module in visual.modules():
        if isinstance(module, torch.nn.LayerNorm):
            assert module.eps == 1e-5
            module.eps = eps
    visual.config.layer_norm_eps = eps
    sizes = [(2, 4), (6, 4), (2, 2)]
    edges = [0, *accumulate(high * wide for high, wide in sizes)]
    pixels = torch.randn(edges[-1], 48, generator=torch.Generator().manual_seed(1))
    wanted = [plain(visual, pixels[a:b], *size) for (a, b), size in zip(pairwise(edges), sizes, strict=True)]
    with torch.no_grad():
        actual = visual(pixels, torch.tensor([(1, *size) for size in sizes]))
    assert actual.last_hidden_state.shape == (edges[-1], 64)
    assert torch.allclose(actual.pooler_output, torch.cat(wanted), atol=2e-5)


def test_frames_of_a_video_are_images(loaded):
    """Each frame is a segment with a class token."""
    frame, _, one = (asked(loaded, (2, 4))[i] for i in (1, 1, 2))
    other = asked(loaded, (2, 4), seed=1)[1]
    clip = torch.cat([frame, other])
    with torch.no_grad():
        apart = [loaded.get_image_features(x, one).pooler_output[0] for x in (frame, other)]
        video = loaded.get_video_features(clip, torch.tensor([[2, 2, 4]])).pooler_output
        assert len(video) == 1 and torch.allclose(video[0], torch.cat(apart), atol=1e-5)
        ids, token = asked(loaded, (2, 4), frames=2)[0], loaded.config.video_token_id
        ids[ids == loaded.config.image_token_id] = token
        seen = loaded(input_ids=ids, pixel_values_videos=clip, video_grid_thw=torch.tensor([[2, 2, 4]])).logits
        embeds = loaded.get_input_embeddings()(ids).clone()
        embeds[ids == token] = video[0]
        assert torch.allclose(loaded(inputs_embeds=embeds).logits, seen, atol=1e-5)


def test_new_image_sizes_do_not_recompile(published):
    """Image sizes are Python integers, so a compiled block would specialize on each."""
    visual, counter = models.load(published).model.visual, CompileCounter()
    visual.blocks[0].forward = torch.compile(visual.blocks[0].forward, backend=counter)
    created = []
    for high, wide in ((2, 2), (4, 4), (2, 8), (6, 4)):
        visual(torch.randn(high * wide, 48), torch.tensor([[1, high, wide]]))
        created.append(counter.frame_count)
    assert created[0] < created[1] == created[2] == created[3]
    torch._dynamo.reset()


def test_queries_are_rotated_in_fp32():
    """Rounded once to nearest."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 8, generator=generator).bfloat16()
    angles = torch.randn(5, 4, generator=generator).repeat(1, 2)[:, None]
    actual = rotate(x, angles.cos(), angles.sin())
    wanted = turned(x.transpose(0, 1).double(), angles[:, 0, :4].double()).transpose(0, 1)
    assert actual.dtype is torch.bfloat16
    half = 2.0 ** (wanted.frexp().exponent - 9)  # of the distance of two BF16 numbers
    assert bool(((actual.double() - wanted).abs() <= half + 1e-5).all())


# --- class tokens -----------------------------------------------------------------------------------------------------


def published_offsets(self: segments.Segments, x: Tensor) -> Tensor:
    """How the code that was published with the weights takes class tokens out: each segment begins where its patches
    would, were there no class tokens before it."""
    edges = [0, *accumulate(self.patches)]
    return torch.cat([x[a + 1 : b + 1] for a, b in pairwise(edges)])


def test_class_tokens_of_earlier_images_are_counted():
    """Patches are numbered from 0, class tokens are -1. With the published offsets the second image begins with its own
    class token and its last patch is lost; the third begins with two strangers."""
    of = segments.Segments.from_grid([(1, 2, 2), (1, 1, 3), (2, 1, 2)], torch.device("cpu"))
    assert of.edges.tolist() == [0, 5, 9, 12, 15] and of.longest == 5
    rows = of.with_class(torch.arange(11)[:, None], torch.tensor([[-1]]))
    assert rows.flatten().tolist() == [-1, 0, 1, 2, 3, -1, 4, 5, 6, -1, 7, 8, -1, 9, 10]
    assert of.without_class(rows).flatten().tolist() == list(range(11))
    assert published_offsets(of, rows).flatten().tolist() == [0, 1, 2, 3, -1, 4, 5, 6, -1, 7, 8]


def test_one_image_equals_published_code_and_two_do_not(loaded, monkeypatch):
    _, pixels, grid = asked(loaded, (4, 4), (2, 4))

    def features(*numbers: int) -> tuple[Tensor, ...]:
        edges = [0, 16, 24]
        parts = torch.cat([pixels[edges[n] : edges[n + 1]] for n in numbers])
        with torch.no_grad():
            return loaded.get_image_features(parts, grid[list(numbers)]).pooler_output

    (one,), (other,), both = features(0), features(1), features(0, 1)
    assert torch.allclose(both[0], one, atol=1e-5) and torch.allclose(both[1], other, atol=1e-5)
    monkeypatch.setattr(segments.Segments, "without_class", published_offsets)
    assert torch.equal(features(0)[0], one) and torch.equal(features(1)[0], other)
    faulty = features(0, 1)
    assert torch.equal(faulty[0], both[0]) and not torch.allclose(faulty[1], both[1], atol=1e-2)
