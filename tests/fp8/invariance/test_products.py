"""Products and functions of one element whose rows do not look at each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo import fp8
from octavo.fp8.invariance import ROWS, BatchInvariantMode, is_active, products, row_linear

COUNTS = (1, 2, 3, 5, 16, 17, 64, 127, 200)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.long)])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def alone_and_together(function, x: Tensor) -> int:
    """In how many rows of x the result differs from that of the rows in other numbers and places."""
    whole = function(x)
    parts = [(start, count) for count in COUNTS for start in (0, 1, 7) if start + count <= len(x)]
    return sum(int((function(x[s : s + n]) != whole[s : s + n]).any(-1).sum()) for s, n in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "n"), [(64, 128), (72, 3), (100, 1), (320, 97), (8, 64), (1024, 16)])
def test_product_row_is_batch_invariant(threads: int, dtype: torch.dtype, k: int, n: int) -> None:
    x, w, b = random(207, k, dtype=dtype), random(n, k, seed=1, dtype=dtype), random(n, seed=2, dtype=dtype)
    with BatchInvariantMode():
        for call in (
            lambda x: F.linear(x, w, b),
            lambda x: F.linear(x.unsqueeze(0), w)[0],
            lambda x: x @ w.t(),
            lambda x: torch.addmm(b, x, w.t()),
            lambda x: torch.addmm(x[:, :1].expand(-1, n), x, w.t(), alpha=0.5),
            lambda x: torch.matmul(x, w[0]).unsqueeze(1),
        ):
            assert alone_and_together(call, x) == 0
    assert torch.allclose(row_linear(x, w, b).float(), F.linear(x, w, b).float(), rtol=2e-2, atol=2e-2)


def test_rows_depend_on_each_other_outside_mode() -> None:
    """What all this is for; should a library take the difference away, this says so."""
    w = random(128, 72, seed=1)
    assert alone_and_together(lambda x: F.linear(x, w), random(207, 72)) > 0
    assert alone_and_together(F.silu, random(207, 172)) > 0


FUNCTIONS = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "method": Tensor.sigmoid,
    "module": nn.SiLU(),
    "gelu": F.gelu,
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "softplus": F.softplus,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "exp2": torch.exp2,
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "exp, sin, cos, tanh": lambda x: x.exp() + x.sin() + x.cos() + x.tanh(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementwise_result_is_independent_of_position(threads: int, name: str, dtype: torch.dtype) -> None:
    function, x = FUNCTIONS[name], 2 * random(207, 172, dtype=dtype)
    stock = function(x.double())
    with BatchInvariantMode():
        assert alone_and_together(function, x) == 0
        ours = function(x)
    assert float((ours.double() - stock).abs().max()) <= 4 * torch.finfo(dtype).eps * float(stock.abs().max())


@pytest.mark.parametrize("name", ["silu", "sigmoid", "gelu", "gelu_tanh", "softplus", "exp2"])
def test_gradients_match_torch(name: str) -> None:
    x = torch.tensor([-200.0, -3.0, 0.0, 0.1, 5.0, 90.0], requires_grad=True)
    (stock,) = torch.autograd.grad(FUNCTIONS[name](x)[:5].sum(), x)
    with BatchInvariantMode():
        y = FUNCTIONS[name](x)
    (ours,) = torch.autograd.grad(y[:5].sum(), x)
    assert torch.equal(ours, stock)


def test_gradients_of_a_padded_product() -> None:
    x, w, b = (t.requires_grad_() for t in (random(3, 5, 24), random(40, 24, seed=1), random(40, seed=2)))
    stock = torch.autograd.grad(F.linear(x, w, b).square().sum(), (x, w, b))
    with BatchInvariantMode():
        ours = torch.autograd.grad(F.linear(x, w, b).square().sum(), (x, w, b))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-4) for a, b in zip(ours, stock, strict=True))


def test_patches_are_rows() -> None:
    conv, image = nn.Conv2d(3, 16, kernel_size=4, stride=4), random(5, 3, 14, 8)
    with BatchInvariantMode(), torch.no_grad():
        whole = conv(image)
        assert torch.allclose(whole, conv._conv_forward(image, conv.weight, conv.bias), atol=1e-5)
        assert torch.equal(conv(image[2:3]), whole[2:3])
        for other in (nn.Conv2d(3, 16, 4, stride=2), nn.Conv1d(3, 3, 3, groups=3, padding=1)):
            with pytest.raises(fp8.InvarianceError, match="patches"):
                other(image if other.weight.dim() == 4 else image[..., 0])
    assert torch.allclose(whole, conv(image), atol=1e-5)


def test_rows_of_experts(threads: int) -> None:
    x, w, ends = random(50, 24), random(3, 24, 40, seed=1), torch.tensor([1, 1, 49], dtype=torch.int32)
    with BatchInvariantMode():
        y = torch._grouped_mm(x, w, offs=ends)
        assert torch.equal(y[0], torch.mm(x[:1], w[0])[0]) and torch.equal(y[1:49], torch.mm(x[1:49], w[2]))
        assert not y[49:].any()


def test_autocast_works_inside_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is tried is what is computed: rows of BF16 products, by the kernel of BF16."""
    monkeypatch.setattr(products, "_test_results", {})
    x, w, b, ends = random(50, 24), random(3, 24, 40, seed=1), random(40, seed=2), torch.tensor([1, 1, 50]).int()
    for call in (
        lambda: torch.mm(x, w[0]),
        lambda: torch.addmm(b, x, w[0]),
        lambda: F.linear(x, w[0].t(), b),
        lambda: torch._grouped_mm(x, w, offs=ends),
    ):
        products._test_results.clear()
        with torch.autocast("cpu", torch.bfloat16):
            stock = call()
            with BatchInvariantMode():
                ours = call()
        assert ours.dtype == stock.dtype and {key[0] for key in products._test_results} == {stock.dtype}
        torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: random(2, 3, 4) @ random(2, 4, 5), "sdpa"),
        (lambda: torch.einsum("bij,bjk->bik", random(2, 3, 4), random(2, 4, 5)), "einsum"),
        (lambda: torch.baddbmm(random(2, 3, 5), random(2, 3, 4), random(2, 4, 5)), "baddbmm"),
        (lambda: F.scaled_dot_product_attention(*[random(1, 2, 3, 4)] * 3, dropout_p=0.1), "attention_dropout"),
        (lambda: F.dropout(random(3), 0.2), "drops 0.2"),
    ],
)
def test_row_dependent_functions_are_rejected_by_name(call, said: str) -> None:
    with BatchInvariantMode(), pytest.raises(fp8.InvarianceError, match=said):
        call()


def test_product_of_one_term_is_supported() -> None:
    a, b = random(2, 3, 1), random(2, 1, 5)
    with BatchInvariantMode():
        assert torch.equal(a @ b, a * b)


def test_recomputed_forward_has_same_bits() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.seen = nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 24)), []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append((is_active(), self.mlp(x).detach()))
            return self.mlp(x)

    block = Block()
    fp8.activation_checkpointing([("block", block)], "full")
    with BatchInvariantMode():
        y = block(random(3, 24).requires_grad_())
    y.sum().backward()
    (first, before), (second, after) = block.seen
    assert first and second and torch.equal(before, after) and not is_active()


def test_row_dependent_library_runs_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one for which that is not enough is refused."""
    stock, calls = torch.mm, []

    def counting(a: Tensor, b: Tensor) -> Tensor:
        calls.append(len(a))
        return stock(a, b) * (1 + 1e-3 * len(a))

    x, w = random(40, 24), random(24, 32, seed=1)
    monkeypatch.setattr(products, "_test_results", {})
    monkeypatch.setattr(products.torch, "mm", counting)
    y = products.mm(x, w)
    assert set(calls[-3:]) == {ROWS} and torch.equal(y[5:6], products.mm(x[5:6], w))
    monkeypatch.setattr(products, "_test_results", {})
    monkeypatch.setattr(products.torch, "mm", lambda a, b: stock(a, b) + torch.arange(len(a))[:, None])
    with pytest.raises(fp8.InvarianceError, match="depend on its position"):
        products.mm(x, w)


@pytest.mark.parametrize("size", [4100, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_are_equal_with_and_without_logits(threads: int, dtype: torch.dtype, size: int) -> None:
    """4100 leaves a block of 4 columns over."""
    h, w = random(300, 48, dtype=dtype), random(size, 48, seed=1, dtype=dtype)
    target = torch.randint(0, size, (300,), generator=torch.Generator().manual_seed(2))
    with BatchInvariantMode():
        without = fp8.token_log_probs(h, w, target, temperature=0.7, entropy=True)
        for start, count in ((0, 300), (3, 1), (10, 5)):
            part = slice(start, start + count)
            logits = F.linear(h[part], w)
            there = fp8.log_probs(logits, target[part], temperature=0.7, entropy=True)
            assert all(torch.equal(a[part], b) for a, b in zip(without, there, strict=True))
    stock = (F.linear(h, w).float() / 0.7).log_softmax(-1)
    assert torch.allclose(without[0], stock.gather(1, target[:, None])[:, 0], atol=1e-4)
    assert torch.allclose(without[1], -(stock.exp() * stock).sum(-1), atol=1e-4)


def test_gradients_of_log_probabilities_of_logits() -> None:
    x, target = random(3, 5, 300).requires_grad_(), torch.tensor([[0, 299, -100, 7, 8]] * 3)
    stock = (x / 1.3).log_softmax(-1)
    known = target != -100
    at = stock.gather(2, target.clamp(min=0)[..., None])[..., 0].where(known, 0)
    entropy = -(stock.exp() * stock).sum(-1).where(known, 0)
    ours = fp8.log_probs(x, target, temperature=1.3, entropy=True)
    weights = random(2, 3, 5, seed=1)
    given = [torch.autograd.grad((a * weights[0] + b * weights[1]).sum(), x)[0] for a, b in ((at, entropy), ours)]
    assert torch.allclose(ours[0], at, atol=1e-5) and torch.allclose(ours[1], entropy, atol=1e-5)
    assert torch.allclose(*given, atol=1e-5) and not given[1][:, 2].any()
    with pytest.raises(ValueError, match="temperature"):
        fp8.log_probs(x, target, temperature=0.0)
    with pytest.raises(ValueError, match="pass one per row"):
        fp8.log_probs(x, target[:2])
