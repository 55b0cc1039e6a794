"""Layers with frozen codes: planned in the recipes that multiply by them, equal to dequantized weights under the same
casts, never a second byte a parameter, never a changed code."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.memory.accounting import count_saved
from octavo.fp8.metrics import calc_diff
from octavo.fp8.proof import Proof
from octavo.fp8.weights import codes_of_frozen, frozen_bytes, frozen_from_codes, frozen_weights

RECIPES = {"row": "rowwise", "block": "blockwise", "tensor": "tensorwise"}


class Mlp(nn.Module):
    def __init__(self, hidden: int = 128, inner: int = 256) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(inner, hidden, bias=False), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def built(kind: str, codes: bool = True, trained: bool = False) -> nn.Sequential:
    """Two MLPs with frozen weights, or with their dequantized values; a layer behind them that is trained, if asked."""
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(), Mlp()).bfloat16().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = fp8.freeze_weight(module.weight, kind)
            module.weight = weight if codes else nn.Parameter(weight.dequantize(), requires_grad=False)
    if trained:
        model.insert(0, nn.Linear(128, 128).bfloat16())
        model.append(nn.Linear(128, 64).bfloat16())
    return model


def batch(tokens: int = 7, seed: int = 1) -> torch.Tensor:
    return torch.randn(tokens, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()


POLICIES = {
    "as it comes": {},
    "dgrad in BF16": {"dgrad": "bf16"},
    "fwd in BF16": {"fwd": "bf16"},
    "recast": {"weight_codes": "recast"},
    "param": {"param": True},
    "fused, saved": {"fuse": "on", "activations": "fp8"},
    "off": {"recipe": "off"},
}


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("how", POLICIES)
def test_frozen_layer_matches_dequantized_values(torch_products: None, kind: str, how: str) -> None:
    """Casting the values again gives their codes back; so the two layers are one, bit for bit."""
    found = []
    for codes in (True, False):
        model = built(kind, codes)
        before = fp8.fingerprint(model)
        plan = fp8.plan(model, fp8.Policy(**{"recipe": RECIPES[kind], **POLICIES[how]}))
        fp8.apply(model, plan)
        x = batch().requires_grad_()
        with fp8.count_gemms() as counts:
            with count_saved(model, []) as held:
                y = model(x)
            y.backward(batch(seed=2))
        found.append((y.detach(), x.grad, held.report().total))
        if not codes:
            continue
        assert fp8.fingerprint(model) == before and len(before) == 6
        assert fp8.weight_cache_bytes(model) == 0  # no second byte a parameter, between steps or after one
        assert not any(gemm == "wgrad" for (_, gemm, _), n in counts.items() if n)
        fp8.invalidate(model)
        with fp8.health() as health:
            again = model(x)
        assert "fused" in how or torch.equal(again, y)  # health looks at layers one by one
        assert all("w" not in row for row in health.table().values())
        with fp8.high_precision(model):
            high = model(x)
        thawed = fp8.dequantize_weights(built(kind))
        assert torch.equal(high, thawed(x))
    (y, dx, size), (y_values, dx_values, size_values) = found
    assert torch.equal(y, y_values) and torch.equal(dx, dx_values) and size == size_values


@pytest.mark.parametrize("kind", RECIPES)
def test_step_passes_proof(kind: str) -> None:
    model = built(kind, trained=True)
    plan = fp8.plan(model, fp8.Policy(recipe=RECIPES[kind]))
    fp8.apply(model, plan)
    proof = Proof(plan)
    with fp8.count_gemms() as counts:
        model(batch()).float().square().mean().backward()
    proof.observe(counts, {"foundation": 1})
    assert proof.report()["share"] == plan.share == 1.0


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("dgrad", ["fp8", "bf16"])
def test_frozen_layer_saves_no_input(kind: str, dgrad: str) -> None:
    model = nn.Sequential(nn.Linear(128, 64, bias=False, dtype=torch.bfloat16))
    model[0].weight = fp8.freeze_weight(model[0].weight, kind)
    fp8.apply(model, fp8.plan(model, fp8.Policy(recipe=RECIPES[kind], dgrad=dgrad)))
    x = batch().requires_grad_()
    with count_saved(model, []) as held:
        y = model(x)
    report = held.report()
    assert report.total == 0, str(report)
    assert set(report.separate) <= {"output"}, report.separate
    y.sum().backward()
    assert x.grad is not None


def test_recomputed_blocks_give_the_same() -> None:
    results = []
    for how in ("none", "full"):
        model = built("row", trained=True)
        fp8.apply(model, fp8.plan(model, "rowwise"))
        fp8.activation_checkpointing([(str(i), model[i]) for i in (1, 2)], how)
        model(batch()).float().square().mean().backward()
        results.append(model[0].weight.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", RECIPES)
def test_training_does_not_change_codes(kind: str) -> None:
    model = built(kind, trained=True)
    fp8.apply(model, fp8.plan(model, fp8.Policy(recipe=RECIPES[kind])))
    before = fp8.fingerprint(model)
    codes = {n: copy.deepcopy(codes_of_frozen(w)) for n, w in frozen_weights(model)}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(20):
        loss = (model(batch(32, step)) - 1).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert fp8.fingerprint(model) == before
    for name, weight in frozen_weights(model):
        q = codes_of_frozen(weight)
        assert torch.equal(q.data.view(torch.uint8), codes[name].data.view(torch.uint8))
        assert torch.equal(q.scale, codes[name].scale)


# The plan -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind,wrong,fix",
    [
        ("row", "blockwise", "rowwise"),
        ("block", "tensorwise", "blockwise"),
        ("block", "delayed", "blockwise"),
        ("tensor", "mxfp8", "tensorwise"),
        ("row", "tensorwise", "rowwise"),
    ],
)
def test_different_blocks_are_rejected_with_fix(kind: str, wrong: str, fix: str) -> None:
    with pytest.raises(fp8.PlanError, match=rf"'0.gate_proj' has .* of kind {kind}wise.*{wrong}.*{fix}"):
        fp8.plan(built(kind), wrong)
    with pytest.raises(fp8.PlanError, match=r"rule \*\*.up_proj requests the recipe"):
        fp8.plan(built(kind), fp8.Policy(recipe="off", rules=(fp8.Rule("**.up_proj", recipe=wrong),)))
    with pytest.raises(fp8.PlanError, match="needs different blocks"):
        fp8.plan(built(kind), fp8.Policy(recipe=wrong, fwd="bf16"))


def test_delayed_uses_codes_of_tensor() -> None:
    model = built("tensor")
    fp8.apply(model, fp8.plan(model, "delayed"))
    model.train()
    x = batch().requires_grad_()
    model(x).sum().backward()
    assert x.grad.isfinite().all() and fp8.weight_cache_bytes(model) == 0


def test_auto_selects_compatible_recipe() -> None:
    for kind, recipe in RECIPES.items():
        plan = fp8.plan(built(kind), "auto")
        assert {r.recipe.name for r in plan.rows} == {recipe}
    plan = fp8.plan(built("row"), fp8.Policy(recipe="auto", candidates=("blockwise", "mxfp8")))
    assert not any(r.fp8 for r in plan.rows)
    assert plan.rows[0].reason == "auto: has frozen FP8 codes (e4m3 row pow2), and rowwise is not a candidate of auto"


def test_plan_notes_frozen_weights(tmp_path) -> None:
    model = built("row")
    plan = fp8.plan(model, fp8.Policy(recipe="rowwise", rules=(fp8.Rule("**.down_proj", recipe="off"),)))
    notes = "\n".join(plan.notes)
    size = frozen_bytes(model)
    assert f"6 weights are frozen FP8 codes (6 rowwise): {size:,} bytes" in notes and "cast weights twice" not in notes
    assert "2 of 6 layers with frozen codes stay in high precision and use dequantized values" in notes
    assert "casts codes of frozen weights from dequantized values in each backward, and does not keep them" in notes
    assert plan.rows[0].to_json()["codes"] == "e4m3 row pow2"
    mixed = built("row", trained=True)
    assert "rowwise cast weights twice" in "\n".join(fp8.plan(mixed, "rowwise").notes)
    loaded = fp8.load_plan(fp8.save_plan(plan, tmp_path / "plan.json"), model)
    assert [r.recipe for r in loaded.rows] == [r.recipe for r in plan.rows]
    with pytest.raises(fp8.PlanError, match="has frozen FP8 codes of kind blockwise"):
        fp8.load_plan(tmp_path / "plan.json", built("block"))


def test_plan_requires_same_codes() -> None:
    plain, frozen = built("block", codes=False), built("block")
    with pytest.raises(
        fp8.PlanError, match=r"is linear \[256, 128\] in the plan and .* with frozen FP8 codes .* in the model"
    ):
        fp8.apply(frozen, fp8.plan(plain, "blockwise"))
    with pytest.raises(fp8.PlanError, match="a different model"):
        fp8.apply(built("row"), fp8.plan(frozen, "blockwise"))
    away = built("block").to("meta")  # planned before anything is loaded
    fp8.apply(frozen, fp8.plan(away, "blockwise"))
    assert isinstance(frozen[0].up_proj, fp8.Linear)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.rare)])
def test_compiled_model_matches_eager(backend: str) -> None:
    """FP8 layers with frozen codes leave the graph; those in high precision are traced with dequantized values."""
    model = built("block", trained=True)
    fp8.apply(model, fp8.plan(model, fp8.Policy(rules=(fp8.Rule("1.**", recipe="off"),))))
    x = batch()
    want = model(x)
    torch._dynamo.reset()
    y = torch.compile(model, backend=backend)(x)
    y.float().square().mean().backward()
    if backend == "aot_eager":
        assert torch.equal(y, want)
    assert calc_diff(y, want) < 1e-4 and model[0].weight.grad is not None
    with pytest.raises(torch._dynamo.exc.Unsupported, match="or frozen"):
        torch.compile(model[2], backend=backend, fullgraph=True)(x)
    torch._dynamo.reset()


def test_fused_mlp_uses_codes() -> None:
    q = codes_of_frozen(fp8.freeze_weight(torch.randn(64, 128), "block"))
    weight = frozen_from_codes(q.data, q.scale * 1.3, fp8.CastSpec("e4m3", (128, 128), "fp32"), torch.float32)
    x = batch().float().requires_grad_()
    y = fp8.linear(x, weight)
    y.sum().backward()
    model = nn.Sequential(nn.Linear(128, 64, bias=False))
    model[0].weight = weight
    fp8.apply(model, fp8.plan(model, "blockwise"))
    assert torch.equal(model(x), y)
