"""Activation memory on a GPU: offloading, counted bytes, and attention that saves k and v without copies."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from octavo import fp8
from octavo.fp8.blocks.attention import grouped_attention
from octavo.fp8.memory.accounting import count_saved
from octavo.fp8.memory.offload import offload, synchronize_per_layer
from octavo.fp8.memory.recompute import activation_checkpointing
from octavo.fp8.metrics import calc_diff

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SIZE, TOKENS = 512, 2048


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x):
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.proj = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE // 2), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        heads = [y.unflatten(-1, (-1, 64)).transpose(1, 2) for y in (self.q(x), *self.kv(x).chunk(2, -1))]
        return self.proj(grouped_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2 = Norm(), Attention(), Norm()
        self.mlp = nn.Sequential(nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def stack(depth=8, how="none", in_fp8=False):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(depth))).to("cuda", torch.bfloat16)
    if in_fp8:
        fp8.apply(model, fp8.plan(model, "blockwise"))
    activation_checkpointing(model.named_children(), how)
    return model


@pytest.fixture(autouse=True)
def deterministic():
    """The backward of flash attention has a random order of sums by default."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def step(model):
    torch.manual_seed(1)
    x = torch.randn(1, TOKENS, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    before = torch.cuda.memory_allocated()
    y = model(x)
    after = torch.cuda.memory_allocated() - before
    y.float().square().mean().backward()
    torch.cuda.synchronize()
    return after, [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_offload_gives_the_same_gradients_and_frees_the_device(how, in_fp8):
    stayed, grads = step(stack(how=how, in_fp8=in_fp8))
    model = stack(how=how, in_fp8=in_fp8)
    hooks = offload(model.named_children(), least=1 << 16)
    for _ in range(3):
        model.zero_grad()
        moved, original = step(model)
        assert all(torch.equal(a, b) for a, b in zip(grads, original, strict=True))
    assert moved < stayed / 2  # two blocks of eight
    hooks.remove()
    model.zero_grad()
    again, original = step(model)
    assert all(torch.equal(a, b) for a, b in zip(grads, original, strict=True)) and again > 2 * moved


def test_synchronizing_hooks_do_not_change_values():
    _, grads = step(stack(2))
    model = stack(2)
    synchronize_per_layer(model.named_children())
    _, original = step(model)
    assert all(torch.equal(a, b) for a, b in zip(grads, original, strict=True))


@pytest.mark.parametrize("in_fp8", [False, True])
def test_counted_bytes_match_allocator(in_fp8):
    model = stack(4, in_fp8=in_fp8)
    step(model)
    model.zero_grad()
    x = torch.randn(1, TOKENS, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    codes, before = fp8.weight_cache_bytes(model), torch.cuda.memory_allocated()
    with count_saved(model, model.named_children()) as k:
        y = model(x)
    report = k.report()
    counted = report.total + report.separate["output"] + fp8.weight_cache_bytes(model) - codes
    assert counted == pytest.approx(torch.cuda.memory_allocated() - before, rel=0.02)
    del y


def test_offloaded_tensors_count_as_host_memory():
    model = stack(4)
    offload(model.named_children(), least=1 << 16)
    with count_saved(model, model.named_children()) as k:
        y = model(torch.randn(1, TOKENS, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True))
    assert k.report().separate["host"] > k.report().total
    del y


@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "added"])
def test_grouped_attention_matches_repeated_heads(kind):
    torch.manual_seed(0)
    heads, groups, size = 8, 4, 64
    shapes = ((heads, size), (heads // groups, size), (heads // groups, size))
    qkv = [torch.randn(2, n, 128, d, device="cuda", dtype=torch.bfloat16) for n, d in shapes]
    tril = torch.ones(1, 1, 128, 128, device="cuda", dtype=torch.bool).tril()
    mask = {"boolean": tril, "added": torch.randn(1, 1, 128, 128, device="cuda", dtype=torch.bfloat16)}.get(kind)

    def run(function):
        leaves = [x.clone().requires_grad_() for x in qkv]
        with count_saved(nn.Identity()) as k:
            out = function(*(x * 1 for x in leaves), mask, is_causal=kind == "causal")
        out.float().square().sum().backward()
        return out.detach(), [x.grad for x in leaves], k.report().total

    def stock(q, k, v, mask, is_causal):
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)

    out, grads, total = run(grouped_attention)
    expected, theirs, extra = run(stock)
    assert torch.equal(out, expected)
    for a, b in zip(grads, theirs, strict=True):
        assert calc_diff(a.float(), b.float()) < 1e-4
    assert total <= extra - 2 * 2 * (heads - heads // groups) * 128 * size * 2 + 4096
