"""Experts on a GPU: grouped FP8 GEMMs against the reference, and no synchronization in a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.kernels.groups import expert_spans, group_rows, real_rows
from octavo.fp8.metrics import calc_diff
from octavo.fp8.moe import grouped_high

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

E, H, I = 16, 512, 384  # noqa: E741
RECIPES = ["blockwise", "rowwise", "tensorwise", "mxfp8"]


class Stock(nn.Module):
    """The experts of transformers."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.gate_up_proj = nn.Parameter((torch.randn(E, 2 * I, H, generator=g) / H**0.5).to(dtype))
        self.down_proj = nn.Parameter((torch.randn(E, H, I, generator=g) / I**0.5).to(dtype))
        self.act_fn = nn.functional.silu

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        out = torch.zeros_like(hidden_states)
        for expert in range(E):
            token, choice = (top_k_index == expert).nonzero(as_tuple=True)
            gate, up = (hidden_states[token] @ self.gate_up_proj[expert].t()).chunk(2, -1)
            y = (self.act_fn(gate) * up) @ self.down_proj[expert].t()
            out.index_add_(0, token, y * top_k_weights[token, choice, None])
        return out


def given(tokens: int, used: int = E, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, H, generator=g).bfloat16().to(device).requires_grad_()
    index = torch.rand(tokens, used, generator=g).argsort(1)[:, :4].to(device)
    share = torch.rand(tokens, 4, generator=g).bfloat16().to(device).requires_grad_()
    return x, index, share


def converted(recipe: str, device: str, backend: str = "auto") -> tuple[nn.Module, fp8.Plan]:
    model = nn.ModuleDict({"experts": Stock()}).to(device)
    plan = fp8.plan(model, fp8.Policy(recipe=recipe, backend=backend))
    fp8.apply(model, plan)
    return model["experts"], plan


def step(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    module.zero_grad()
    y = module(*inputs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    y.backward(dy)
    return [y.detach(), inputs[0].grad, inputs[2].grad, module.gate_up_proj.grad, module.down_proj.grad]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("tokens", "used"), [(1, E), (300, E), (1000, 5)])
def test_experts_match_reference(recipe, tokens, used):
    """The same codes wherever inputs are the same; what follows differs by roundings to BF16 of the first GEMM."""
    actual, plan = converted(recipe, "cuda")
    assert not [note for note in plan.notes if "expert by expert" in note], plan.notes
    reference, _ = converted(recipe, "cpu", "reference")
    got, want = step(actual, given(tokens, used)), step(reference, given(tokens, used, "cpu"))
    for name, a, b in zip(("y", "dx", "dshare", "dw gate_up", "dw down"), got, want, strict=True):
        assert a.isfinite().all() and calc_diff(a.cpu(), b) < 1e-3, name
    assert not actual.gate_up_proj.grad[used:].any() and not actual.down_proj.grad[used:].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_step_does_not_synchronize(recipe):
    actual, _ = converted(recipe, "cuda")
    inputs = given(300)
    step(actual, inputs)  # compiles kernels
    dy = torch.ones_like(inputs[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with fp8.count_gemms() as counts:
            actual(*inputs).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts.total("fwd") == counts.total("dgrad") == counts.total("wgrad") == 2 * E
    assert sum(counts.flops.values()) == 3 * 2 * 1200 * 3 * I * H


@pytest.mark.parametrize("used", [E, 3])
def test_grouped_bf16_products_match_loop(used):
    g = torch.Generator().manual_seed(3)
    groups = group_rows(torch.randint(0, used, (700,), generator=g).cuda(), E).groups
    padding = ~real_rows(groups).unsqueeze(1)
    x = torch.randn(groups.rows, H, generator=g).bfloat16().cuda().masked_fill(padding, float("nan"))
    dy = torch.randn(groups.rows, I, generator=g).bfloat16().cuda().masked_fill(padding, float("nan"))
    w = torch.randn(E, I, H, generator=g).bfloat16().cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, dx = grouped_high.fwd(x, w, None, groups), grouped_high.dgrad(dy, w, groups)
        dw, db = grouped_high.wgrad(dy, x, groups, torch.float32), grouped_high.bias_grad(dy, groups)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for expert, span in expert_spans(groups):
        assert calc_diff(y[span], x[span].double() @ w[expert].double().t()) < 1e-5
        assert calc_diff(dx[span], dy[span].double() @ w[expert].double()) < 1e-5
        assert calc_diff(dw[expert], dy[span].double().t() @ x[span].double()) < 1e-5
        assert torch.allclose(db[expert], dy[span].float().sum(0), rtol=1e-4, atol=1e-3)
    assert not dw[used:].any() and not db[used:].any()
