"""Experts that keep gate and up in FP8: beside experts whose gate_up was rounded and whose rows were all saved."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from octavo import fp8
from octavo.fp8.memory.accounting import count_saved
from octavo.fp8.moe import experts as moe
from octavo.fp8.moe import experts as saved_experts
from octavo.fp8.planning import unfuse
from tests.fp8.blocks.test_mlp import Rounded, cosine
from tests.fp8.moe.expert_modules import FAMILIES, H, routed
from tests.fp8.moe.test_experts import convert


def pair(family="qwen3_moe", recipe="blockwise", dtype=torch.float32, **policy):
    plain = convert(FAMILIES[family]().to(dtype), recipe, **policy)
    twin = convert(FAMILIES[family]().to(dtype), recipe, activations="fp8", **policy)
    assert saved_experts.SAVES_FP8 in twin.__dict__ and saved_experts.SAVES_FP8 not in plain.__dict__
    return plain, twin


def run(experts, given, inner=None):
    given = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in given]
    experts.zero_grad(set_to_none=True)
    with fp8.count_gemms() as counts:
        y = experts(*given) if inner is None else inner(experts, *given)
        (y.float() * torch.randn(y.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    grads = [p.grad for p in experts.parameters()]
    return [y.detach(), given[0].grad, *grads, given[2].grad], (dict(counts.calls), dict(counts.expected))


CASES = [("blockwise", {}), ("rowwise", {}), ("tensorwise", {}), ("delayed", {}), ("blockwise", {"wgrad": "bf16"})]


@pytest.mark.parametrize(("recipe", "policy"), CASES)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_equal_experts_on_rounded_values(family, recipe, policy, monkeypatch):
    """But for the gradient of the routing weights, which are multiplied with rounded answers."""
    plain, twin = pair(family, recipe, **policy)
    given, own = routed(40), moe._apply_gate
    got, counts = run(twin, given)
    monkeypatch.setattr(moe, "_apply_gate", lambda module, gate_up: own(module, Rounded.apply(gate_up)))
    want, counts2 = run(plain, given)
    assert counts == counts2 and all(torch.equal(a, b) for a, b in zip(want[:-1], got[:-1], strict=True))
    assert cosine(want[-1], got[-1]) > 0.99 and not torch.equal(want[-1], got[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_close_to_saving_16_bits(family):
    plain, twin = pair(family, dtype=torch.bfloat16)
    given = routed(64, dtype=torch.bfloat16)
    (want, counts), (got, counts2) = run(plain, given), run(twin, given)
    assert counts == counts2 and all(cosine(a, b) > 0.99 for a, b in zip(want, got, strict=True))


def test_recomputation_health_no_graph_and_no_token():
    _, twin = pair()
    given = routed(30)
    want, _ = run(twin, given)
    for reentrant in (False, True):
        got, _ = run(twin, given, lambda m, *a, r=reentrant: checkpoint(m, *a, use_reentrant=r))
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    with fp8.health() as h:
        got, _ = run(twin, given)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert "dw_cosine" in h.table()["experts.down_proj"]
    with torch.no_grad():
        assert torch.equal(twin(*given), want[0])
    y = twin(torch.zeros(0, H), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    y.sum().backward()
    assert y.shape == (0, H)


def test_saved_tensors():
    sizes, tokens = [], 256
    for experts in pair(dtype=torch.bfloat16):
        given = routed(tokens, dtype=torch.bfloat16)
        with count_saved(experts) as accountant:
            y = experts(*given)
        assert y.requires_grad
        rows = [r for r in accountant.report().rows if r.kind == "activation"]
        sizes.append(sum(r.bytes for r in rows))
        wide = [r.shape for r in rows if r.dtype == torch.bfloat16 and r.shape[-1] > 1]
    assert not wide and sizes[1] < 0.55 * sizes[0]
    _, frozen = pair(dtype=torch.bfloat16)
    x, index, weights = routed(tokens, dtype=torch.bfloat16)
    with count_saved(frozen) as accountant:
        y = frozen(x, index, weights.detach())  # no router is trained: nobody asks for the answers
    assert y.requires_grad and not any(r.shape[-1] == H and r.shape[0] == 2 * tokens for r in accountant.report().rows)


def test_plan_notes_saving_and_copies_keep_it():
    _, twin = pair()
    assert saved_experts.SAVES_FP8 in copy.deepcopy(twin).__dict__
    block = torch.nn.ModuleDict({"experts": FAMILIES["qwen3_moe"]()})
    plan = fp8.plan(block, fp8.Policy(activations="fp8"))
    assert [(b.name, b.kind, b.saves) for b in plan.blocks] == [("experts", "experts", True)]
    assert any("1 modules of experts save gate and up in FP8" in n for n in plan.notes)
    fp8.apply(block, plan)
    unfuse(block)
    assert saved_experts.SAVES_FP8 not in block["experts"].__dict__
