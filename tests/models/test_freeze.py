"""Freezing by component and glob."""

from __future__ import annotations

import pytest

from octavo import models


@pytest.fixture
def vision(checkpoint):
    model = models.load(checkpoint("qwen3_vl"))
    return model, models.describe(model)


def frozen(model) -> set[str]:
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def test_components_and_globs(vision):
    model, family = vision
    names = models.freeze(model, family, ["image_encoder", "**.layers.0"])
    assert set(names) == frozen(model) and len(names) == len(set(names))
    assert "model.visual.blocks.0.attn.qkv.bias" in names and "model.visual.pos_embed.weight" in names
    assert "model.language_model.layers.0.mlp.up_proj.weight" in names
    assert not any("merger" in name or "layers.1." in name for name in names)


def test_deepstack_mergers_belong_to_the_projector(vision):
    model, family = vision
    names = models.freeze(model, family, ["image_projector"])
    assert "model.visual.deepstack_merger_list.0.linear_fc1.weight" in names
    assert all("merger" in name for name in names)


def test_a_parameter_name_can_be_named(vision):
    model, family = vision
    assert models.freeze(model, family, ["**.qkv.bias"]) == [f"model.visual.blocks.{i}.attn.qkv.bias" for i in (0, 1)]


def test_a_tied_weight_is_frozen_under_both_names(vision):
    model, family = vision
    assert set(models.freeze(model, family, ["lm_head"])) == {
        "lm_head.weight",
        "model.language_model.embed_tokens.weight",
    }


def test_no_patterns_freeze_nothing(vision):
    model, family = vision
    assert models.freeze(model, family, []) == [] and frozen(model) == set()


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["image_encodr"], "'image_encodr' names neither a component"),
        (["model.visual.block.*"], r"Nearest names: model\.visual\.blocks"),
        (["model..visual"], "empty segment"),
        (["**"], "leaves no parameter"),
        (["image_encoder", "image_projector", "foundation"], "leaves no parameter of this qwen3_vl to train"),
    ],
)
def test_errors_change_nothing(vision, patterns, message):
    model, family = vision
    with pytest.raises(models.ModelError, match=message):
        models.freeze(model, family, patterns)
    assert frozen(model) == set()


def test_missing_component_is_rejected(checkpoint):
    model = models.load(checkpoint("llama"))
    with pytest.raises(models.ModelError, match="llama has no image_encoder; it has foundation, lm_head"):
        models.freeze(model, models.describe(model), ["image_encoder"])
