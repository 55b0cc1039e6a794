"""Rows of real model trees, and the globs that select them."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from octavo import fp8
from octavo.fp8.planning.table import fold
from octavo.fp8.policy.globs import covers, matches, nearest


@pytest.mark.parametrize(
    "pattern,name,expected",
    [
        ("**", "a.b.c", True),
        ("a.**", "a", True),
        ("a.**", "ab", False),
        ("**.layers.0.**", "model.layers.0.mlp.up", True),
        ("**.layers.0.**", "layers.0.mlp", True),
        ("**.layers.0.**", "model.layers.10.mlp", False),
        ("**.layers.0.**", "model.mylayers.0.mlp", False),
        ("model.layers.*.mlp.*_proj", "model.layers.12.mlp.up_proj", True),
        ("model.layers.*.mlp.*_proj", "model.layers.12.x.mlp.up_proj", False),
        ("layers.?.q", "layers.7.q", True),
        ("layers.?.q", "layers.17.q", False),
        ("q_proj", "a.q_proj", False),
        ("**.q_proj", "q_proj", True),
        ("a.**.b.**.c", "a.b.c", True),
        ("a.**.b.**.c", "a.x.y.b.z.c", True),
        ("a.**.b.**.c", "a.x.c", False),
        ("a.b", "axb", False),
        ("**.**", "a", True),
    ],
)
def test_globs(pattern, name, expected):
    assert matches(pattern, name) is expected


@pytest.mark.parametrize("pattern", ["a..b", "", ".a", "**proj", "a.x**"])
def test_invalid_globs_are_rejected_with_reason(pattern):
    with pytest.raises(ValueError, match="empty segment|stand alone"):
        matches(pattern, "a")


@pytest.mark.parametrize(
    "pattern", ["**." * 1000 + "x", "*?" * 30 + "x", "**.*." * 20 + "x", "**.layers.**." * 30 + "x"], ids=len
)
def test_repeated_wildcards_match_fast(pattern):
    """On 0.4.0 the first two take longer than anybody waits."""
    assert not matches(pattern, "model.language_model.layers.10.self_attn.q_proj_and_a_very_long_name_of_a_layer")
    assert matches("**.**.x.**.**", "a.b.x") and matches("a*?*?b", "axyb") and not matches("a*?*?b", "axb")


def test_covers_and_nearest():
    assert covers("model.visual", "model.visual.blocks.0.proj") and not covers("model.visual", "model.visuals.x")
    names = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(9) for p in "qkvo"] + ["lm_head"]
    assert nearest("**.self_attn.q_prj", names)[0] == "model.layers.*.self_attn.q_proj"
    assert nearest("zzzz", names) == []
    assert fold(["a.0.b.1", "a.1.b.1", "a.2.b.1", "a.5.b.1"]) == "a.{0..2,5}.b.1"


def meta(build):
    with torch.device("meta"):
        return build()


def by_name(model, components=None):
    return {r.name: r for r in fp8.describe_layers(model, components)}


def test_llama_has_foundation_and_lm_head():
    model = meta(
        lambda: LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
            )
        )
    )
    rows = by_name(model)
    assert len(rows) == 15
    row = rows["model.layers.1.self_attn.k_proj"]
    assert (row.kind, row.component, row.shape, row.bias, row.params) == ("linear", "foundation", (32, 64), False, 2048)
    assert (rows["lm_head"].kind, rows["lm_head"].component, rows["lm_head"].tied) == ("lm_head", "lm_head", ())


def test_mpt_with_tied_head():
    model = meta(lambda: AutoModelForCausalLM.from_config(MptConfig(d_model=64, n_heads=4, n_layers=1, vocab_size=128)))
    rows = by_name(model)
    kinds = {n.rpartition(".")[2]: r.kind for n, r in rows.items()}
    assert kinds == {
        "Wqkv": "linear",
        "out_proj": "linear",
        "up_proj": "linear",
        "down_proj": "linear",
        "lm_head": "lm_head",
    }
    assert rows["lm_head"].tied == ("transformer.wte.weight",)


def qwen3_vl():
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision))


@pytest.mark.parametrize("name", ["patch_embed", "patch_projection", "video_patch_projection"])
def test_linear_layers_over_pixels_are_patch_embeddings(name):
    model = nn.ModuleDict({name: nn.Linear(768, 64), "blocks": nn.ModuleList([nn.Linear(64, 64)])})
    assert {n: row.kind for n, row in by_name(model).items()} == {name: "patch_embed", "blocks.0": "linear"}


def test_recurrence_gates_stay_in_high_precision():
    """A number a head, or two: Qwen3.5's in_proj_a and in_proj_b, Qwen3-Next's in_proj_ba; not the layer's others."""
    layer = nn.ModuleDict({"qkv": nn.Linear(64, 96), "a": nn.Linear(64, 4), "ba": nn.Linear(64, 8)})
    layer.A_log = nn.Parameter(torch.zeros(4))
    model = nn.ModuleDict({"layer": layer, "narrow": nn.Linear(64, 4)})
    reasons = {row.name: row.reason for row in fp8.plan(model, "rowwise").rows if not row.fp8}
    gates = dict.fromkeys(["layer.a", "layer.ba"], "gate of a recurrence stays in high precision")
    assert reasons == gates | {"narrow": "output layer stays in high precision unless a rule names it"}
    named = fp8.Policy("rowwise", rules=({"match": "**.ba", "recipe": "rowwise"}, {"match": "*.*", "recipe": "mxfp8"}))
    assert [row.name for row in fp8.plan(model, named).rows if not row.fp8] == [
        "layer.a",
        "narrow",
    ]  # as old plan files name it


def test_projector_convolution_is_not_patch_embedding():
    model = nn.ModuleDict({"merger": nn.Conv2d(64, 96, 2, 2), "proj": nn.Conv2d(3, 64, 4, 4), "up": nn.Linear(96, 96)})
    plan = fp8.plan(model, components={"image_projector": ("merger",), "image_encoder": ("proj",), "rest": ("up",)})
    assert [row.reason for row in plan.rows][:2] == [
        "convolution stays in high precision", "patch embedding stays in high precision",
    ]  # fmt: skip


def test_qwen3_vl_by_conventional_names():
    rows = by_name(meta(qwen3_vl))
    where = {n: (r.kind, r.component) for n, r in rows.items()}
    assert where["model.visual.patch_embed.proj"] == ("patch_embed", "image_encoder")
    assert where["model.visual.blocks.1.attn.qkv"] == ("linear", "image_encoder")
    assert where["model.visual.merger.linear_fc1"] == ("linear", "image_projector")
    assert where["model.visual.deepstack_merger_list.0.linear_fc2"] == ("linear", "image_projector")
    assert where["model.language_model.layers.0.mlp.up_proj"] == ("linear", "foundation")
    assert rows["model.visual.patch_embed.proj"].shape == (32, 3 * 2 * 16 * 16)


def test_most_specific_component_glob_wins():
    components = {
        "image_encoder": ("model.visual",),
        "image_projector": ("model.visual.merger.**",),
        "other": ("**.down_proj",),
    }
    rows = by_name(meta(qwen3_vl), components)
    assert rows["model.visual.blocks.0.mlp.linear_fc1"].component == "image_encoder"
    assert rows["model.visual.merger.linear_fc1"].component == "image_projector"
    assert rows["model.visual.deepstack_merger_list.0.linear_fc1"].component == "image_encoder"
    assert rows["model.language_model.layers.0.mlp.down_proj"].component == "other"
    assert rows["model.language_model.layers.0.mlp.up_proj"].component == "foundation"
    assert rows["lm_head"].component == "lm_head"


def test_experts_and_router():
    config = Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=3,
        vocab_size=64,
    )
    rows = by_name(meta(lambda: Qwen3MoeForCausalLM(config)))
    up, down = (rows[f"model.layers.0.mlp.experts.{p}"] for p in ("gate_up_proj", "down_proj"))
    assert (up.kind, up.shape, up.experts, up.experts_per_token, up.module) == (
        "experts",
        (48, 64),
        8,
        3,
        "model.layers.0.mlp.experts",
    )
    assert (down.shape, down.params) == ((64, 24), 8 * 64 * 24)
    assert rows["model.layers.0.mlp.gate"].kind == "router" and rows["model.layers.0.mlp.gate"].shape == (8, 64)


class Odd(nn.Linear):
    pass


def test_subclasses_frozen_and_shared_weights():
    model = nn.ModuleDict(
        {"a": nn.Linear(8, 8), "b": Odd(8, 8), "c": nn.Linear(8, 8, bias=False), "mha": nn.MultiheadAttention(8, 2)}
    )
    model["c"].weight = model["a"].weight
    model["a"].weight.requires_grad_(False)
    rows = by_name(model)
    assert (rows["b"].kind, rows["b"].type) == ("subclass", "Odd") and rows["mha.out_proj"].kind == "subclass"
    assert rows["a"].frozen and rows["c"].frozen and rows["a"].tied == ("c.weight",) and rows["a"].bias
    alone = fp8.describe_layers(nn.Linear(4, 4))
    assert [(r.name, r.kind) for r in alone] == [("", "linear")]


def test_converted_model_has_same_rows():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    before = fp8.describe_layers(model)
    fp8.apply(model, fp8.plan(model))
    assert [(r.name, r.kind, r.shape) for r in fp8.describe_layers(model)] == [
        (r.name, r.kind, r.shape) for r in before
    ]
