"""Components and blocks of every family."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, GPT2Config, PreTrainedConfig, T5Config

from octavo import models
from octavo.fp8.policy.topology import topology
from octavo.models import tiny

TOWERS = {"qwen3_vl": (2, 2), "qwen3_vl_moe": (2, 2), "qwen2_5_vl": (2, 2), "internvl": (2, 2), "nvila_lite": (2, 2)}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_parameter_has_one_component(checkpoint, family):
    model = models.empty(checkpoint(family))
    described = models.describe(model)
    assert described.name == family
    assert described.has_vision == (family in TOWERS)
    expected = set(models.COMPONENTS) if described.has_vision else {"foundation", "lm_head"}
    found = {described.component_of(n.rpartition(".")[0]) for n, _ in model.named_parameters(remove_duplicate=False)}
    assert found == expected == set(described.components)
    layers = described.layers(model)
    assert len(layers) == sum(TOWERS.get(family, (2,)))
    assert len({type(block) for _, block in layers}) == (2 if described.has_vision else 1)


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


def test_a_decoder_that_nobody_listed():
    model = models.empty(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100))
    family = models.describe(model)
    assert family.components["foundation"] == ("transformer.**",)
    assert family.layer_globs == ("transformer.h.*",) and len(family.layers(model)) == 2


def test_what_is_no_decoder():
    with pytest.raises(models.ModelError, match="model_type 't5' is neither a model of images and text"):
        models.empty(T5Config())
    with torch.device("meta"):
        bert = AutoModelForCausalLM.from_config(BertConfig(num_hidden_layers=1))
    bert.get_output_embeddings = lambda: None
    with pytest.raises(models.ModelError, match="nor a text-only decoder: found output projection False"):
        models.describe(bert)
    with pytest.raises(models.ModelError, match="Linear has no `config`"):
        models.describe(nn.Linear(1, 1))


def test_another_vision_family_is_refused(checkpoint):
    model = models.empty(checkpoint("qwen3"))
    model.config.vision_config = PreTrainedConfig()
    with pytest.raises(models.ModelError, match="takes images or audio, and Octavo describes no such family"):
        models.describe(model)


def test_modules_under_other_names_are_noticed(checkpoint):
    model = models.empty(checkpoint("qwen3_vl"))
    model.model.visual.extra = nn.Linear(2, 2)
    with pytest.raises(models.ModelError, match="2 parameters belong to no component.*model.visual.extra.weight"):
        models.describe(model)
    del model.model.visual.extra, model.model.visual.merger, model.model.visual.deepstack_merger_list
    with pytest.raises(models.ModelError, match="found for image_projector"):
        models.describe(model)


def test_what_stays_in_high_precision_has_a_reason(checkpoint):
    reasons = models.stays(models.empty(checkpoint("qwen3_vl_moe")))
    assert set(reasons) == {"embeddings", "patch embedding", "norms", "rotary", "attention scores", "router"}
    assert all(len(reason) > 20 for reason in reasons.values())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_plan_reads_the_components_as_the_family_does(checkpoint, family):
    model = models.empty(checkpoint(family))
    described = models.describe(model)
    rows = topology(model, described.components)
    assert {row.component for row in rows} == set(described.components)
    assert all(row.component == described.component_of(row.module or row.name) for row in rows)
