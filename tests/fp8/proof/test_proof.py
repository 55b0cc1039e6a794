"""The proof: counted GEMMs against planned ones, and every way in which they can differ."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from octavo import fp8
from octavo.fp8.observe import uncounted
from octavo.fp8.proof import Proof


class Model(nn.Module):
    """A tower that text-only batches do not reach, and a decoder."""

    def __init__(self):
        super().__init__()
        self.visual = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.merger = nn.Linear(16, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.lm_head = nn.Linear(16, 16)
        self.recompute = False

    def forward(self, x, image=None):
        if image is not None:
            for layer in self.visual:
                image = torch.relu(layer(image))
            x = x + self.merger(image)
        for layer in self.layers:
            x = torch.relu(checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return self.lm_head(x)


IN_PART = fp8.Policy("blockwise", components={"image_projector": "off"})


def ready(policy=IN_PART, freeze=()):
    torch.manual_seed(0)
    model = Model()
    for name in freeze:
        model.get_submodule(name).requires_grad_(False)
    plan = fp8.plan(model, policy)
    return fp8.apply(model, plan), plan, Proof(plan)


def step(model, micro=2, images=True):
    with fp8.count_gemms() as counts:
        for _ in range(micro):
            model(torch.randn(3, 16), torch.randn(3, 16) if images else None).sum().backward()
    return counts


@pytest.mark.parametrize("recompute", [False, True])
def test_planned_step_passes(recompute):
    model, plan, proof = ready()
    model.recompute = recompute
    assert proof.pending == {"foundation", "image_encoder"} and proof.share() is None
    counts = step(model, images=False)
    proof.observe(counts, {"foundation": 2, "image_encoder": 0})
    assert proof.pending == {"image_encoder"} and proof.share() == 1.0
    proof.observe(step(model), {"foundation": 2, "image_encoder": 2, "image_projector": 2, "lm_head": 2})
    assert proof.pending == set()
    report = proof.report()
    assert report["pending"] == report["missing"] == report["unused"] == [] and report["fp8_gemms"] > 0
    assert report["shares"]["foundation"] == report["shares"]["image_encoder"] == 1.0
    assert report["shares"]["image_projector"] == 0.0
    assert 0.8 < report["share"] < 1
    assert report["components"]["foundation"]["wgrad"] == {"reference": 8}
    assert report["components"]["image_projector"]["fwd"] == {fp8.HIGH: 2}
    assert (report["components"]["foundation"].get("recompute") is not None) == recompute


def test_counted_share_equals_planned_share():
    model, plan, proof = ready(fp8.Policy("blockwise", wgrad="bf16", components={"image_projector": "rowwise"}))
    proof.observe(step(model), dict.fromkeys(plan.parts, 2))
    # The first layer of each component has no input that asks for a gradient, so it runs no dgrad.
    assert proof.share("image_projector") == pytest.approx(plan.share_of("image_projector"))
    assert proof.share("foundation") == pytest.approx(plan.share_of("foundation"))
    assert proof.share("image_encoder") < plan.share_of("image_encoder")


def test_frozen_parts_and_inputs_without_gradient():
    model, plan, proof = ready(freeze=["visual", "layers.0"])
    counts = step(model)
    proof.observe(counts, {"foundation": 2, "image_encoder": 2})
    assert counts.total("wgrad", "layers.0") == 0 and counts.total("dgrad", "layers.0") == 2
    assert counts.total("dgrad", "visual.0") == counts.total("wgrad", "visual.0") == 0


def test_layer_called_twice_per_forward():
    model, plan, proof = ready()
    model.layers.append(model.layers[0])
    proof.observe(step(model), {"foundation": 2, "image_encoder": 2})
    assert not proof.pending and proof.report()["missing"] == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_one_layer_called_both_checkpointed_and_plainly(reentrant):
    m = nn.Sequential(nn.Linear(16, 16))
    plan = fp8.plan(m, "blockwise")
    fp8.apply(m, plan)
    proof = Proof(plan)
    with fp8.count_gemms() as counts:
        x = torch.randn(3, 16, requires_grad=True)
        m(checkpoint(m, x, use_reentrant=reentrant)).sum().backward()
    proof.observe(counts, {"foundation": 1})
    assert {g: counts.total(g) for g in ("fwd", "recompute", "dgrad", "wgrad")} == {
        "fwd": 2, "recompute": 1, "dgrad": 2, "wgrad": 2,
    }  # fmt: skip


def test_no_grad_forward_is_reported():
    model, plan, proof = ready()
    with fp8.count_gemms() as counts:
        with torch.no_grad():
            model(torch.randn(3, 16))
        model(torch.randn(3, 16)).sum().backward()
    with pytest.raises(fp8.ProofError, match=r"layers.0: planned 2 wgrad, but 1 of 2 fwd ran under no_grad.*uncounted"):
        proof.observe(counts, {"foundation": 2})


def test_uncounted_is_per_thread():
    model, plan, _ = ready()
    model.recompute = True
    gate = threading.Event()

    def dummies():
        with uncounted():
            for _ in range(200):
                model(torch.randn(2, 16), torch.randn(2, 16))
        gate.set()
        hold.wait(60)

    hold = threading.Event()
    other = threading.Thread(target=dummies)
    other.start()
    assert gate.wait(60)
    found = []

    def trains():
        with fp8.count_gemms() as counts:
            model(torch.randn(3, 16)).sum().backward()
        found.append(counts)

    mine = threading.Thread(target=trains)
    mine.start()
    mine.join()
    hold.set()
    other.join()
    assert found[0].total("recompute", "layers.0") == found[0].total("fwd", "layers.0") == 1


def test_many_uncounted_blocks_before_their_backward():
    model, _, _ = ready()
    with fp8.count_gemms() as counts:
        with uncounted():
            first = checkpoint(model.layers[0], torch.randn(2, 16, requires_grad=True), use_reentrant=False)
        for _ in range(1100):
            with uncounted():
                torch.ones(1, requires_grad=True) * 1
        first.sum().backward()
    assert not {k: n for k, n in counts.items() if n}


def test_forward_after_uncounted_block_counts():
    model, _, _ = ready()
    x = torch.randn(3, 16, requires_grad=True)
    with fp8.count_gemms() as counts:
        with uncounted():
            dummy = model.visual[0](x)
        y = checkpoint(model.layers[0], x, use_reentrant=True)  # whose node is the next one, and runs layers.0 again
        (y.sum() + 0 * dummy.sum()).backward()
    assert {key[:2]: n for key, n in counts.items()} == {
        ("layers.0", gemm): 1 for gemm in ("fwd", "recompute", "dgrad", "wgrad")
    }


def skipped(model):
    model.layers[1].forward = lambda x: F.linear(x, model.layers[1].weight, model.layers[1].bias)


def half(model):
    inner, calls = model.layers[1].forward, []

    def sometimes(x):
        calls.append(1)
        return inner(x) if len(calls) % 2 else x

    model.layers[1].forward = sometimes


def refrozen(model):
    model.layers[0].weight.requires_grad_(False)


BREAKS = [
    (skipped, r"layers.1: planned 2 fwd, counted none"),
    (half, r"layers.1: planned 2 fwd \(or a multiple\), counted 1"),
    (refrozen, r"layers.0: planned 2 wgrad, but the weight asked for 0.*frozen or thawed"),
]


@pytest.mark.parametrize("damage,message", BREAKS, ids=[f.__name__ for f, _ in BREAKS])
def test_mismatch_is_rejected(damage, message):
    model, plan, proof = ready()
    damage(model)
    with pytest.raises(fp8.ProofError, match=message):
        proof.observe(step(model), {"foundation": 2, "image_encoder": 2})
    assert proof.report()["missing"] and proof.pending == {"foundation", "image_encoder"}


def test_wrong_number_of_forwards_is_rejected():
    model, plan, proof = ready()
    with pytest.raises(fp8.ProofError, match="layers.0: planned 3 fwd .or a multiple., counted 2"):
        proof.observe(step(model), {"foundation": 3})
    with pytest.raises(fp8.ProofError, match="visual.0: planned 2 fwd, counted none"):
        proof.observe(step(model, images=False), {"image_encoder": 2})


def test_unknown_component_is_rejected():
    model, plan, proof = ready()
    with pytest.raises(fp8.ProofError, match="forwards names 'fondation', but the plan has the components.*foundation"):
        proof.observe(step(model), {"fondation": 2})


def test_lost_backward_is_rejected():
    model, plan, proof = ready()
    with fp8.count_gemms() as counts:
        model(torch.randn(3, 16)).sum()
    with pytest.raises(fp8.ProofError, match="foundation: no backward reached any of its FP8 layers"):
        proof.observe(counts, {"foundation": 1})


def test_layer_without_effect_on_loss_is_listed():
    model, plan, proof = ready()
    with fp8.count_gemms() as counts:
        x = torch.randn(3, 16)
        model.layers[1](x)
        model.layers[0](x).sum().backward()
    proof.observe(counts, {"foundation": 1})
    assert proof.report()["unused"] == ["layers.1"]


def test_unplanned_backend_is_rejected():
    model, plan, proof = ready()
    counts = step(model)
    for key in [k for k in counts if k[0] == "layers.1" and k[1] == "dgrad"]:
        counts.calls[(key[0], key[1], "elsewhere")] = counts.calls.pop(key)
    with pytest.raises(fp8.ProofError, match="layers.1: dgrad planned on reference, 2 ran on elsewhere"):
        proof.observe(counts, {"foundation": 2})


def test_forward_recomputed_twice_is_rejected():
    """By a checkpoint within a checkpoint. Each of its backward GEMMs runs once, so that nothing else shows it."""
    model, plan, proof = ready()
    twice = nn.Sequential(*model.layers)
    with fp8.count_gemms() as counts:
        x = torch.randn(3, 16, requires_grad=True)
        checkpoint(lambda x: checkpoint(twice, x, use_reentrant=True), x, use_reentrant=True).sum().backward()
    with pytest.raises(fp8.ProofError, match="layers.0: 1 fwd were recomputed 2 times; layers.1: 1 fwd"):
        proof.observe(counts, {"foundation": 1})


def test_dummies_do_not_count():
    model, plan, proof = ready()
    with fp8.count_gemms() as counts:
        with uncounted():
            image = model.merger(model.visual[1](model.visual[0](torch.randn(3, 16))))
        model.recompute = True
        (model(torch.randn(3, 16)).sum() + 0 * image.sum()).backward()
    proof.observe(counts, {"foundation": 1, "image_encoder": 0})
    assert not [k for k in counts if k[0].startswith(("visual", "merger"))]
    assert proof.pending == {"image_encoder"}


def test_counters_nest_and_are_removed():
    model, _, _ = ready()
    with fp8.count_gemms() as outer:
        step(model)
        with fp8.count_gemms() as inner:
            model(torch.randn(2, 16))
    model(torch.randn(2, 16))
    assert inner.total("fwd") == 3 and outer.total("fwd") == 2 * 6 + 3
    assert not nn.modules.module._global_forward_hooks
    assert inner["layers.0", "fwd", "reference"] == 1 and inner["nothing", "fwd", "x"] == 0
    assert dict(inner) == dict(inner.items()) and inner.flops["layers.0", "fwd", "reference"] == 2 * 2 * 16 * 16


def test_high_precision_plans_need_no_proof():
    model, plan, proof = ready("off")
    proof.observe(step(model), {"foundation": 2, "image_encoder": 2})
    assert proof.pending == set() and proof.share() == 0.0 and proof.report()["fp8_gemms"] == 0
