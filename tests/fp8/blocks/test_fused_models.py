"""Fused norms and gated MLPs in real architectures: the plan, a few steps against unfused blocks, and the proof."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Gemma2Config

from octavo import fp8, models
from octavo.fp8.blocks.gated_mlp import GatedMlp
from octavo.fp8.blocks.rmsnorm import RmsNorm
from octavo.fp8.planning import unfuse
from octavo.fp8.proof import Proof
from octavo.models.forward.unused_towers import dummy_image_inputs
from octavo.models.structure.skeleton import is_vision_config
from octavo.models.tiny.configs import tiny_config


def make_model(family):
    """Return (model, family, inputs): text, and an image if the family supports images."""
    config = tiny_config(family)
    vision = is_vision_config(config)
    torch.manual_seed(0)
    model = (AutoModelForImageTextToText if vision else AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    described = models.describe(model)
    ids = torch.randint(0, 400, (2, 12), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if vision:
        image = dummy_image_inputs(model, described)
        image["pixel_values"] = torch.randn(image["pixel_values"].shape, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            features = model.model.get_image_features(**image).pooler_output
        tokens = sum(one.numel() // one.shape[-1] for one in features)
        ids[0, 2 : 2 + tokens] = config.image_token_id
        image["mm_token_type_ids"] = (ids == config.image_token_id).int()
        inputs |= image
    return model, described, {**inputs, "labels": ids.clone()}


def train(model, inputs, plan, forwards, steps=3, lowered=False):
    """Return the losses of a few steps, the first one with a proof."""
    fp8.apply(model, plan)
    optimizer, proof, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), Proof(plan), []
    for _ in range(steps):
        with fp8.count_gemms() as counts, torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            loss = model(**inputs).loss
            loss.backward()
        proof.observe(counts, forwards)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, proof.report()


CASES = {"qwen3": (2, 4), "qwen2_5_vl": (4, 8)}  # gated MLPs, norms


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("family", CASES)
def test_fused_steps_match_unfused_steps(family, lowered):
    model, described, inputs = make_model(family)
    twin, forwards = copy.deepcopy(model), {"foundation": 1}
    if "pixel_values" in inputs:
        forwards |= {"image_encoder": 1, "image_projector": 1}
    plans = [fp8.plan(m, fp8.Policy(fuse=f), described.components) for m, f in ((model, "off"), (twin, "on"))]
    assert plans[0].blocks == () and all(b.fused for b in plans[1].blocks)
    (separate, proof), (fused, proof2) = (
        train(m, inputs, plan, forwards, lowered=lowered) for m, plan in zip((model, twin), plans, strict=True)
    )
    kinds = [sum(isinstance(m, kind) for m in twin.modules()) for kind in (GatedMlp, RmsNorm)]
    assert tuple(kinds) == CASES[family]
    assert all(m._taken and not m._misses for m in twin.modules() if isinstance(m, RmsNorm))
    assert proof == proof2 and proof["fp8_gemms"] > 0 and not proof["missing"]
    assert fused == pytest.approx(separate, rel=2e-2 if lowered else 2e-3) and fused[-1] < fused[0]
    unfuse(twin)
    assert not any(isinstance(m, GatedMlp | RmsNorm) for m in twin.modules())


def test_plan_lists_fused_modules_and_file_keeps_them(tmp_path):
    model, described, _ = make_model("qwen2_5_vl")
    rules = [fp8.Rule("model.language_model.layers.0.mlp.up_proj", recipe="off")]
    plan = fp8.plan(model, fp8.Policy(fuse="on", rules=rules), described.components)
    stays = [b for b in plan.blocks if not b.fused]
    assert [(b.name, b.reason) for b in stays] == [
        ("model.language_model.layers.0.mlp", "not all of its layers are whole FP8 layers")
    ]
    assert (
        "3 gated MLPs run as one function" in plan.notes
        and "8 norms pass their codes to the layers after them" in " ".join(plan.notes)
    )
    assert any("not fused: gated MLP model.language_model.layers.*.mlp" in note for note in plan.notes)
    path = fp8.save_plan(plan, tmp_path / "plan.json")
    loaded = fp8.load_plan(path, model, described.components)
    assert loaded.blocks == plan.blocks
    assert [b["name"] for b in json.loads(json.dumps(plan.to_json()))["blocks"] if not b["fused"]] == [stays[0].name]
    path.write_text(path.read_text().replace('"fuse_blocks": true', '"fuse_blocks": false'))
    assert fp8.load_plan(path, model, described.components).blocks == ()
    path.write_text(path.read_text().replace('"fuse_blocks": false', '"fuse_blocks": 3'))
    with pytest.raises(fp8.PlanError, match="'fuse_blocks' must be true or false, found 3"):
        fp8.load_plan(path, model, described.components)


def test_gemma_and_layer_norms_are_not_fused():
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    gemma = AutoModelForCausalLM.from_config(Gemma2Config(vocab_size=64, head_dim=32, num_key_value_heads=1, **size))
    plan = fp8.plan(gemma, fp8.Policy(fuse="on"))
    results = {b.name.rpartition(".")[2]: b.reason for b in plan.blocks}
    assert "1 + weight" in results["input_layernorm"] and "not down(silu" in results["mlp"] and len(results) == 2
    fp8.apply(gemma, plan)
    assert not any(isinstance(m, GatedMlp | RmsNorm) for m in gemma.modules())
    model, described, _ = make_model("qwen3_vl")
    plan = fp8.plan(model, fp8.Policy(fuse="on"), described.components)
    visual = [b for b in plan.blocks if "visual" in b.name]
    assert visual and all("LayerNorm has weight, bias" in b.reason for b in visual)


def test_fuse_works_without_plan():
    model, _, inputs = make_model("qwen3")
    fp8.apply(model, fp8.plan(model, fp8.Policy(fuse="off")))
    results = fp8.fuse(model)
    assert [f.reason for f in results] == [None] * 6 and {f.reason for f in fp8.fuse(model)} == {"it is already fused"}
    model(**inputs).loss.backward()


def test_default_device_is_ignored():
    model, _, _ = make_model("qwen3")
    with torch.device("meta"):
        plan = fp8.plan(model, fp8.Policy(fuse="on"))
    assert len(plan.blocks) == 6 and all(b.fused for b in plan.blocks)


def test_model_changed_since_plan_is_rejected():
    model, _, _ = make_model("qwen3")
    plan = fp8.plan(model, fp8.Policy(fuse="on"))
    model.model.layers[0].mlp.forward = model.model.layers[0].mlp.forward
    with pytest.raises(fp8.PlanError, match="mlp' was planned to be fused .* cannot: its forward was replaced"):
        fp8.apply(model, plan)
