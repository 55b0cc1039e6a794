"""Eager mode on a GPU: no synchronization, capture of a step into a CUDA graph, and shared codes."""

import copy

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.metrics import calc_diff
from tests.fp8.remembered import held_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

RECIPES = ("blockwise", "rowwise", "tensorwise", "delayed")


class Block(nn.Module):
    def __init__(self, k=512):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(k, n, bias=False) for n in (512, 128, 128))
        self.gate_proj, self.up_proj = nn.Linear(k, 1024, bias=False), nn.Linear(k, 1024, bias=False)

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        h = q * (k * v).repeat(1, 4)
        return nn.functional.silu(self.gate_proj(h)) * self.up_proj(h)


def block(recipe, **kwargs):
    torch.manual_seed(0)
    m = Block().to("cuda", torch.bfloat16)
    return fp8.apply(m, fp8.plan(m, fp8.Policy(recipe=recipe, **kwargs)))


def step(m, x):
    m(x).float().square().mean().backward()


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_synchronization(recipe):
    m = block(recipe)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    step(m, x)  # kernels are compiled and loaded
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            fp8.invalidate(m)
            step(m, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_captured_step_uses_current_weights(recipe):
    m = block(recipe)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(m, x)
            m.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(m, x)
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            for p in m.parameters():
                p.add_(torch.randn_like(p) * 0.02)
        graph.replay()
        results = [p.grad.clone() for p in m.parameters()]
        eager = copy.deepcopy(m)
        eager.zero_grad(set_to_none=True)
        step(eager, x)
        for a, p in zip(results, eager.parameters(), strict=True):
            assert calc_diff(a, p.grad) < 1e-6


def test_codes_are_shared_and_freed():
    m = block("blockwise")
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        m.q_proj(x)
        once = held_bytes()
        m.k_proj(x)
        assert held_bytes() == once >= 256 * 512
    del x
    assert held_bytes() == 0
