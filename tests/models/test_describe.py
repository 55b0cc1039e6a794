"""Components and blocks of every family."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, GPT2Config, PreTrainedConfig, T5Config

from octavo import fp8, models
from octavo.base.model_families import tiny_families, trained_families
from octavo.fp8.policy.topology import component_namer, describe_layers
from octavo.models.structure import skeleton, structure

FIRST = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "internvl")  # whose names are in files since 0.4.0


@pytest.mark.parametrize("family", tiny_families())
def test_every_parameter_has_one_component(checkpoint, family):
    model = models.empty(checkpoint(family))
    described = models.describe(model)
    assert described.name == family
    assert described.has_vision == (family in trained_families("images"))
    assert described.has_audio == (family in trained_families("sound"))
    towers = {"image": described.has_vision, "audio": described.has_audio}
    parts = {f"{of}_{part}" for of, there in towers.items() for part in ("encoder", "projector") if there}
    actual = {described.component_of(n.rpartition(".")[0]) for n, _ in model.named_parameters(remove_duplicate=False)}
    assert actual == {*parts, "foundation", "lm_head"} == set(described.components)
    layers = described.layers(model)
    text, of = model.config.get_text_config(), "audio_config" if described.has_audio else "vision_config"
    tower = getattr(model.config, of, None)
    own = 0 if tower is None else getattr(tower, "depth", None) or tower.num_hidden_layers
    own -= family.startswith("nvila")  # the tower's last layer never runs
    assert len(layers) == text.num_hidden_layers + own >= 2
    assert len({type(block) for _, block in layers}) == 1 + sum(towers.values())


@pytest.mark.parametrize(
    ("family", "name", "component"),
    [
        ("qwen3_vl", "model.visual.patch_embed.proj", "image_encoder"),
        ("qwen3_vl", "model.visual.deepstack_merger_list.0.linear_fc1", "image_projector"),
        ("qwen3_vl", "model.visual.merger.linear_fc2", "image_projector"),
        ("qwen3_vl", "model.visual", None),
        ("qwen3_vl_moe", "model.language_model.layers.0.mlp.experts", "foundation"),
        ("qwen2_5_vl", "model.visual.merger.mlp.0", "image_projector"),
        ("internvl", "model.vision_tower.encoder.layer.1.mlp.fc1", "image_encoder"),
        ("internvl", "model.multi_modal_projector.linear_1", "image_projector"),
        ("internvl", "lm_head", "lm_head"),
        ("ernie4_5_vl_moe", "model.language_model.layers.1.mlp.vision_moe.experts", "image_projector"),
        ("ernie4_5_vl_moe", "model.language_model.layers.1.mlp.text_moe.experts", "foundation"),
        ("mpt", "transformer.blocks.0.attn.Wqkv", "foundation"),
    ],
)
def test_component_of(checkpoint, family, name, component):
    model = models.empty(checkpoint(family))
    assert name in dict(model.named_modules())
    assert models.describe(model).component_of(name) == component


def test_a_config_is_described_without_weights(checkpoint):
    config = models.read_config(checkpoint("qwen3_vl"))
    assert models.describe(config).image_token_id == config.image_token_id


def test_unlisted_decoder_is_described():
    model = models.empty(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100))
    family = models.describe(model)
    assert family.components["foundation"] == ("transformer.**",)
    assert family.layer_globs == ("transformer.h.*",) and len(family.layers(model)) == 2


def test_models_without_decoder_are_rejected():
    with pytest.raises(models.ModelError, match="model_type 't5' is neither a model of images or audio and text"):
        models.empty(T5Config())
    with torch.device("meta"):
        bert = AutoModelForCausalLM.from_config(BertConfig(num_hidden_layers=1))
    bert.get_output_embeddings = lambda: None
    with pytest.raises(models.ModelError, match="by its structure: .*found output projection False"):
        models.describe(bert)
    with pytest.raises(models.ModelError, match="Linear has no `config`"):
        models.describe(nn.Linear(1, 1))


def test_a_text_model_that_takes_images_is_refused(checkpoint):
    model = models.empty(checkpoint("qwen3"))
    model.config.vision_config = PreTrainedConfig()
    with pytest.raises(models.ModelError, match="it takes vision_config, but does not generate text"):
        models.describe(model)


@pytest.mark.parametrize("family", FIRST)
def test_module_names_match_saved_plans(checkpoint, family):
    """Files and checkpoints contain these globs."""
    described, third = models.describe(models.empty(checkpoint(family))), family.startswith("qwen3")
    encoder, projector, blocks = ["vision_tower"], ["multi_modal_projector"], "vision_tower.encoder.layer"
    if "qwen" in family:
        encoder = [f"visual.{part}" for part in ("blocks", "patch_embed", *["pos_embed"] * third, "rotary_pos_emb")]
        projector, blocks = ["visual.merger", *["visual.deepstack_merger_list"] * third], "visual.blocks"
    assert list(described.components) == ["image_encoder", "image_projector", "foundation", "lm_head"]
    assert sorted(described.components["image_encoder"]) == [f"model.{part}.**" for part in encoder]
    assert described.components["image_projector"] == tuple(f"model.{part}.**" for part in projector)
    assert described.components["foundation"] == ("model.language_model.**",)
    assert described.components["lm_head"] == ("lm_head",)
    assert described.layer_globs == (f"model.{blocks}.*", "model.language_model.layers.*")
    assert described.language_model == "model.language_model"
    assert described.tower == f"model.{blocks.partition('.')[0]}"


def test_projector_is_found_by_its_width(checkpoint):
    """A projector with an unlisted name; if both widths are equal, only names decide."""
    model = models.empty(checkpoint("qwen3_vl"))
    visual, own = model.model.visual, model.config.vision_config.hidden_size
    visual.translator = nn.Linear(own, 96, device="meta")
    visual.vit_merger = nn.Linear(own, own, device="meta")  # within the tower, as MiniCPM has one
    assert "model.visual.translator.**" in models.describe(model).components["image_encoder"]
    model.model.language_model.embed_tokens = nn.Embedding(8, 96, device="meta")
    described = models.describe(model)
    assert "model.visual.translator.**" in described.components["image_projector"]
    assert "model.visual.vit_merger.**" in described.components["image_encoder"]


def test_an_audio_tower_is_a_component(checkpoint):
    """The audio tower and its projector are planned and frozen by name."""
    model = models.empty(checkpoint("internvl"))
    tower = nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(2))})
    model.model.audio_tower, model.model.embed_audio = tower.to("meta"), nn.Linear(64, 64, device="meta")
    family = models.describe(model)
    assert family.components["audio_encoder"] == ("model.audio_tower.**",)
    assert (
        family.components["audio_projector"] == ("model.embed_audio.**",) and family.audio_tower == "model.audio_tower"
    )
    assert family.components["image_projector"] == ("model.multi_modal_projector.**",)
    assert "model.audio_tower.layers.*" in family.layer_globs
    plan = fp8.plan(model, fp8.Policy("rowwise", components={"audio_encoder": "blockwise"}), family.components)
    assert {row.recipe.name for row in plan.rows if row.component == "audio_encoder"} == {"blockwise"}
    assert models.freeze(model, family, ["audio_encoder", "audio_projector"]) == [
        name for name, _ in model.named_parameters() if "audio" in name
    ]
    plan = fp8.plan(model, "rowwise", family.components)
    assert {row.name for row in plan.rows if row.row.frozen} == {
        "model.audio_tower.layers.0.0", "model.audio_tower.layers.1.0", "model.embed_audio",
    }  # fmt: skip


def test_single_parameters_have_a_component(checkpoint):
    model = models.empty(checkpoint("internvl"))
    model.model.image_newline = nn.Parameter(torch.zeros(8, device="meta"))
    model.model.vision_tower.class_pos_emb = nn.Parameter(torch.zeros(8, device="meta"))
    model.model.vision_tower.connector = nn.Linear(8, 8, device="meta")
    family = models.describe(model)
    assert family.component_of("model") == family.component_of("model.vision_tower.connector") == "image_projector"
    assert family.component_of("model.vision_tower") == "image_encoder"
    namer = component_namer(family.components)
    for name in ("model.language_model.layers.0.mlp.up_proj", "model.vision_tower.encoder.layer.0", "lm_head"):
        assert namer(name) == family.component_of(name)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda m: setattr(m, "extra", nn.Linear(2, 2)), "2 parameters in no component, first 'extra.weight'"),
        (lambda m: setattr(m.model, "video_tower", nn.Linear(2, 2)), "a second tower, model.video_tower"),
        (lambda m: setattr(m.model, "vqmodel", nn.Linear(2, 2)), "parts that make images, model.vqmodel"),
        (
            lambda m: setattr(m.model, "eye", m.model._modules.pop("visual")),
            "no vision tower",
        ),
        (lambda m: delattr(m.model.language_model, "layers"), "no list of blocks in model.language_model"),
        (lambda m: setattr(m, "get_output_embeddings", lambda: None), "no output projection"),
        (lambda m: setattr(m.config, "is_encoder_decoder", True), "it is an encoder-decoder model"),
        (lambda m: setattr(m, "get_decoder", lambda: m.model), "its decoder is not a separate module"),
        (
            lambda m: setattr(m, "get_encoder", lambda modality: m.model.language_model.norm),
            "not a separate module next to the tower model.language_model.norm",
        ),
    ],
)
def test_violated_rule_is_named(checkpoint, change, rule):
    model = models.empty(checkpoint("qwen3_vl"))
    model.model.language_model.get_output_embeddings = lambda: None
    change(model)
    with pytest.raises(models.ModelError, match=rule):
        models.describe(model)


def test_a_head_may_be_in_the_decoder(checkpoint):
    """Like Llama 4, whose decoder is a language model."""
    model = models.empty(checkpoint("qwen3_vl"))
    text, head = model.model.language_model, model._modules.pop("lm_head")
    text.lm_head, model.get_output_embeddings, text.get_output_embeddings = head, lambda: None, lambda: head
    family = models.describe(model)
    assert family.components["lm_head"] == ("model.language_model.lm_head",)
    assert family.component_of("model.language_model.lm_head") == "lm_head"
    assert family.component_of("model.language_model.layers.0") == family.component_of("model.language_model.norm")


def test_score_layer_is_the_head_of_a_scoring_model(checkpoint):
    scores = skeleton.skeleton(models.read_config(checkpoint("llama")), torch.float32, scores=True)
    assert models.describe(scores).components["lm_head"] == ("score",)


def test_lists_of_blocks_are_of_modules_that_are_made_of_modules():
    """DeepStack mergers and single linear layers per modality are excluded."""
    block, flat = nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)
    model = nn.ModuleDict({"blocks": nn.ModuleList([block]), "maps": nn.ModuleList([flat]), "none": nn.ModuleList()})
    assert structure.block_lists(model, "") == ["blocks"]


def test_older_configurations_name_the_token_of_an_image_by_index():
    assert structure.image_token(PreTrainedConfig(image_token_index=7)) == 7
    assert structure.image_token(PreTrainedConfig(image_token_index=7, image_token_id=0)) == 0
    assert structure.audio_token(PreTrainedConfig(audio_token_index=7)) == 7


def test_high_precision_modules_have_a_reason(checkpoint):
    reasons = models.high_precision_modules(models.empty(checkpoint("qwen3_vl_moe")))
    assert set(reasons) == {"embeddings", "patch embedding", "norms", "rotary", "attention scores", "router"}
    assert all(len(reason) > 20 for reason in reasons.values())


@pytest.mark.parametrize("family", tiny_families())
def test_the_plan_reads_the_components_as_the_family_does(checkpoint, family):
    model = models.empty(checkpoint(family))
    described = models.describe(model)
    rows = describe_layers(model, described.components)
    bare = {"image_projector"} if family == "gemma3" else set()  # whose projector is a parameter
    assert {row.component for row in rows} == set(described.components) - bare
    assert all(row.component == described.component_of(row.module or row.name) for row in rows)
