"""Layers of one input on a GPU: memory of torch's allocator is shared between them, and fused sisters stay fused."""

import copy

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8 import fusion
from octavo.fp8.dense import inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(256, 256) for _ in range(3))


def test_codes_are_shared_until_the_backward_and_sisters_are_fused_and_backwarded_one_by_one():
    torch.manual_seed(0)
    plain = Attention().to("cuda", torch.bfloat16)
    plain = fp8.apply(plain, fp8.plan(plain, fp8.Policy(recipe="blockwise", fuse="off")))
    twin = copy.deepcopy(plain)
    assert all(f.reason is None for f in fp8.fuse(twin))
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    assert inputs.torch_alone_writes(x)
    q = plain.q_proj(x)
    assert inputs.held_bytes() > 0
    q.sum().backward()
    assert inputs.held_bytes() == 0
    grads = []
    for m in (plain, twin):
        m.zero_grad()
        q, k = m.q_proj(x), m.k_proj(x)
        q.square().sum().backward()
        k.square().sum().backward()
        grads.append([m.q_proj.weight.grad, m.k_proj.weight.grad])
    assert fusion.fused(twin) == (("q_proj", "k_proj", "v_proj"),)
    for a, b in zip(*grads, strict=True):
        assert fp8.calc_diff(a.float(), b.float()) < 1e-5
