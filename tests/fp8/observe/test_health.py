"""Health figures in one pass: the same numbers as the figures of trust give one by one."""

import math

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8 import metrics
from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.formats import decode
from octavo.fp8.metrics import cosine, saturation, sqnr, underflow
from octavo.fp8.observe.recorder import is_watching, mute_reports

BLOCKS = ((1, 128), (128, 1), (128, 128), (-1, -1), (1, -1), (-1, 1), (32, 1))
SHAPES = ((1, 1), (5, 130), (130, 300), (2, 3, 64), (128, 128))


def inputs(shape, g):
    """Plain, half zeros, with a NaN and an infinity, all zeros."""
    x = torch.randn(shape, generator=g) * 2.0 ** torch.randint(-18, 10, (shape[-1],), generator=g)
    bad = x.clone()
    bad.view(-1)[0], bad.view(-1)[-1] = math.nan, math.inf
    bad.view(-1)[bad.numel() // 2] = 0
    return x, x * (torch.rand(shape, generator=g) > 0.5), bad, torch.zeros(shape)


def one_by_one(x, q):
    return metrics.OperandMetrics(sqnr(x, q), underflow(x, q), saturation(x, q), int(decode(q.data).isnan().sum()))


@pytest.mark.parametrize(("fmt", "kind"), [("e4m3", "fp32"), ("e4m3", "e8m0"), ("e5m2", "pow2")])
def test_operand_metrics_equal_functions(fmt, kind):
    g = torch.Generator().manual_seed(0)
    saturated = 0
    for shape in SHAPES:
        for block in BLOCKS:
            spec = cast.CastSpec(fmt, block, kind)
            for i, x in enumerate(inputs(shape, g)):
                x = x.to((torch.float32, torch.bfloat16, torch.float16)[i % 3])
                for q in (cast.quantize(x, spec), cast.quantize_with_scale(x, torch.tensor(2.0**-9), spec)):
                    found, want = metrics.operand_metrics(x, q), one_by_one(x, q)
                    assert all(a == b or (a != a and b != b) for a, b in zip(found, want, strict=True)), (found, want)
                    saturated += found.saturation > 0
    assert saturated or fmt == "e5m2"
    empty = torch.zeros(0, 4)
    assert metrics.operand_metrics(empty, cast.quantize(empty, cast.CastSpec())) == (math.inf, 0.0, 0.0, 0)


def test_operand_metrics_accept_transposed_codes():
    x = torch.randn(40, 130)
    q = cast.quantize(x, cast.CastSpec("e4m3", (128, 1)))
    turned = fp8.Quantized(q.data.t().contiguous().t(), q.scale.t().contiguous().t(), q.spec)
    assert metrics.operand_metrics(x, turned) == metrics.operand_metrics(x, q)
    assert metrics.operand_metrics(x.t().contiguous().t(), q) == metrics.operand_metrics(x, q)
    with pytest.raises(fp8.CastError, match="operand_metrics needs tensors of equal shape"):
        metrics.operand_metrics(x[:1], q)


def test_operand_is_decoded_once_for_all_collectors(monkeypatch):
    m = nn.Sequential(nn.Linear(64, 32))
    fp8.apply(m, fp8.plan(m, "blockwise"))
    calls, own = [], decode
    monkeypatch.setattr(metrics, "decode", lambda codes: calls.append(codes.shape) or own(codes))
    with fp8.health() as outer, fp8.health() as inner:
        m(torch.randn(8, 64, requires_grad=True)).square().sum().backward()
    assert len(calls) == 5  # x, w, dy, and both operands of wgrad
    assert outer.table() == inner.table()


def test_cosine_does_not_modify_arguments():
    a, b = torch.randn(9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    kept = a.clone(), b.clone()
    found = cosine(a, b)
    assert torch.equal(a, kept[0]) and torch.equal(b, kept[1])
    assert found == float((a / float(a.norm())) @ (b / float(b.norm())))


@pytest.mark.parametrize("how", ["selective", "full"])
def test_muted_backward_repeats_watched_forward(how: str):
    """Update in backward goes over the graph twice, and nobody listens the second time: what is computed again must
    still be what its forward saved."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

        def forward(self, x):
            return x + self.mlp(x)

    m = nn.Sequential(Block(), Block())
    fp8.apply(m, fp8.plan(m, "blockwise"))
    fp8.activation_checkpointing([("0", m[0]), ("1", m[1])], how)
    x = torch.randn(8, 64, requires_grad=True)
    with fp8.health() as heard:
        loss = m(x).square().mean()
        loss.backward(retain_graph=True)
        once = heard.table()
        first, x.grad = x.grad, None
        with mute_reports():
            loss.backward()
    assert torch.equal(x.grad, first)
    assert heard.table() == once
    assert not is_watching()
