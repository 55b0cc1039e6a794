"""Blocks that save FP8 on a GPU: codes, close gradients, exact recomputation, memory, and CUDA graphs."""

import copy

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.arithmetic import cast
from octavo.fp8.dense import sources
from octavo.fp8.metrics import calc_diff, cosine

from .blocks import Block

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


class Vision(nn.Module):
    """Ragged sizes, LayerNorms, a GELU."""

    def __init__(self, k=1152, n=4304):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(k), VisionMlp(k, n)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class VisionMlp(nn.Module):
    def __init__(self, k, n):
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(k, n), nn.Linear(n, k), nn.GELU("tanh")

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


def pair(kind=Block, dtype=torch.bfloat16, fuse="off", recipe="blockwise"):
    """Return a block that saves 16 bits, and a copy that saves FP8."""
    torch.manual_seed(0)
    plain = kind().to("cuda", dtype)
    twin = copy.deepcopy(plain)
    for m, activations in ((plain, "bf16"), (twin, "fp8")):
        plan = fp8.plan(m, fp8.Policy(recipe=recipe, fuse=fuse, activations=activations))
        fp8.apply(m, plan)
    assert plan.blocks and all(b.saves for b in plan.blocks)
    return plain, twin


def given(kind=Block, dtype=torch.bfloat16, rows=300):
    return torch.randn(2, rows, 512 if kind is Block else 1152, device="cuda", dtype=dtype)


def step(m, x, lowered=False):
    m.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=lowered):
        y = m(x)
    (y.float() * torch.linspace(-1, 2, y.shape[-1], device="cuda")).mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in m.parameters())]


@pytest.mark.parametrize("k", [64, 72, 80, 128, 1152, 3420, 4304])
def test_codes_match_reference(k):
    x = torch.randn(257, k, device="cuda", dtype=torch.bfloat16) * 100
    x[3, 7], x[5, -1] = float("nan"), float("inf")
    got, want = sources.encode_activation(x), cast.quantize(x.cpu(), sources.SPEC)
    assert torch.equal(got.data.cpu().view(torch.uint8), want.data.view(torch.uint8))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(
            sources.decode_activation(got, dtype).cpu().nan_to_num(7), cast.dequantize(want).to(dtype).nan_to_num(7)
        )


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize(("kind", "fuse"), [(Block, "off"), (Block, "on"), (Vision, "off")])
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise"])
def test_gradients_are_close_to_16_bits(recipe, kind, fuse, lowered):
    dtype = torch.float32 if lowered else torch.bfloat16
    x = given(kind, dtype)
    for exact, results in zip(*(step(m, x, lowered) for m in pair(kind, dtype, fuse, recipe)), strict=True):
        assert exact.dtype == results.dtype and cosine(exact, results) > 0.99


@pytest.mark.parametrize("fuse", ["off", "on"])
def test_recomputed_bit_for_bit(fuse):
    from torch.utils.checkpoint import checkpoint

    _, twin = pair(fuse=fuse)
    x = given().requires_grad_()
    grads = []
    for again in (False, True):
        twin.zero_grad(set_to_none=True)
        y = checkpoint(twin, x, use_reentrant=False) if again else twin(x)
        (dx,) = torch.autograd.grad(y.float().square().sum(), x)
        grads.append((y.detach(), dx))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(("kind", "fuse", "most"), [(Block, "off", 0.6), (Block, "on", 0.7), (Vision, "off", 0.6)])
def test_less_memory_is_saved_for_backward(kind, fuse, most):
    saved, x = [], given(kind, rows=2048)
    for m in pair(kind, fuse=fuse):
        step(m, x)
        leaf = x.clone().requires_grad_()
        before = torch.cuda.memory_allocated()
        y = m(leaf)
        saved.append(torch.cuda.memory_allocated() - before - y.numel() * y.element_size())
        del y
    assert saved[1] < most * saved[0], [n / x.shape[:-1].numel() for n in saved]


@pytest.mark.parametrize(("kind", "fuse"), [(Block, "off"), (Block, "on"), (Vision, "off")])
def test_no_synchronization(kind, fuse):
    _, twin = pair(kind, fuse=fuse)
    x = given(kind)
    step(twin, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(twin, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fuse", ["off", "on"])
def test_captured_step(fuse):
    _, twin = pair(fuse=fuse)
    x = given()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(twin, x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(twin, x)
    x.normal_()
    graph.replay()
    captured = [t.clone() for t in captured]
    for a, b in zip(captured, step(twin, x), strict=True):
        assert calc_diff(a, b) < 1e-4
