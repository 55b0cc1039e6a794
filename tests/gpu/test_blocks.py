"""Fused norms and gated MLPs on a GPU: values, launches, synchronization, saved memory, and CUDA graphs."""

import copy

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.blocks import gated_mlp, rmsnorm
from octavo.fp8.metrics import calc_diff

from .blocks import Mlp, Norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


class Block(nn.Module):
    def __init__(self, k=512, n=1376):
        super().__init__()
        self.post_attention_layernorm, self.mlp = Norm(k), Mlp(k, n)

    def forward(self, x):
        return x + self.mlp(self.post_attention_layernorm(x))


def pair(recipe="blockwise", dtype=torch.bfloat16):
    """Return a block with FP8 layers, and its fused copy."""
    torch.manual_seed(0)
    plain = Block().to("cuda", dtype)
    fp8.apply(plain, fp8.plan(plain, fp8.Policy(recipe=recipe, fuse="off")))
    twin = copy.deepcopy(plain)
    assert [why for _, why in (*gated_mlp.convert(twin), *rmsnorm.convert(twin))] == [None, None]
    return plain, twin


def step(m, x, lowered=False):
    with torch.autocast("cuda", torch.bfloat16, enabled=lowered):
        y = m(x)
    (y.float() * torch.linspace(-1, 2, y.shape[-1], device="cuda")).mean().backward()
    return y.detach()


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise"])
@pytest.mark.parametrize("lowered", [False, True])
def test_close_to_separate_layers(recipe, lowered):
    plain, twin = pair(recipe, torch.float32 if lowered else torch.bfloat16)
    for rows in (300, 1):
        x = torch.randn(rows, 512, device="cuda", dtype=twin.mlp.gate_proj.weight.dtype)
        results = []
        for m in (plain, twin):
            m.zero_grad()
            inputs = x.clone().requires_grad_()
            y = step(m, inputs, lowered)
            results.append((y, inputs.grad, *(p.grad for p in m.parameters())))
        for exact, result_ in zip(*results, strict=True):
            assert exact.dtype == result_.dtype and calc_diff(exact, result_) < 5e-3


def test_one_kernel_per_block():
    pytest.importorskip("triton")
    from octavo.fp8.kernels.triton_kernels.launch import launches

    _, twin = pair()
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    step(twin, x)
    with launches() as recorded:
        step(twin, x)
    assert (recorded["rmsnorm_tile"], recorded["swiglu"], recorded["swiglu_backward"]) == (1, 1, 1)


def test_no_synchronization():
    _, twin = pair()
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    step(twin, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(twin, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_less_memory_is_saved_for_backward():
    saved = []
    for m in pair():
        x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        step(m, x)
        before = torch.cuda.memory_allocated()
        y = m(x)
        saved.append(torch.cuda.memory_allocated() - before)
        del y
    assert saved[1] < 0.75 * saved[0]


def test_captured_step():
    plain, twin = pair()
    for m in (plain, twin):
        m.requires_grad_(True)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            twin.zero_grad(set_to_none=True)
            step(twin, x)
    torch.cuda.current_stream().wait_stream(stream)
    twin.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(twin, x)
    with torch.no_grad():
        for m in (plain, twin):
            m.mlp.up_proj.weight.mul_(2)
        x.normal_()
    graph.replay()
    step(plain, x)
    for (name, a), b in zip(plain.named_parameters(), twin.parameters(), strict=True):
        assert calc_diff(a.grad, b.grad) < 5e-3, name
