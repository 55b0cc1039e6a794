"""q, k and v, and gate and up, measured together on a real GPU: what is planned is what is faster there."""

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8 import fusion
from octavo.fp8.measuring.timing import time_calls

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

TOKENS = {"foundation": 8192}


class Block(nn.Module):
    """What multiplies one input in a decoder layer of Qwen3-8B."""

    def __init__(self, width=4096, kv=1024, inner=12288):
        super().__init__()
        self.first = nn.Linear(width, 128, bias=False)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = nn.Linear(width, kv, bias=False), nn.Linear(width, kv, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x), self.gate_proj(x), self.up_proj(x)


@pytest.fixture(scope="module")
def measured():
    with torch.device("meta"):
        model = Block()
    policy = fp8.Policy(recipe="blockwise", rules=[fp8.Rule("first", recipe="off")])
    found = fp8.measure(model, policy, None, TOKENS, device="cuda")
    return model, policy, found, fp8.plan(model, policy, tokens=TOKENS, measurements=found, micro_steps=4)


def test_no_group_is_planned_slower_than_bf16(measured):
    _, _, found, plan = measured
    print("\n" + plan.table())
    for case, m in found.cases.items():
        for name, e in m.entries.items():
            print(case, name, e.rejected or f"{1e3 * e.seconds:.3f} ms, host {1e3 * e.host:.3f} ms")
    for row in plan.rows:
        assert row.times is None or row.times.planned <= row.times.high
    for group in plan.groups:
        assert group.choice is not None and group.choice.planned <= group.choice.high
        assert group.choice.joined is not None, "blockwise sisters of these sizes can run as one GEMM"
        assert group.fused == (group.choice.layout == "joined")


def test_the_ranking_of_one_gemm_holds_when_it_is_timed_again(measured):
    """Forward and backward of the whole block, its sisters as one and apart, as a run would call them."""
    _, policy, _, plan = measured
    if not plan.groups or not all(g.fused for g in plan.groups):
        pytest.skip("planned apart here: " + "; ".join(g.reason for g in plan.groups))
    torch.manual_seed(0)
    joined = fp8.apply(Block().to("cuda"), plan)
    apart = fp8.apply(Block().to("cuda"), plan)
    fp8.unfuse(apart)
    assert len(fusion.fused(joined)) == 2 and not fusion.fused(apart)
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def call(module):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            ys = module(x)
        weights = [p for name, p in module.named_parameters() if not name.startswith("first")]
        torch.autograd.grad(ys, [x, *weights], [torch.ones_like(y) for y in ys])

    times = time_calls({"apart": lambda: call(apart), "joined": lambda: call(joined)}, "cuda")
    assert times["joined"].seconds < 1.05 * times["apart"].seconds
    assert len(fusion.fused(joined)) == 2  # none gave up on the way
