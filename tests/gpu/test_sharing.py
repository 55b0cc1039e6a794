"""Sharing of codes between layers with a common input on a GPU."""

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.dense import inputs
from tests.fp8.remembered import held_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(256, 256) for _ in range(3))


def test_codes_are_shared_until_the_backward():
    torch.manual_seed(0)
    m = Attention().to("cuda", torch.bfloat16)
    fp8.apply(m, fp8.plan(m, "blockwise"))
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    assert inputs.is_written_only_by_torch(x)
    q = m.q_proj(x)
    saved = held_bytes()
    k = m.k_proj(x)
    assert held_bytes() == saved > 0
    q.sum().backward()
    assert held_bytes() == 0
    k.sum().backward()
    assert m.k_proj.weight.grad is not None and m.v_proj.weight.grad is None
