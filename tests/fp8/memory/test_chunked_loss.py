"""Linear + cross-entropy without logits: equal to the plain loss, values and gradients, and never a tensor [M, V]."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.fp8.memory.chunked_loss import linear_cross_entropy, token_log_probs

IGNORE = -100


def problem(m=19, k=24, v=101, dtype=torch.float32, bias=False, seed=0, ignored=5):
    """(hidden [m, k], weight [v, k], target [m], bias), logits of some size, some targets ignored."""
    g = torch.Generator().manual_seed(seed)
    hidden = (2 * torch.randn(m, k, generator=g)).to(dtype).requires_grad_()
    weight = (0.5 * torch.randn(v, k, generator=g)).to(dtype).requires_grad_()
    target = torch.randint(0, v, (m,), generator=g)
    target[torch.randperm(m, generator=g)[:ignored]] = IGNORE
    return hidden, weight, target, torch.randn(v, generator=g).to(dtype).requires_grad_() if bias else None


def plain(hidden, weight, target, bias=None, smoothing=0.0, z=0.0):
    """The formulas on full logits: log-softmax, its mean over the classes, log Z."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logs = logits.log_softmax(-1)
    at = logs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    loss = -(1 - smoothing) * at + z * logits.logsumexp(-1) ** 2
    loss = loss - smoothing * logs.mean(-1) if smoothing else loss
    return torch.where(target == IGNORE, 0.0, loss)


def gradients(loss: Tensor, inputs, seed=1):
    """Gradients under a different weight for every token."""
    each = torch.rand(loss.shape, generator=torch.Generator().manual_seed(seed), dtype=loss.dtype)
    return torch.autograd.grad((loss * each).sum(), [t for t in inputs if t is not None], retain_graph=True)


def relative_error(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


class Largest(TorchDispatchMode):
    """The most elements that any tensor had which an operator returned."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.most = max(self.most, t.numel())
        return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smoothing, z", [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.3, 1e-3), (1.0, 0.0)])
@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_values_and_gradients_match_plain_formulas(bias: bool, smoothing: float, z: float, chunk):
    hidden, weight, target, b = problem(bias=bias)
    ours = linear_cross_entropy(hidden, weight, target, b, label_smoothing=smoothing, z_loss=z, chunk=chunk)
    full = plain(hidden, weight, target, b, smoothing, z)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, full, rtol=2e-6, atol=4e-6)
    for got, want in zip(gradients(ours, (hidden, weight, b)), gradients(full, (hidden, weight, b)), strict=True):
        assert relative_error(got, want) < 2e-6


def test_loss_matches_torch_cross_entropy():
    hidden, weight, target, _ = problem()
    want = F.cross_entropy(F.linear(hidden, weight), target, reduction="none", label_smoothing=0.2)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, target, label_smoothing=0.2), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary_of_152k(dtype: torch.dtype):
    hidden, weight, target, _ = problem(m=24, k=16, v=151_936, dtype=dtype, ignored=7)
    ours, full = linear_cross_entropy(hidden, weight, target, chunk=3), plain(hidden, weight, target)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    true_loss = plain(*exact, target)
    # torch's own sum of 152k terms is off by up to 2e-6 in fp32, with the width of the CPU.
    assert relative_error(ours, true_loss) <= min(1.02 * relative_error(full, true_loss) + 1e-7, 1e-3)
    if dtype == torch.float32:
        torch.testing.assert_close(ours.double(), true_loss, rtol=1e-6, atol=1e-6)
    true = gradients(true_loss, exact)
    for got, low, want in zip(gradients(ours, (hidden, weight)), gradients(full, (hidden, weight)), true, strict=True):
        assert relative_error(got, want) <= 1.02 * relative_error(low, want) + 1e-7
        if dtype == torch.float32:
            assert relative_error(got, low) <= 1e-6 + 2 * relative_error(low, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_error_in_16_bits_is_at_most_that_of_plain_path(dtype: torch.dtype, seed: int):
    hidden, weight, target, b = problem(m=64, k=48, v=3001, dtype=dtype, bias=True, seed=seed)
    ours, full = linear_cross_entropy(hidden, weight, target, b, chunk=5), plain(hidden, weight, target, b)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, b)]
    true_loss = plain(*exact[:2], target, exact[2])
    assert relative_error(ours, true_loss) <= 1.01 * relative_error(full, true_loss)
    given = (hidden, weight, b)
    for got, low, want in zip(gradients(ours, given), gradients(full, given), gradients(true_loss, exact), strict=True):
        assert got.dtype == dtype
        assert relative_error(got, want) <= 1.02 * relative_error(low, want)


def test_no_tensor_has_size_of_logits():
    hidden, weight, target, _ = problem(m=1024, k=8, v=8000, ignored=100)
    for chunk, most in ((None, 2**21), (64, 64 * 8000)):
        with Largest() as seen:
            linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, chunk=chunk).sum().backward()
        assert seen.most <= 1.1 * most < hidden.shape[0] * weight.shape[0] / 3
    with Largest() as seen:
        plain(hidden, weight, target).sum().backward()
    assert seen.most == hidden.shape[0] * weight.shape[0]


def test_gradients_against_finite_differences():
    hidden, weight, target, b = problem(m=5, k=4, v=9, dtype=torch.float64, bias=True, ignored=1)

    def loss(h, w, c):
        return linear_cross_entropy(h, w, target, c, label_smoothing=0.1, z_loss=0.01, chunk=2)

    def logs(h, w, c):
        return token_log_probs(h, w, target, c, temperature=0.7, entropy=True, chunk=2)

    assert torch.autograd.gradcheck(loss, (hidden, weight, b))
    assert torch.autograd.gradcheck(logs, (hidden, weight, b))


@pytest.mark.parametrize("ignored", [0, 18, 19])
def test_any_number_of_ignored_tokens(ignored: int):
    hidden, weight, target, _ = problem(ignored=ignored)
    ours, full = linear_cross_entropy(hidden, weight, target, z_loss=0.1), plain(hidden, weight, target, z=0.1)
    torch.testing.assert_close(ours, full, rtol=2e-6, atol=4e-6)
    for got, want in zip(gradients(ours, (hidden, weight)), gradients(full, (hidden, weight)), strict=True):
        assert got.isfinite().all() and relative_error(got, want) < 2e-6
    if ignored == 19:
        assert not ours.any() and not got.any()


def test_ignored_tokens_are_skipped(monkeypatch: pytest.MonkeyPatch):
    rows = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *more: rows.append(len(x)) or linear(x, *more))
    hidden, weight, target, _ = problem(ignored=14)
    linear_cross_entropy(hidden, weight, target).sum().backward()
    assert set(rows) == {5}


def test_targets_on_device_give_equal_losses(monkeypatch: pytest.MonkeyPatch):
    """The way of targets on a GPU: rows without a target run along, and give and get nothing."""
    from octavo.fp8.memory import chunked_loss as logits

    hidden, weight, target, _ = problem()
    want = linear_cross_entropy(hidden, weight, target, z_loss=0.1)

    def all_rows(h, w, t, b, ignore):
        return logits._Tokens(h, t, None, t != ignore, t.shape)

    monkeypatch.setattr(logits, "_select_tokens", all_rows)
    got = linear_cross_entropy(hidden, weight, target, z_loss=0.1)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    for a, b in zip(gradients(got, (hidden, weight)), gradients(want, (hidden, weight)), strict=True):
        assert relative_error(a, b) < 1e-6
    assert not gradients(got, (hidden,))[0][target == IGNORE].any()
    target[0] = 101
    assert linear_cross_entropy(hidden, weight, target)[0].isnan()


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0), (3, 4), (2, 2, 3), ()])
def test_leading_dimensions_and_no_tokens(shape: tuple[int, ...]):
    torch.manual_seed(0)
    hidden, weight = torch.randn(*shape, 8, requires_grad=True), torch.randn(33, 8, requires_grad=True)
    target = torch.randint(0, 33, shape)
    loss = linear_cross_entropy(hidden, weight, target)
    assert loss.shape == shape
    torch.testing.assert_close(loss, plain(hidden, weight, target))
    loss.sum().backward()
    assert hidden.grad.shape == hidden.shape and weight.grad.isfinite().all()


def test_strided_hidden_states_and_weights():
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 5, 8).transpose(0, 1), torch.randn(8, 33).t()
    target = torch.randint(0, 33, (5, 6))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    ours, full = linear_cross_entropy(hidden, weight, target), plain(hidden, weight, target)
    torch.testing.assert_close(ours, full)
    for got, want in zip(gradients(ours, (hidden, weight)), gradients(full, (hidden, weight)), strict=True):
        assert relative_error(got, want) < 2e-6


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["hidden", "weight"])
def test_nonfinite_values_propagate_to_loss(bad: float, where: str):
    hidden, weight, target, _ = problem(ignored=0)
    with torch.no_grad():
        (hidden if where == "hidden" else weight)[3, 2] = bad
    loss = linear_cross_entropy(hidden, weight, target, chunk=3)
    assert not (loss[3] if where == "hidden" else loss.sum()).isfinite()
    if where == "hidden":
        assert loss[:3].isfinite().all() and loss[4:].isfinite().all()


def test_bias_of_minus_infinity_excludes_classes():
    hidden, weight, target, b = problem(bias=True)
    with torch.no_grad():
        b[60:] = -torch.inf  # whole blocks of it
    target[target >= 60] = 0
    ours, full = linear_cross_entropy(hidden, weight, target, b, chunk=1), plain(hidden, weight, target, b)
    torch.testing.assert_close(ours, full, rtol=2e-6, atol=4e-6)
    logs, entropy = token_log_probs(hidden, weight, target, b, entropy=True, chunk=1)
    assert logs.isfinite().all() and entropy.isfinite().all()
    grads = gradients(ours + entropy, (hidden, weight, b))
    assert all(g.isfinite().all() for g in grads) and not grads[1][60:].any()


def test_large_logits_do_not_overflow():
    hidden, weight, target, _ = problem()
    big = 1e4 * hidden.detach()
    torch.testing.assert_close(
        linear_cross_entropy(big, weight, target, chunk=2), plain(big, weight, target), rtol=1e-5, atol=0.1
    )


def test_backward_runs_twice_with_retained_graph():
    hidden, weight, target, _ = problem()
    loss = linear_cross_entropy(hidden, weight, target).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_frozen_head_allocates_no_gradient():
    hidden, weight, target, _ = problem(m=4, k=256, v=4000, ignored=0)
    want = torch.autograd.grad(linear_cross_entropy(hidden, weight, target, chunk=1).sum(), hidden)[0]
    weight.requires_grad_(False)
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, target, chunk=1).sum().backward()
    assert weight.grad is None and torch.equal(hidden.grad, want)
    assert seen.most < weight.numel() / 2


def test_hidden_states_without_gradient_get_none():
    hidden, weight, target, _ = problem()
    want = torch.autograd.grad(linear_cross_entropy(hidden, weight, target).sum(), weight)[0]
    hidden.requires_grad_(False)
    linear_cross_entropy(hidden, weight, target).sum().backward()
    assert hidden.grad is None and torch.equal(weight.grad, want)


def test_only_hidden_states_and_lse_are_saved():
    hidden, weight, target, _ = problem(m=64, v=999, ignored=0)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear_cross_entropy(hidden, weight, target, label_smoothing=0.1)
    sizes = {t.data_ptr(): t.numel() for t in saved}
    assert sum(sizes.values()) <= weight.numel() + hidden.numel() + 3 * len(target)


def test_autocast_casts_like_linear_layer():
    hidden, weight, target, b = problem(v=601, bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, target, b, chunk=2)
        full = plain(hidden, weight, target, b)
    torch.testing.assert_close(ours, full, rtol=1e-6, atol=1e-5)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, b)]
    true = gradients(plain(*exact[:2], target, exact[2]), exact)
    given = (hidden, weight, b)
    for got, low, want in zip(gradients(ours, given), gradients(full, given), true, strict=True):
        assert got.dtype == torch.float32
        assert relative_error(got, want) <= 1.02 * relative_error(low, want)


def test_tied_weights_add_to_embedding_gradient():
    torch.manual_seed(0)
    table, ids = nn.Embedding(77, 16), torch.randint(0, 77, (3, 9))
    target = torch.randint(0, 77, (3, 9))

    def grad(loss):
        table.weight.grad = None
        loss(table(ids).tanh(), table.weight, target).sum().backward()
        return table.weight.grad

    assert relative_error(grad(linear_cross_entropy), grad(plain)) < 2e-6


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [None, 2])
def test_log_probabilities_and_entropies(temperature: float, chunk):
    hidden, weight, target, b = problem(bias=True)
    dist = torch.distributions.Categorical(logits=F.linear(hidden, weight, b) / temperature)
    known = target != IGNORE
    want = torch.where(known, dist.log_prob(target.clamp(min=0)), 0.0)
    want_entropy = torch.where(known, dist.entropy(), 0.0)
    logs, entropy = token_log_probs(hidden, weight, target, b, temperature=temperature, entropy=True, chunk=chunk)
    alone = token_log_probs(hidden, weight, target, b, temperature=temperature, chunk=chunk)
    torch.testing.assert_close(logs, want, rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(entropy, want_entropy, rtol=2e-6, atol=1e-5)
    assert torch.equal(logs, alone)
    given = (hidden, weight, b)
    for value, reference in ((logs, want), (entropy, want_entropy), (alone, want)):
        for got, should in zip(gradients(value, given), gradients(reference, given), strict=True):
            assert relative_error(got, should) < 2e-5


def test_log_probabilities_are_minus_the_loss():
    hidden, weight, target, _ = problem()
    assert torch.equal(token_log_probs(hidden, weight, target), -linear_cross_entropy(hidden, weight, target))


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"target": torch.zeros(18, dtype=torch.int64)}, ValueError, r"targets \[18\] and hidden .* do not match"),
        ({"target": torch.zeros(19, dtype=torch.int32)}, TypeError, "use torch.int64"),
        ({"target": torch.full((19,), 101)}, IndexError, "from 101 to 101, but the head has 101 classes"),
        ({"target": torch.full((19,), -1)}, IndexError, "marked with -100"),
        ({"hidden": torch.zeros(19, 23)}, ValueError, "do not match"),
        ({"hidden": torch.zeros(19, 24, dtype=torch.bfloat16)}, TypeError, "or run under autocast"),
        ({"bias": torch.zeros(100)}, ValueError, r"bias \[100\]"),
        ({"label_smoothing": 1.5}, ValueError, "use 0 to 1"),
        ({"z_loss": -1.0}, ValueError, "use 0 or more"),
        ({"chunk": 0}, ValueError, "chunk is 0"),
        (
            {"hidden": torch.zeros(19, 24, dtype=torch.complex64), "weight": torch.zeros(9, 24) + 0j},
            TypeError,
            "floating",
        ),
        (
            {"hidden": torch.zeros(19, 24).long(), "weight": torch.zeros(9, 24).long()},
            TypeError,
            "a floating-point dtype",
        ),
        ({"weight": torch.zeros(0, 24), "target": torch.full((19,), IGNORE)}, ValueError, "has no classes"),
    ],
)
def test_invalid_arguments_are_rejected_with_fix(change, error, words: str):
    hidden, weight, target, _ = problem()
    with pytest.raises(error, match=words):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "target": target, **change})


def test_zero_temperature_is_rejected():
    with pytest.raises(ValueError, match="use a number above 0"):
        token_log_probs(*problem()[:3], temperature=0.0)


def test_torch_func_transforms_are_rejected():
    hidden, weight, target, _ = problem()
    with pytest.raises(RuntimeError, match="use leading dimensions in place of vmap"):
        torch.vmap(lambda h: linear_cross_entropy(h, weight, target))(hidden.detach().expand(2, -1, -1))
