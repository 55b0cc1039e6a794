"""Layers with a common input, in random use: sharing a cast does not change their results."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from octavo import fp8
from octavo.fp8.dense import inputs

SIZES = {"q_proj": 256, "k_proj": 128, "v_proj": 128}


class Attention(nn.Module):
    """q, k and v with a common input, combined so that each has a different gradient."""

    def __init__(self, k=96):
        super().__init__()
        for name, n in SIZES.items():
            setattr(self, name, nn.Linear(k, n, bias=name != "k_proj"))

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return torch.cat([q.sin(), k.cos() * v], -1)


def pair():
    """Return layers that share the cast of their input, and a copy whose layers share nothing."""
    torch.manual_seed(0)
    shared = fp8.apply(Attention(), fp8.plan(Attention(), "blockwise"))
    separate = copy.deepcopy(shared)
    for layer in separate.children():
        layer.register_forward_pre_hook(lambda *_: inputs.drop_entries())
    return shared, separate


def seeded(seed):
    return torch.randn(4, 96, generator=torch.Generator().manual_seed(seed))


def run(m, x, inner):
    """Return (output, gradient of x, gradients of the parameters) and the counts."""
    x = x.detach().clone().requires_grad_()
    m.zero_grad(set_to_none=True)
    with fp8.count_gemms() as counts:
        y = inner(m, x)
        y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in m.parameters())], counts


def assert_same(pair, x, inner):
    (actual, counts), (expected, counts2) = (run(m, x, inner) for m in pair)
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    assert counts.calls == counts2.calls and counts.flops == counts2.flops


USES = {
    "as they stand": lambda m, x: m(x),
    "one alone": lambda m, x: m.k_proj(x),
    "two": lambda m, x: torch.cat([m.q_proj(x), m.v_proj(x)], -1),
    "another order": lambda m, x: torch.cat([m.v_proj(x), m.q_proj(x), m.k_proj(x)], -1),
    "cross attention": lambda m, x: torch.cat([m.q_proj(x), m.k_proj(x * 2), m.v_proj(x * 2)], -1),
    "cross attention, shared": lambda m, x: (lambda c: torch.cat([m.q_proj(x), m.k_proj(c), m.v_proj(c)], -1))(x * 2),
    "twice": lambda m, x: torch.cat([m(x), m(x)], -1),
    "one twice": lambda m, x: torch.cat([m.q_proj(x), m.q_proj(x)], -1),
    "one not in the loss": lambda m, x: m.q_proj(x) + m.k_proj(x).detach()[:, :1] + m.v_proj(x)[:, :1],
    "half without a graph": lambda m, x: m.q_proj(x) + torch.no_grad()(m.k_proj)(x)[:, :1],
    "the same values without a graph": lambda m, x: torch.cat([m.q_proj(x), m.k_proj(x.detach())], -1),
    "a region between": lambda m, x: torch.cat(
        [m.q_proj(x), checkpoint(m.k_proj, x, use_reentrant=False), m.v_proj(x)], -1
    ),
}


@pytest.mark.parametrize("use", USES)
def test_random_uses_match_unshared_layers(use):
    both = pair()
    for seed in range(2):
        assert_same(both, seeded(seed), USES[use])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("use", USES)
def test_random_uses_in_two_recomputed_regions(use, reentrant):
    def regions(m, x):
        y = checkpoint(USES[use], m, x, use_reentrant=reentrant)
        return torch.cat([y, checkpoint(USES[use], m, x * 2, use_reentrant=reentrant)], -1)

    assert_same(pair(), seeded(0), regions)


def test_weight_edit_between_layers():
    both = pair()
    outputs = []
    with torch.no_grad():
        for m in both:
            x = seeded(0)
            q = m.q_proj(x)
            m.k_proj.weight.mul_(1.5)
            m.v_proj.bias.add_(1)
            outputs.append(torch.cat([q, m.k_proj(x), m.v_proj(x)], -1))
    assert torch.equal(*outputs)


def each(m, x):
    return [m.q_proj(x), m.k_proj(x), m.v_proj(x)]


@pytest.mark.parametrize("region", [each, lambda m, x: checkpoint(each, m, x, use_reentrant=False)])
@pytest.mark.parametrize("order", [("q_proj", "k_proj", "v_proj"), ("v_proj", "q_proj"), ("k_proj",)])
def test_separate_backward_for_each_output(order, region):
    results = []
    for m in pair():
        x = seeded(0).requires_grad_()
        with fp8.count_gemms() as counts:
            ys = dict(zip(SIZES, region(m, x), strict=True))
            for name in order:
                ys[name].square().sum().backward()
        results.append(([x.grad, *(p.grad for p in m.parameters())], counts))
    (actual, counts), (expected, counts2) = results
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    assert counts.calls == counts2.calls and counts.ran == counts2.ran


def test_only_backward_of_edited_weight_raises():
    for m in pair():
        x = seeded(0).requires_grad_()
        q, k, v = each(m, x)
        with torch.no_grad():
            m.k_proj.weight.mul_(2)
        q.sum().backward()
        v.sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            k.sum().backward()


def test_health_sees_each_layer():
    tables = []
    for m in pair():
        with fp8.health() as h:
            run(m, seeded(0), USES["as they stand"])
        tables.append(h.table())
    assert tables[0] == tables[1] and set(tables[0]) == set(SIZES)
