"""What stands in for torch's sums, norms and softmax of rows where a device has kernels: the same values, dtypes and
gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from octavo import fp8
from octavo.fp8.invariance import BatchInvariantMode
from octavo.fp8.kernels.triton_kernels.launch import INTERPRETED, launches

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="tests/gpu holds the compiled kernels to the same"),
    pytest.mark.usefixtures("row_kernels"),
]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


W, B = random(12, seed=1), random(12, seed=2)
FUNCTIONS = {
    "sum": (1, lambda x: x.sum(1)),
    "sum of two dimensions": (1, lambda x: torch.sum(x, dim=(-1, 0), keepdim=True)),
    "mean": (1, lambda x: x.pow(2).mean(-1, keepdim=True)),
    "mean, wider": (1, lambda x: torch.mean(x, dim=1, dtype=torch.float64)),
    "softmax": (1, lambda x: F.softmax(x, dim=-1, dtype=torch.float32)),
    "softmax of columns": (1, lambda x: x.softmax(1)),
    "log_softmax": (1, lambda x: torch.log_softmax(x, -1)),
    "logsumexp": (1, lambda x: x.logsumexp(1)),
    "logsumexp, kept": (1, lambda x: torch.logsumexp(x, (-1,), keepdim=True)),
    "rms_norm": (1, lambda x: F.rms_norm(x, (12,), W.to(x), 1e-3)),
    "rms_norm, plain": (1, lambda x: torch.rms_norm(x, (12,))),
    "layer_norm": (2, lambda x: F.layer_norm(x, (12,), W.to(x), B.to(x))),
    "layer_norm without a bias": (2, lambda x: F.layer_norm(x, (5, 12), None, None, 1e-3)),
    "topk": (0, lambda x: torch.topk(x, 3, dim=-1).values),
    "smallest": (0, lambda x: x.topk(2, 1, largest=False).values),
    "outer product": (0, lambda x: x[..., :1] @ x[:, :1]),
}
"""Name -> (launches that it takes, the function)."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_dtypes_and_gradients_match_torch(name: str) -> None:
    count, function = FUNCTIONS[name]
    for dtype, autocast in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        x = random(3, 5, 12, dtype=dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            stock = function(x)
            with BatchInvariantMode():
                with launches() as seen:
                    ours = function(x)
        assert seen["sums_kernel"] == count and ours.dtype == stock.dtype
        dy = random(*stock.shape, seed=3).to(stock.dtype)
        there, here = (torch.autograd.grad(y, x, dy)[0] for y in (stock, ours))
        tight = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
        torch.testing.assert_close(ours, stock, **tight)
        torch.testing.assert_close(here, there, **tight)


def test_weights_of_norms_get_gradients() -> None:
    for norm in (lambda x, w, b: F.layer_norm(x, (12,), w, b), lambda x, w, b: F.rms_norm(x, (12,), w) + b):
        given = [t.clone().requires_grad_() for t in (random(4, 12), W, B)]
        stock = torch.autograd.grad(norm(*given).square().sum(), given)
        with BatchInvariantMode():
            ours = torch.autograd.grad(norm(*given).square().sum(), given)
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, stock, strict=True))


def test_full_integer_and_empty_sums_use_torch() -> None:
    with BatchInvariantMode(), launches() as seen:
        assert random(3, 4).sum() == random(3, 4).sum() and int((random(3, 4) > 0).sum(1).sum()) >= 0
        assert random(3, 0).sum(1).tolist() == [0, 0, 0] and random(0, 3).softmax(-1).shape == (0, 3)
        assert torch.ones(3, dtype=torch.bool).sum() == 3
    assert not seen


def test_topk_selects_equal_values_by_position() -> None:
    with BatchInvariantMode():
        assert torch.topk(torch.ones(3, 500), 2).indices.tolist() == [[0, 1]] * 3


def test_products_have_gradients() -> None:
    x, w, b = (t.requires_grad_() for t in (random(2, 5, 12), random(7, 12, seed=1), random(7, seed=2)))
    for call in (
        lambda: F.linear(x, w, b),
        lambda: torch.addmm(b, x.flatten(0, 1), w.t(), beta=0.5, alpha=2),
        lambda: torch.addmm(b.expand(10, 7), x.flatten(0, 1), w.t()),
        lambda: (x @ w.t()) + b,
    ):
        stock = torch.autograd.grad(call().square().sum(), (x, w, b))
        with BatchInvariantMode():
            ours = torch.autograd.grad(call().square().sum(), (x, w, b))
        assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-3) for one, other in zip(ours, stock, strict=True))


def test_weights_of_codes_are_decoded() -> None:
    x, codes = random(3, 64), fp8.freeze_weight(random(32, 64, seed=1), "block")
    with BatchInvariantMode():
        ours = F.linear(x, codes)
    assert type(ours) is Tensor and torch.allclose(ours, F.linear(x, codes), atol=1e-4)


def test_rows_of_experts_have_gradients() -> None:
    """The second has none; the last row is nobody's."""
    x, w = random(9, 12).requires_grad_(), random(3, 12, 8, seed=1).requires_grad_()
    ends = torch.tensor([2, 2, 8]).int()
    stock = torch.cat([x[:2] @ w[0], x[2:8] @ w[2], x.new_zeros(1, 8)])
    with BatchInvariantMode():
        ours = torch._grouped_mm(x, w, offs=ends)
    assert torch.allclose(ours, stock, atol=1e-5)
    found = [torch.autograd.grad(y.square().sum(), (x, w)) for y in (stock, ours)]
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: x.std(-1), "calls std on cpu.*order on a GPU"),
        (lambda x: F.normalize(x), "normalize"),
        (lambda x: torch.logsumexp(x, (0, 1)), r"logsumexp over dimensions \(0, 1\)"),
        (lambda x: F.softmax(x), "softmax over dimensions None"),
    ],
)
def test_functions_without_replacement_are_rejected_by_name(call, said: str) -> None:
    with BatchInvariantMode(), pytest.raises(fp8.InvarianceError, match=said):
        call(random(3, 4))
