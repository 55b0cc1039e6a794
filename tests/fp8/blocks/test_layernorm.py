"""Norms that save FP8 codes of their input: the stock forward, close gradients, and saved tensors."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from octavo import fp8
from octavo.fp8.blocks import layernorm
from octavo.fp8.dense.swap import unswap
from octavo.fp8.memory.accounting import count_saved

KINDS = {
    "rms": lambda k: Qwen3RMSNorm(k),
    "torch rms": lambda k: nn.RMSNorm(k, eps=1e-6),
    "layer": lambda k: nn.LayerNorm(k),
    "no bias": lambda k: nn.LayerNorm(k, bias=False),
    "no affine": lambda k: nn.LayerNorm(k, elementwise_affine=False),
}


def pair(kind, k=96, dtype=torch.float32):
    torch.manual_seed(0)
    norm = KINDS[kind](k).to(dtype)
    with torch.no_grad():
        for p in norm.parameters():
            p.copy_(torch.randn(p.shape) + 1)
    twin = copy.deepcopy(norm)
    assert layernorm.is_norm(norm) and layernorm.save_as_codes(twin) is None
    return norm, twin


def make_input(shape, dtype, outliers=False):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 0.3
    if outliers:
        x[..., 3] *= 60
        x = x * 2.0 ** torch.arange(x.shape[-2]).remainder(9).unsqueeze(-1)
    return x.to(dtype)


def run(norm, x, lowered=False, inner=None):
    x = x.detach().clone().requires_grad_()
    norm.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
        y = norm(x) if inner is None else inner(norm, x)
    (y.float() * torch.randn(y.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return y.detach(), x.grad, [p.grad for p in norm.parameters()]


def flat(found):
    return [*found[:2], *found[2]]


def cosine(a, b):
    return torch.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "autocast", "autocast of bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients(kind, dtype, outliers):
    """The output equals the stock module's; gradients are those of an input with three mantissa bits."""
    lowered = isinstance(dtype, str)
    saved = torch.float32 if lowered else dtype
    norm, twin = pair(kind, dtype=saved)
    x = make_input((3, 40, 96), torch.bfloat16 if dtype == "autocast of bf16" else saved, outliers)
    (y, dx, dps), (y2, dx2, dps2) = (run(m, x, lowered) for m in (norm, twin))
    assert y2.dtype == y.dtype and dx2.dtype == dx.dtype and [p.dtype for p in dps2] == [p.dtype for p in dps]
    eps = max(2 * torch.finfo(x.dtype).eps, 2e-6)  # the stock RMSNorm rounds twice
    torch.testing.assert_close(y2.float(), y.float(), rtol=eps, atol=eps)
    assert cosine(dx, dx2) > 0.995 and all(cosine(a, b) > 0.995 for a, b in zip(dps, dps2, strict=True))
    assert not torch.equal(dx, dx2)


@pytest.mark.parametrize("k", [32, 72, 80, 128, 200])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_head_norms_save_only_codes_and_statistics(kind, k):
    norm, twin = pair(kind, k, torch.bfloat16)
    x = make_input((2, 16, 6, k), torch.bfloat16)
    x = x.transpose(1, 2).contiguous().transpose(1, 2)  # as a view of other layers' outputs may lie
    model, leaf = nn.Sequential(twin), x.detach().requires_grad_()
    with count_saved(model) as accountant:
        y = model(leaf)
    rows = [r for r in accountant.report().rows if r.kind == "activation"]
    blocks, stats = -(-k // 128), 2 if kind == "layer" else 1
    assert sum(r.bytes for r in rows) == 2 * 16 * 6 * (k + 4 * blocks + 4 * stats)
    del y
    assert cosine(run(norm, x)[1], run(twin, x)[1]) > 0.995


def test_gradients_are_exact_for_decoded_input():
    """With an input that is exact in FP8, all gradients equal the stock module's."""
    x = torch.randint(-7, 8, (2, 9, 256)).float()
    x[..., ::128] = 7.0  # the scale is a power of two in any case
    for kind in ("rms", "layer", "no bias", "no affine"):
        norm, twin = pair(kind, 256)
        for a, b in zip(flat(run(norm, x)), flat(run(twin, x)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_only_required_gradients_are_computed(kind):
    norm, twin = pair(kind)
    x = make_input((4, 96), torch.float32)
    for m in (norm, twin):
        m.requires_grad_(False)
    assert cosine(run(norm, x)[1], run(twin, x)[1]) > 0.995
    for m in (norm, twin):
        m.requires_grad_(True)
    for m in (norm, twin):
        m.zero_grad()
        m(x).square().sum().backward()
    assert cosine(norm.weight.grad, twin.weight.grad) > 0.995
    with torch.no_grad(), count_saved(nn.Sequential(twin)) as accountant:
        y = twin(x)
    assert y.grad_fn is None and {r.dtype for r in accountant.report().rows} <= {torch.float32}


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_two_backwards_checkpoints_and_bad_values(kind):
    _, twin = pair(kind)
    x = make_input((8, 96), torch.float32).requires_grad_()
    loss = twin(x).square().sum()
    one, two = torch.autograd.grad(loss, x, retain_graph=True)[0], torch.autograd.grad(loss, x)[0]
    assert torch.equal(one, two)
    for reentrant in (False, True):
        again = run(twin, x, inner=lambda m, x, r=reentrant: checkpoint(m, x, use_reentrant=r))
        plain = run(twin, x)
        assert all(torch.equal(a, b) for a, b in zip(flat(again), flat(plain), strict=True))
    for bad in (float("nan"), float("inf")):
        x = make_input((2, 300), torch.float32)
        x[0, 7] = bad
        _, wide = pair(kind, 300)
        y, dx, dps = run(wide, x)
        assert not y[0].isfinite().all() and dx[0].isnan().any() and dps[0].isnan().any()
        assert y[1].isfinite().all() and dx[1].isfinite().all()


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_unsupported_inputs_run_stock_forward(kind):
    norm, twin = pair(kind)
    for x in (make_input((4, 96), torch.float64), torch.zeros(0, 96), torch.zeros(3, 96, device="meta")):
        saved = [copy.deepcopy(m).to(x.dtype).to(x.device) for m in (norm, twin)]
        ys = [m(x.clone().requires_grad_()) for m in saved]
        assert ys[0].shape == ys[1].shape and ys[0].dtype == ys[1].dtype
        assert x.is_meta or torch.equal(*ys)
    x = make_input((4, 96), torch.float32)
    compiled = torch.compile(twin, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), norm(x))
    with fp8.high_precision(twin):
        assert type(twin) is type(norm) and torch.equal(run(twin, x)[1], run(norm, x)[1])
    assert type(twin) is not type(norm) and not torch.equal(run(twin, x)[1], run(norm, x)[1])


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_copy_pickle_and_unswap(kind):
    norm, twin = pair(kind)
    x = make_input((4, 96), torch.float32)
    assert isinstance(twin, type(norm)) and twin.state_dict().keys() == norm.state_dict().keys()
    for other in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert type(other) is type(twin) and torch.equal(run(other, x)[1], run(twin, x)[1])
    unswap(twin)
    assert type(twin) is type(norm) and torch.equal(run(twin, x)[1], run(norm, x)[1])


def test_unsupported_norms_give_reason():
    class Own(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) + 1

    hooked = nn.LayerNorm(8)
    hooked.forward = hooked.forward
    for norm, word in (
        (Gemma2RMSNorm(96), "1 + weight"),
        (nn.LayerNorm((4, 8)), "2 dimensions"),
        (Own(8), "overrides the forward of LayerNorm"),
        (hooked, "replaced on the instance"),
        (nn.LayerNorm(8).double(), "float64"),
        (nn.RMSNorm(8), "has no float attribute"),
    ):
        reason = layernorm.save_as_codes(norm)
        assert reason is not None and word in reason, reason
        assert "Fp8" not in type(norm).__name__
    assert layernorm.save_as_codes(pair("layer")[1]) == layernorm.save_as_codes(pair("rms")[1]) == "it is already fused"
    assert not layernorm.is_norm(nn.BatchNorm1d(8)) and not layernorm.is_norm(nn.GroupNorm(2, 8))
    assert not layernorm.is_norm(nn.Linear(8, 8))
