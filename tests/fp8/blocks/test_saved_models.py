"""Real architectures that save FP8: the plan, the remaining 16-bit tensors, and a few steps against 16 bits."""

import copy
import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Gemma2Config, SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from octavo import fp8, models
from octavo.fp8.blocks.counted import CountedModule
from octavo.fp8.dense.swap import SwappedModule
from octavo.fp8.memory.accounting import count_saved
from octavo.fp8.planning import unfuse
from octavo.fp8.proof import Proof
from octavo.models.forward.unused_towers import dummy_image_inputs
from octavo.models.structure.skeleton import is_vision_config
from octavo.models.tiny.configs import tiny_config


def make_model(family, dtype=torch.float32):
    """Return (model, family, inputs): text, and an image if the family supports images."""
    config = tiny_config(family)
    vision = is_vision_config(config)
    torch.manual_seed(0)
    model = (AutoModelForImageTextToText if vision else AutoModelForCausalLM).from_config(config, dtype=dtype)
    described = models.describe(model)
    ids = torch.randint(0, 400, (2, 24), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if vision:
        image = dummy_image_inputs(model, described)
        pixels = torch.randn(image["pixel_values"].shape, generator=torch.Generator().manual_seed(2))
        image["pixel_values"] = pixels.to(dtype)
        grid = image.get("image_grid_thw")
        tokens = 1 if grid is None else int(grid[0].prod()) // 4
        ids[0, 2 : 2 + tokens] = config.image_token_id
        if grid is not None:
            image["mm_token_type_ids"] = (ids == config.image_token_id).int()
        inputs |= image
    return model, described, {**inputs, "labels": ids.clone()}


def train(model, inputs, plan, forwards, lowered, steps=3):
    """Return (losses, gradients of the first step, proof)."""
    fp8.apply(model, plan)
    optimizer, proof, losses, first = torch.optim.AdamW(model.parameters(), lr=1e-3), Proof(plan), [], {}
    for step in range(steps):
        with fp8.count_gemms() as counts, torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            loss = model(**inputs).loss
            loss.backward()
        proof.observe(counts, forwards)
        if step == 0:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, proof.report()


# norms, gated MLPs, plain MLPs, attention modules that keep FP8
CASES = {
    "qwen3": (9, 2, 0, 2),
    "qwen3_vl": (15, 2, 2, 4),
    "qwen2_5_vl": (10, 4, 0, 4),
    "internvl": (14, 2, 2, 4),
}


LONG = pytest.mark.long
FAMILIES = [
    ("qwen3", "on"), ("qwen3_vl", "off"), pytest.param("qwen3_vl", "on", marks=LONG),
    pytest.param("qwen2_5_vl", "off", marks=LONG), pytest.param("internvl", "on", marks=LONG),
]  # fmt: skip


@pytest.mark.parametrize(("family", "fuse"), FAMILIES)
def test_steps_are_close_to_16_bit_steps(family, fuse):
    lowered = fuse == "off"
    model, described, inputs = make_model(family)
    twin, forwards = copy.deepcopy(model), {"foundation": 1}
    if "pixel_values" in inputs:
        forwards |= {"image_encoder": 1, "image_projector": 1}
    policies = [fp8.Policy(activations=a, fuse=fuse) for a in ("bf16", "fp8")]
    plans = [fp8.plan(m, p, described.components) for m, p in zip((model, twin), policies, strict=True)]
    kinds = [b.kind for b in plans[1].blocks if b.saves]
    assert tuple(kinds.count(k) for k in ("norm", "gated MLP", "MLP", "attention")) == CASES[family]
    (want, dws, proof), (got, dws2, proof2) = (
        train(m, inputs, plan, forwards, lowered) for m, plan in zip((model, twin), plans, strict=True)
    )
    assert proof == proof2 and proof["fp8_gemms"] > 0 and not proof["missing"]
    assert got == pytest.approx(want, rel=0.01) and got[-1] < got[0]
    assert dws.keys() == dws2.keys()
    cosines = {n: torch.cosine_similarity(dws[n].flatten(), dws2[n].flatten(), 0).item() for n in dws}
    assert min(c for n, c in cosines.items() if dws[n].norm() > 1e-4) > 0.97, min(cosines.items(), key=lambda kv: kv[1])
    assert sorted(cosines.values())[len(cosines) // 2] > 0.99
    names = {n for n, _ in twin.named_modules()}
    unfuse(twin)
    kinds = {type(m) for m in twin.modules() if isinstance(m, SwappedModule)}
    assert all(issubclass(kind, CountedModule) for kind in kinds) and names == {n for n, _ in twin.named_modules()}


LEFT = {"self_attn", "attn", "attention", "qkv", "q_proj", "k_proj", "v_proj"}
"""Modules whose tensors attention keeps: q, k, v and its output."""


@pytest.mark.parametrize(("family", "fuse"), FAMILIES)
def test_only_attention_saves_16_bits(family, fuse):
    model, described, inputs = make_model(family, torch.bfloat16)
    fp8.apply(model, fp8.plan(model, fp8.Policy(activations="fp8", fuse=fuse), described.components))
    model(**inputs).loss.backward()
    model.zero_grad()
    with count_saved(model, described.layers(model)) as accountant:
        loss = model(**inputs).loss
    wide = [r for r in accountant.report().rows if r.block and r.kind == "activation" and r.dtype == torch.bfloat16]
    assert loss.requires_grad and wide
    left = {r.module.rpartition(".")[2] for r in wide}
    if family == "internvl":  # the layer scale is a parameter of the block: it keeps what it multiplies
        left -= {"fc2", "projection_layer"}
    assert left <= LEFT, left
    floats = [r for r in accountant.report().rows if r.block and r.kind == "activation" and r.dtype == torch.float32]
    tokens = 2 * 24
    # Scales, statistics and the logarithms of attention's sums: fewer than one byte an element.
    assert all(r.bytes <= 4 * tokens * 8 for r in floats)


def test_bytes_of_a_decoder_layer():
    """Bytes per token for (256, 768, 4 heads on 2 of 32, QK-norm), computed by hand."""
    from transformers import Qwen3Config

    hidden, inner, q, kv, head = 256, 768, 4 * 32, 2 * 32, 32
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=4, num_key_value_heads=2, head_dim=head,
        vocab_size=64, num_hidden_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fp8.apply(model, fp8.plan(model, fp8.Policy(activations="fp8", fuse="off")))
    ids = torch.randint(0, 64, (1, 128))
    model(input_ids=ids).logits.sum().backward()
    model.zero_grad()
    with count_saved(model, [("layer", model.model.layers[0])]) as accountant:
        logits = model(input_ids=ids).logits
    assert logits.requires_grad
    results = accountant.report().by_block["layer"] / 128
    codes = 1 + 4 / 128
    norms = 2 * (hidden * codes + 4) + (q + kv) * (1 + 4 / head + 4 / head)
    linear = 2 * hidden * codes  # the input of q, k, v and that of gate, up
    attention = 2 * (q + q + kv + kv) + 4 * 4  # q, output, k, v and a sum for each head
    expanded = 2 * 2 * (q - kv)  # the stock attention repeats k and v for its mask
    assert results == pytest.approx(norms + linear + attention + 2 * inner * codes, abs=expanded + 1)


def test_plan_lists_unsupported_modules_and_file_keeps_them(tmp_path):
    model, described, _ = make_model("qwen3_vl")
    parts = {"image_encoder": {"activations": "bf16"}}
    plan = fp8.plan(model, fp8.Policy("blockwise", activations="fp8", components=parts), described.components)
    assert not any("visual.blocks" in b.name for b in plan.blocks)
    stays = {b.name: b.why for b in plan.blocks if b.saves is False}
    assert stays and all("merger" in n and "has norm" in why for n, why in stays.items())
    notes = " ".join(plan.notes)
    assert "2 gated MLPs save gate and up in FP8" in notes and "activations unchanged: MLP model.visual.merger" in notes
    assert "not fused" not in notes
    row = next(b for b in json.loads(json.dumps(plan.to_json()))["blocks"] if b["kind"] == "attention")
    assert row["saves"] and not row["fused"]
    path = fp8.save_plan(plan, tmp_path / "plan.json")
    loaded = fp8.load_plan(path, model, described.components)
    assert loaded.blocks == plan.blocks and loaded.policy.activations_of("image_encoder") == "bf16"
    assert [n for n in loaded.notes if "activations" in n] == [n for n in plan.notes if "activations" in n]
    path.write_text(path.read_text().replace('"activations": {"": "fp8"', '"activations": {"": "fp9"'))
    with pytest.raises(fp8.PlanError, match="'activations' must be bf16 or fp8"):
        fp8.load_plan(path, model, described.components)


def test_module_can_save_and_fuse():
    model, _, _ = make_model("qwen3")
    rules = [fp8.Rule("**.layers.0.mlp.up_proj", recipe="off"), fp8.Rule("**.layers.1.self_attn.o_proj", wgrad="bf16")]
    plan = fp8.plan(model, fp8.Policy(activations="fp8", fuse="on", rules=rules))
    results = {b.name: b for b in plan.blocks}
    mlp, norm, last = results["model.layers.0.mlp"], results["model.layers.0.input_layernorm"], results["model.norm"]
    assert not mlp.fused and mlp.saves and "whole FP8 layers" in mlp.reason and mlp.why == "activations: fp8"
    assert norm.fused and norm.saves and not last.fused and last.saves and last.reason == ""
    other = results["model.layers.1.self_attn"]
    assert not other.saves and "high precision" in other.why
    fp8.apply(model, plan)
    assert "_recompute_input" not in model.model.layers[1].self_attn.o_proj.__dict__


def test_saves_codes_with_frozen_or_no_fp8_layers():
    model, described, inputs = make_model("qwen3_vl", torch.bfloat16)
    for p in model.model.visual.parameters():
        p.requires_grad_(False)
    parts = {"image_encoder": "off"}
    plan = fp8.plan(model, fp8.Policy("blockwise", activations="fp8", components=parts), described.components)
    assert any(b.saves and "visual.blocks" in b.name for b in plan.blocks)
    fp8.apply(model, plan)
    model(**inputs).loss.backward()
    assert all(p.grad is None for p in model.model.visual.parameters())


def test_gemma_gives_reason():
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    gemma = AutoModelForCausalLM.from_config(Gemma2Config(vocab_size=64, head_dim=32, num_key_value_heads=1, **size))
    plan = fp8.plan(gemma, fp8.Policy(activations="fp8", fuse="on"))
    norms = [b for b in plan.blocks if b.kind == "norm"]
    assert len(norms) == 5 and all(not b.saves and "1 + weight" in b.why for b in norms)
    (mlp,) = [b for b in plan.blocks if b.kind == "gated MLP"]
    assert not mlp.fused and mlp.saves  # GELU does not keep it from saving codes
    fp8.apply(gemma, plan)
    ids = torch.randint(0, 64, (2, 8))
    gemma(input_ids=ids, labels=ids).loss.backward()


def test_siglip_tower_of_llava_onevision():
    size = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = SiglipVisionConfig(image_size=16, patch_size=4, vision_use_head=False, **size)
    torch.manual_seed(0)
    model = SiglipVisionModel(config)
    twin = copy.deepcopy(model)
    plans = [fp8.plan(m, fp8.Policy(activations=a)) for m, a in ((model, "bf16"), (twin, "fp8"))]
    kinds = [b.kind for b in plans[1].blocks if b.saves]
    assert [kinds.count(k) for k in ("norm", "MLP", "attention")] == [5, 2, 2] and len(kinds) == 9
    pixels, grads = torch.randn(2, 3, 16, 16), []
    for m, p in zip((model, twin), plans, strict=True):
        fp8.apply(m, p)
        y = m(pixels).last_hidden_state
        (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
        grads.append({n: p.grad.flatten() for n, p in m.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert min(torch.cosine_similarity(grads[0][n], g, 0) for n, g in grads[1].items() if "k_proj.bias" not in n) > 0.97


def test_model_changed_since_plan_is_rejected():
    model, _, _ = make_model("qwen3")
    plan = fp8.plan(model, fp8.Policy(activations="fp8", fuse="off"))
    model.model.layers[0].mlp.act_fn = nn.PReLU()
    with pytest.raises(
        fp8.PlanError, match="planned to save FP8 for its backward, but it cannot: its activation PReLU"
    ):
        fp8.apply(model, plan)
