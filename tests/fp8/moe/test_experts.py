"""Experts by structure: ours equal the stock module, run in FP8, and leave what they do not know."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, Llama4TextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from octavo import fp8
from octavo.fp8.metrics import cosine
from octavo.fp8.moe import Experts
from octavo.fp8.moe import experts as moe
from octavo.fp8.proof import Proof
from tests.fp8.moe.expert_modules import FAMILIES, SMALL, E, H, I, made, routed


def convert(module, recipe="blockwise", **kwargs):
    block = nn.ModuleDict({"experts": module})
    fp8.apply(block, fp8.plan(block, fp8.Policy(recipe=recipe, **kwargs)))
    return block["experts"]


@pytest.mark.parametrize("family", FAMILIES)
def test_high_precision_forward_matches_stock(family):
    module = FAMILIES[family]()
    assert moe.is_experts(module) and moe.why_not(module) is None and moe.matches_stock(module) is None
    module.bfloat16()
    assert moe.matches_stock(module) is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "delayed"])
def test_fp8_experts_are_close_to_stock(family, recipe):
    stock = FAMILIES[family]()
    names = list(stock.state_dict())
    ours = convert(copy.deepcopy(stock), recipe)
    assert isinstance(ours, Experts) and isinstance(ours, type(stock)) and list(ours.state_dict()) == names
    a, b = routed(40), routed(40)
    y, z = ours(*a), stock(*b)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(dy)
    z.backward(dy)
    pairs = [(y, z), (a[0].grad, b[0].grad), (a[2].grad, b[2].grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(ours.parameters(), stock.parameters(), strict=True)]
    for got, want in pairs:
        assert cosine(got, want) > 0.985


@pytest.mark.parametrize(("recipe", "calls", "idle"), [("blockwise", E, 0), ("delayed", 3, 3)])
def test_idle_experts_get_zero_gradients(recipe, calls, idle):
    """A grouped GEMM counts every expert; one by one, those without tokens are idle. FLOPs are of the real rows."""
    ours, stock = convert(FAMILIES["qwen3_moe"](), recipe), FAMILIES["qwen3_moe"]()
    with fp8.count_gemms() as counts:
        ours(*routed(used=3)).sum().backward()
    stock(*routed(used=3)).sum().backward()
    for p, q in zip(ours.parameters(), stock.parameters(), strict=True):
        assert not p.grad[3:].any() and not q.grad[3:].any() and p.grad[:3].any()
    for gemm in ("fwd", "dgrad", "wgrad"):
        assert counts["experts.gate_up_proj", gemm, "reference"] == calls
        assert counts.flops["experts.gate_up_proj", gemm, "reference"] == 2 * 20 * 2 * I * H
        assert counts.flops["experts.down_proj", gemm, "reference"] == 2 * 20 * H * I
    assert counts.idle["experts.gate_up_proj"] == idle


def test_empty_batch():
    ours = convert(FAMILIES["qwen3_moe"]())
    with fp8.count_gemms() as counts:
        y = ours(torch.zeros(0, H), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
        y.sum().backward()
    assert y.shape == (0, H) and not ours.gate_up_proj.grad.any() and not ours.down_proj.grad.any()
    assert counts["experts.down_proj", "fwd", "reference"] + counts.idle["experts.down_proj"] == E


def test_empty_slots_of_expert_parallelism_add_zero():
    ours = convert(FAMILIES["qwen3_moe"]())
    x, index, share = routed()
    whole = ours(x, index, share)
    gone = index.clone()
    gone[4] = E  # beyond the last expert
    with fp8.count_gemms() as counts:
        part = ours(x, gone, share)
    part.sum().backward()
    assert not part[4].any() and torch.allclose(part[:4], whole[:4], atol=1e-1)
    assert not x.grad[4].any() and not share.grad[4].any() and x.grad[:4].all()
    assert counts.flops["experts.down_proj", "fwd", "reference"] == 2 * 18 * H * I, "18 of 20 pairs have an expert"


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_bias_is_not_added_without_expert(backend):
    """A token whose index is out of range reads a row of padding, in which kernels leave their expert's bias: its
    weight must make nothing of it."""
    if backend == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("on a GPU the kernels are compiled, not interpreted")
    config = GptOssConfig(hidden_size=16, intermediate_size=16, num_local_experts=1, num_experts_per_tok=1)
    ours = convert(made(GptOssExperts, config), "tensorwise", backend=backend)
    for gone in (1, -1):
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        index, share = torch.tensor([[0], [gone], [0]]), torch.full((3, 1), 2.0, requires_grad=True)
        y = ours(x, index, share)
        y.sum().backward()
        for got in (y, x.grad, share.grad):
            assert not got[1].any() and bool(got[[0, 2]].any(1).all()), "only tokens with an expert have a share"


def test_codes_are_cached_and_renewed():
    ours = convert(FAMILIES["qwen3_moe"]())
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.05, fused=True)
    for _ in range(2):
        for _ in range(2):
            a = ours(*routed())
            fp8.invalidate(ours)
            assert torch.equal(a, ours(*routed()))
            a.sum().backward()
        optimizer.step()
    before = ours(*routed())
    ours.load_state_dict({k: 2 * v for k, v in ours.state_dict().items()})
    assert torch.allclose(ours(*routed()), ours(*routed())) and not torch.allclose(before, ours(*routed()))
    assert len(ours._weight_caches()["gate_up_proj"]) == 1, "all experts in one"
    ours.to(torch.bfloat16)
    assert len(ours._weight_caches()["gate_up_proj"]) == 0


def test_projection_can_stay_in_high_precision():
    block = nn.ModuleDict({"experts": FAMILIES["qwen3_moe"]()})
    policy = fp8.Policy(rules=(fp8.Rule("**.down_proj", recipe="off"),))
    fp8.apply(block, fp8.plan(block, policy))
    with fp8.count_gemms() as counts:
        block["experts"](*routed()).sum().backward()
    ran = {(layer, backend) for layer, _, backend in counts}
    assert ran == {("experts.gate_up_proj", "reference"), ("experts.down_proj", fp8.HIGH)}


def test_copies_and_pickles():
    ours = convert(FAMILIES["gpt_oss"](), "delayed")
    y = ours(*routed())
    twin = copy.deepcopy(ours)
    assert isinstance(twin, Experts) and torch.equal(ours.eval()(*routed()), twin.eval()(*routed()))
    thawed = pickle.loads(pickle.dumps(ours))
    assert torch.equal(thawed(*routed()), ours(*routed())) and y.shape == (10, H)
    with torch.no_grad():
        twin.down_proj.mul_(2)
        twin.down_proj_bias.mul_(2)
    assert torch.allclose(twin(*routed()), 2 * ours(*routed()), rtol=1e-5)


def test_recomputation_and_delayed_histories_per_expert():
    ours = convert(FAMILIES["qwen3_moe"](), "delayed")
    ours(*routed(used=3)).sum().backward()
    history = fp8.scaling_state(ours)["fp8_amax_x_gate_up_proj"]
    assert history.shape == (E, 16)
    assert (history[:3, 0] > 0).all() and not history[3:].any()


class Doubled(Qwen3MoeExperts):
    """The structure is the known one, the arithmetic is not."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return 2 * super().forward(hidden_states, top_k_index, top_k_weights)


def test_module_with_different_results_is_skipped():
    block = nn.ModuleDict(
        {"experts": made(Doubled, Qwen3MoeConfig(moe_intermediate_size=I, **SMALL)), "a": nn.Linear(8, 8)}
    )
    plan = fp8.plan(block)
    assert [r.fp8 for r in plan.rows] == [True, False, False] or [r.fp8 for r in plan.rows] == [False, False, True]
    assert "differs from the stock module by" in plan.table()
    fp8.apply(block, plan)
    assert isinstance(block["experts"], Doubled) and not isinstance(block["experts"], Experts)
    with torch.device("meta"):
        empty = nn.ModuleDict({"experts": Doubled(block["experts"].config), "a": nn.Linear(8, 8)})
    hopeful = fp8.plan(empty)
    fresh = nn.ModuleDict({"experts": made(Doubled, block["experts"].config), "a": nn.Linear(8, 8)})
    with pytest.raises(fp8.PlanError, match="'experts' cannot be converted.*Make a new plan for the loaded model"):
        fp8.apply(fresh, hopeful)
    assert type(fresh["a"]) is nn.Linear, "nothing was half applied"


def test_unsupported_signature_is_skipped():
    config = Llama4TextConfig(hidden_size=H, intermediate_size=I, num_local_experts=E)
    block = nn.ModuleDict({"experts": Llama4TextExperts(config), "a": nn.Linear(8, 8)})
    for p in block["experts"].parameters():
        nn.init.normal_(p)
    assert "experts called with (hidden_states)" in fp8.plan(block).table()
    with pytest.raises(fp8.PlanError, match="rule.*requests FP8, but none of its 2 layers can run"):
        fp8.plan(block, fp8.Policy(rules=(fp8.Rule("experts", recipe="rowwise"),)))


def test_qwen3_moe_trains_and_passes_proof():
    config = Qwen3MoeConfig(
        moe_intermediate_size=I, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=64, intermediate_size=48, **SMALL,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    plan = fp8.plan(model)
    fp8.apply(model, plan)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    proof = Proof(plan)
    ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    with fp8.count_gemms() as counts:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
    proof.observe(counts, {"foundation": 2})
    assert proof.pending == set() and counts.total("recompute") > 0
    assert proof.share("foundation") == pytest.approx(plan.share_of("foundation"), abs=0.02)
