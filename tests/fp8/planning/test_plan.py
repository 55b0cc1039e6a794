"""Policy x topology -> plan: who decides, what stays and why, and every request that cannot be met."""

import copy
import json
import time

import pytest
import torch
from torch import nn
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from octavo import fp8
from octavo.fp8.dense.swap import stock_type
from tests.fp8.planning.layers import Block, Custom


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.merger = nn.Linear(16, 32)


class Vlm(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = Tower()
        self.layers = nn.ModuleList(Block(32) for _ in range(4))
        self.odd = Custom(32, 32)
        self.lm_head = nn.Linear(32, 64)


def fp8_names(plan):
    return {r.name for r in plan.rows if r.fp8}


def test_the_default_plan():
    plan = fp8.plan(Vlm())
    assert len(fp8_names(plan)) == 15 and all(r.reason == "the whole model" for r in plan.rows if r.fp8)
    reasons = {r.name: r.reason for r in plan.rows if not r.fp8}
    assert reasons == {
        "visual.patch_embed": "patch embedding stays in high precision",
        "odd": "Custom is a subclass of nn.Linear and is left as it is",
        "lm_head": "lm_head stays in high precision",
    }
    row = next(r for r in plan.rows if r.name == "layers.0.q_proj")
    assert row.backend.backend.name == "reference" and row.backend.reason and row.component == "foundation"


def test_table_lists_layers_and_reasons():
    model = Vlm()
    for p in model.visual.parameters():
        p.requires_grad_(False)
    text = fp8.plan(model).table()
    for piece in (
        "layers.{0..3}.q_proj", "32 x 32", "blockwise e4m3", "reference", "the whole model; frozen, no wgrad",
        "FP8: 15 of 18 linear layers", "high precision: 1 (lm_head stays in high precision)",
        "linear FLOPs in FP8: 93.3 %", "image_projector 100.0 %", "without lm_head and patch embedding",
        "note: 7 of 15 FP8 layers are frozen: no wgrad, no saved input",
    ):  # fmt: skip
        assert piece in text, f"{piece!r} is not in\n{text}"
    assert max(len(line) for line in text.splitlines()) < 200


def test_share_counts_gemms_without_lm_head_and_patches():
    model = nn.ModuleDict({"a": nn.Linear(10, 10), "b": nn.Linear(10, 20), "lm_head": nn.Linear(10, 1000)})
    off_b = fp8.Rule("b", recipe="off")
    assert fp8.plan(model, fp8.Policy(rules=(off_b,))).share == pytest.approx(1 / 3)
    assert fp8.plan(model, fp8.Policy(wgrad="bf16")).share == pytest.approx(2 / 3)
    model["a"].weight.requires_grad_(False)
    plan = fp8.plan(model, fp8.Policy(rules=(off_b,)))
    assert plan.share == pytest.approx(2 / (2 + 6))
    assert sum(r.share for r in plan.rows) == pytest.approx(1) and plan.rows[-1].share == 0
    high = fp8.plan(model, fp8.Policy(rules=(off_b,), wgrad="bf16"))  # what is frozen has no wgrad to leave out
    assert high.share == pytest.approx(2 / (2 + 6))
    with pytest.raises(KeyError, match="no component 'image_encoder'"):
        plan.share_of("image_encoder")


def test_tokens_weight_components():
    model = Vlm()
    even = fp8.plan(model, tokens={"image_encoder": 1, "image_projector": 1, "foundation": 1})
    images = fp8.plan(model, tokens={"image_encoder": 4000, "image_projector": 1000, "foundation": 1})
    assert even.share == fp8.plan(model).share and images.share != even.share
    assert images.share_of("foundation") == even.share_of("foundation")
    with pytest.raises(fp8.PlanError, match="tokens has no entry for image_projector"):
        fp8.plan(model, tokens={"image_encoder": 4, "foundation": 1})
    with pytest.raises(fp8.PlanError, match="'image_encoder' was requested.*Remove 'image_encoder'"):
        fp8.plan(model.layers, tokens={"image_encoder": 4, "foundation": 1})
    bare = {"foundation": ("**",), "image_projector": ("projector",)}  # a projector without a linear layer
    assert fp8.plan(model.layers, components=bare, tokens={"image_projector": 4, "foundation": 1}).parts == (
        "foundation",
    )


def test_narrower_and_later_settings_win():
    policy = fp8.Policy(
        recipe="blockwise",
        components={
            "image_encoder": fp8.ComponentPolicy(recipe="rowwise"),
            "image_projector": {"recipe": "tensorwise", "format": "e4m3"},
        },
        rules=[
            {"match": "**.layers.**", "recipe": "mxfp8"},
            {"match": "layers.0.**", "recipe": "off"},
            fp8.Rule("layers.0.up_proj", recipe="rowwise", wgrad="bf16"),
            fp8.Rule("layers.1.*", wgrad="bf16"),
        ],
    )
    rows = {r.name: r for r in fp8.plan(Vlm(), policy).rows}
    short = {n: r.recipe.summary() if r.recipe else None for n, r in rows.items()}
    assert short["visual.blocks.2.q_proj"] == "rowwise e4m3" and short["visual.merger"] == "tensorwise e4m3"
    assert short["layers.0.q_proj"] is None and rows["layers.0.q_proj"].reason == "rule layers.0.**: off"
    assert short["layers.0.up_proj"] == "rowwise e4m3 wgrad=bf16"
    assert short["layers.1.q_proj"] == "mxfp8 e4m3 wgrad=bf16" and short["layers.3.up_proj"] == "mxfp8 e4m3"


def test_single_component():
    policy = fp8.Policy(recipe="off", components={"foundation": fp8.ComponentPolicy(recipe="blockwise")})
    assert {n.split(".")[0] for n in fp8_names(fp8.plan(Vlm(), policy))} == {"layers"}


@pytest.mark.parametrize(
    "policy, expected, reason",
    [
        (fp8.Policy(), {"encoder": "blockwise", "projector": "blockwise", "foundation": "blockwise"}, None),
        (fp8.Policy("rowwise"), {"encoder": "rowwise", "projector": "rowwise", "foundation": "rowwise"}, None),
        (
            fp8.Policy("rowwise", components={"image_encoder": {"wgrad": "bf16"}, "image_projector": "mxfp8"}),
            {"encoder": "rowwise", "projector": "mxfp8", "foundation": "rowwise"}, None,
        ),
        (
            fp8.Policy(components={"foundation": "rowwise"}), {"foundation": "rowwise"},
            "stays: foundation alone is named",
        ),
        (
            fp8.Policy(components={"image_encoder": {"wgrad": "bf16"}, "image_projector": "rowwise"}),
            {"encoder": "blockwise", "projector": "rowwise"},
            "stays: image_encoder and image_projector alone are named",
        ),
        (
            fp8.Policy(components={"image_projector": "off"}), {"encoder": "blockwise", "foundation": "blockwise"},
            "component image_projector: off",
        ),
        (
            fp8.Policy(components={"lm_head": "rowwise"}),
            {"encoder": "blockwise", "projector": "blockwise", "foundation": "blockwise", "head": "rowwise"}, None,
        ),
    ],
)  # fmt: skip
def test_default_recipe_with_and_without_components(policy, expected, reason):
    named = {"visual.blocks.0.q_proj": "encoder", "visual.merger": "projector", "layers.0.q_proj": "foundation",
             "lm_head": "head"}  # fmt: skip
    rows = [row for row in fp8.plan(Vlm(), policy).rows if row.name in named]
    assert {named[row.name]: row.recipe.name for row in rows if row.fp8} == expected
    high = {row.reason for row in rows if not row.fp8 and row.kind != "lm_head"}
    assert high == (set() if reason is None else {reason})


def test_off_is_a_plan_without_fp8():
    model = Vlm()
    plan = fp8.plan(model, "off")
    assert plan.share == 0 and not fp8_names(plan)
    fp8.apply(model, plan)
    layer = model.layers[0].q_proj
    assert stock_type(layer) is nn.Linear and not isinstance(layer, fp8.Linear)


ERRORS = [
    ({"rules": [{"match": "**.q_prj", "recipe": "off"}]}, r"'\*\*.q_prj' matches no linear.*layers.\*.q_proj"),
    ({"rules": [{"match": "layers.0", "recipe": "off"}]}, r"use 'layers.0.\*\*' to match everything in that module"),
    ({"rules": [{"match": "a..b"}]}, "Invalid rule.*empty segment"),
    ({"rules": [{"match": "visual.patch_embed", "recipe": "rowwise"}]}, "requests FP8, but none.*embedding stays"),
    ({"rules": [{"match": "odd", "recipe": "rowwise"}]}, "Custom is a subclass"),
    ({"components": {"lm_head": {"recipe": "delayed"}}}, "component 'lm_head'.*is not supported for a head"),
    (
        {"components": {"audio": {"recipe": "rowwise"}}},
        "component 'audio' was requested.*its components are image_encoder, ",
    ),
    ({"rules": [{"match": "**", "recipe": "off"}]}, "FP8 is requested, but no layer.*would run in FP8.*'off'"),
    ({"recipe": "blockwize"}, "'blockwize' does not exist. Did you mean 'blockwise'. Use one of off"),
    ({"candidates": ("fast",)}, "candidates of 'auto' must be recipes .tensorwise.*got 'fast'"),
    ({"activations": "fp9"}, "does not exist"),
    ({"recipe": "mxfp8", "format": "hybrid"}, "the whole model: .*mxfp8.*hybrid"),
    ({"rules": [{"match": "**", "fwd": "bf16", "dgrad": "bf16", "wgrad": "bf16"}]}, r"rule \*\*: .*leaves nothing"),
    ({"components": {"image_encoder": {"recipe": "mxfp9"}}}, "'image_encoder': recipe 'mxfp9' does not exist"),
]  # fmt: skip


@pytest.mark.parametrize("asked,message", ERRORS, ids=[m[:40] for _, m in ERRORS])
def test_unmet_request_is_rejected_with_fix(asked, message):
    with pytest.raises(fp8.PlanError, match=message):
        fp8.plan(Vlm(), fp8.Policy(**asked))


def test_nothing_to_convert():
    with pytest.raises(fp8.PlanError, match="it has no linear layers"):
        fp8.plan(nn.LayerNorm(4))
    with pytest.raises(fp8.PlanError, match="weights of float64 cannot be cast to FP8"):
        fp8.plan(nn.Sequential(nn.Linear(4, 4).double()))
    with pytest.raises(fp8.BackendError, match="no backend 'triton9'"):
        fp8.plan(Vlm(), fp8.Policy(backend="triton9"))


def test_plan_accepts_name_or_policy():
    with pytest.raises(fp8.PlanError, match=r"fp8.Policy: Policy\(recipe='rowwise', format='e4m3'\), got Recipe"):
        fp8.plan(Vlm(), fp8.recipe("rowwise"))
    with pytest.raises(fp8.PlanError, match="got NoneType"):
        fp8.plan(Vlm(), None)
    named = fp8.Policy(components={"image_encoder": "rowwise"})
    assert named == fp8.Policy(components={"image_encoder": fp8.ComponentPolicy("rowwise")})


NONSENSE = [
    ({"recipe": 8}, "the whole model: recipe must be one of .*got 8"),
    ({"recipe": fp8.recipe("rowwise")}, "the whole model: recipe must be a name, got the Recipe object 'rowwise'"),
    ({"components": {"foundation": None}}, "component 'foundation' must be a ComponentPolicy .* got None"),
    ({"components": {"foundation": {"fmt": 1}}}, "component 'foundation' has unknown fields 'fmt'; the fields are"),
    ({"components": {"foundation": "nowise"}}, "component 'foundation': recipe 'nowise' does not exist"),
    ({"components": ("foundation",)}, "components must map"),
    ({"rules": ({"match": "a", "recip": "off"},)}, "rule 1 has unknown fields 'recip'"),
    ({"rules": ({"recipe": "off"},)}, "rule 1 has no 'match'"),
    ({"rules": ({"match": "a.q_proj"},)}, "rule 'a.q_proj' has no effect"),
    ({"rules": ({"match": 3, "recipe": "off"},)}, "match must be a glob .* got 3"),
    ({"rules": fp8.Rule("a", recipe="off")}, "got Rule.*Use a tuple"),
    ({"recipe": "off", "format": "e3m4"}, "the whole model: format='e3m4' does not exist.*Use 'e4m3' or 'hybrid'"),
    ({"recipe": "off", "fwd": "fp4"}, "the whole model: fwd='fp4' does not exist"),
    ({"rules": (fp8.Rule("a", recipe="off", wgrad="no"),)}, "rule 'a': wgrad='no' does not exist"),
]


@pytest.mark.parametrize("given,message", NONSENSE, ids=[m[:40] for _, m in NONSENSE])
def test_invalid_policy_is_rejected_without_model(given, message):
    with pytest.raises(fp8.PlanError, match=message):
        fp8.Policy(**given)


def test_unknown_backend_is_rejected_even_if_off():
    with pytest.raises(fp8.BackendError, match="no backend 'x'"):
        fp8.Policy(recipe="off", backend="x")


def test_plan_is_applied_once_to_matching_model():
    model, other = Vlm(), nn.Sequential(nn.Linear(8, 8))
    plan = fp8.plan(model)
    with pytest.raises(
        fp8.PlanError, match="is for a different model: 'visual.patch_embed' is.*and missing in the model"
    ):
        fp8.apply(other, plan)
    wider = Vlm()
    wider.layers[2].q_proj = nn.Linear(32, 33)
    with pytest.raises(
        fp8.PlanError, match=r"'layers.2.q_proj' is linear \[32, 32\] in the plan and linear \[33, 32\] in the model"
    ):
        fp8.apply(wider, plan)
    more = Vlm()
    more.extra = nn.Linear(4, 4)
    with pytest.raises(fp8.PlanError, match="'extra' is missing in the plan"):
        fp8.apply(more, plan)
    assert fp8.apply(model, plan) is model
    with pytest.raises(fp8.PlanError, match="is already applied to this model.*'visual.blocks.0.q_proj'"):
        fp8.apply(model, plan)
    with pytest.raises(fp8.PlanError, match="already applied to this model"):
        fp8.apply(model, fp8.plan(model))


def test_apply_keeps_values_and_names():
    model = Vlm()
    before = copy.deepcopy(model.state_dict())
    fp8.apply(model, fp8.plan(model, fp8.Policy(recipe="delayed")))
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_plans_compare_as_json():
    a, b = (fp8.plan(Vlm()).to_json() for _ in range(2))
    assert a == b and json.loads(json.dumps(a)) == a
    with torch.device("meta"):
        empty = Vlm()
    assert fp8.plan(empty).to_json()["rows"] == a["rows"]
    row = next(r for r in a["rows"] if r["name"] == "layers.0.q_proj")
    assert row["recipe"] == {"name": "blockwise", "format": "e4m3", "fwd": "fp8", "dgrad": "fp8", "wgrad": "fp8"}
    assert row["backend"] == {"fwd": "reference", "dgrad": "reference", "wgrad": "reference"}
    assert fp8.plan(Vlm(), "rowwise").to_json() != a


def test_notes():
    assert any("per-tensor amax is local to each data-parallel rank" in n for n in fp8.plan(Vlm(), "tensorwise").notes)
    assert any("reduce_scaling_state" in n for n in fp8.plan(Vlm(), "delayed").notes)
    assert any("2 bytes of codes per parameter" in n for n in fp8.plan(Vlm(), "rowwise").notes)


def test_thirty_billion_parameters_on_meta_in_two_seconds():
    text = {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    with torch.device("meta"):
        model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text))
    start = time.perf_counter()
    plan = fp8.plan(model)
    plan.table(), plan.to_json()
    assert time.perf_counter() - start < 2
    rows = {r.name: r for r in plan.rows}
    experts = rows["model.language_model.layers.47.mlp.experts.gate_up_proj"]
    assert experts.flops == 3 * 2 * 1536 * 2048 * 8 and experts.row.params == 128 * 1536 * 2048
    assert plan.share_of("foundation") > 0.99
    assert "experts.gate_up_proj" in plan.table() and "128 experts, 8 per token" in plan.table()
