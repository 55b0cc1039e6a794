"""Each reduction against its formula, and what must not change it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.fp8.memory.chunked_loss import linear_cross_entropy
from octavo.train.forward import losses

B, T, V = 6, 9, 11


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] and labels [B, T] with rows of 8, 5, 3, 1, 0 and 2 loss tokens."""
    torch.manual_seed(seed)
    logits, labels = torch.randn(B, T, V), torch.randint(0, V, (B, T))
    for row, kept in enumerate((8, 5, 3, 1, 0, 2)):
        labels[row, 1 + kept :] = losses.IGNORE
    labels[:, 0] = losses.IGNORE
    return logits, labels


def step_loss(logits: Tensor, labels: Tensor, reduction: str, cut: int) -> Tensor:
    """The loss of a step whose global batch is cut into micro-batches of `cut` rows."""
    pieces = list(zip(logits.split(cut), labels.split(cut), strict=True))
    total = losses.count([part for _, part in pieces], reduction)
    parts = [
        (losses.cross_entropy(x[:, :-1], losses.targets(y)) * losses.weights(y, reduction, total)).sum()
        for x, y in pieces
    ]
    return torch.stack(parts).sum()


def by_hand(logits: Tensor, labels: Tensor) -> list[list[float]]:
    """-log softmax of every loss token, row by row, in float64."""
    logs = logits.double().log_softmax(-1)
    return [
        [-float(logs[b, t - 1, labels[b, t]]) for t in range(1, T) if labels[b, t] != losses.IGNORE] for b in range(B)
    ]


def test_token_is_the_sum_over_the_global_batch_by_its_token_count():
    logits, labels = batch()
    rows = by_hand(logits, labels)
    assert float(step_loss(logits, labels, "token", 2)) == pytest.approx(sum(map(sum, rows)) / 19, rel=1e-6)


def test_sample_is_the_mean_of_the_means_of_samples_with_a_loss_token():
    logits, labels = batch()
    means = [sum(row) / len(row) for row in by_hand(logits, labels) if row]
    assert float(step_loss(logits, labels, "sample", 3)) == pytest.approx(sum(means) / 5, rel=1e-6)


def test_microbatch_is_the_mean_of_the_micro_batches_means():
    logits, labels = batch()
    rows = by_hand(logits, labels)
    means = [(sum(rows[i]) + sum(rows[i + 1])) / (len(rows[i]) + len(rows[i + 1])) for i in (0, 2, 4)]
    assert float(step_loss(logits, labels, "microbatch", 2)) == pytest.approx(sum(means) / 3, rel=1e-6)


@pytest.mark.parametrize("reduction", ["token", "sample"])
def test_cutting_the_global_batch_otherwise_changes_nothing(reduction: str):
    logits, labels = batch()
    whole = step_loss(logits, labels, reduction, B)
    for cut in (1, 2, 3):
        assert float(step_loss(logits, labels, reduction, cut)) == pytest.approx(float(whole), rel=1e-6)


def test_microbatch_depends_on_the_cut_as_it_says():
    logits, labels = batch()
    assert float(step_loss(logits, labels, "microbatch", 1)) != pytest.approx(
        float(step_loss(logits, labels, "microbatch", 6)), rel=1e-3
    )


@pytest.mark.parametrize("reduction", losses.REDUCTIONS)
def test_a_fully_masked_batch_gives_zero_and_a_zero_gradient(reduction: str):
    logits = torch.randn(2, T, V, requires_grad=True)
    labels = torch.full((2, T), losses.IGNORE)
    loss = step_loss(logits, labels, reduction, 1)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("reduction", losses.REDUCTIONS)
def test_a_masked_row_beside_others_gives_no_nan_and_no_gradient(reduction: str):
    logits, labels = batch()
    logits.requires_grad_()
    step_loss(logits, labels, reduction, 1).backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[4].any()


def test_bf16_logits_are_judged_in_fp32():
    logits, labels = batch()
    low = logits.bfloat16()
    assert losses.cross_entropy(low[:, :-1], losses.targets(labels)).dtype == torch.float32
    assert torch.equal(
        losses.cross_entropy(low[:, :-1], losses.targets(labels)),
        losses.cross_entropy(low.float()[:, :-1], losses.targets(labels)),
    )


@pytest.mark.parametrize("smoothing, z", [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)])
def test_label_smoothing_and_z_loss_are_their_formulas(smoothing: float, z: float):
    logits, labels = batch()
    target = losses.targets(labels)
    got = losses.cross_entropy(logits[:, :-1], target, smoothing, z)
    for b in range(B):
        for t in range(T - 1):
            x = logits[b, t].double()
            lse = float(x.exp().sum().log())
            want = 0.0
            if target[b, t] != losses.IGNORE:
                want = (1 - smoothing) * (lse - float(x[target[b, t]])) + smoothing * (lse - float(x.mean()))
                want += z * lse**2
            assert float(got[b, t]) == pytest.approx(want, rel=1e-5, abs=1e-7)


def test_the_loss_without_logits_is_the_same():
    torch.manual_seed(0)
    _, labels = batch()
    hidden, weight = torch.randn(B, T, 16, requires_grad=True), torch.randn(V, 16, requires_grad=True)
    target, options = losses.targets(labels), {"label_smoothing": 0.1, "z_loss": 1e-2}
    full = losses.cross_entropy((hidden @ weight.t())[:, :-1], target, **options)
    chunked = linear_cross_entropy(hidden[:, :-1], weight, target, **options)
    torch.testing.assert_close(chunked, full, rtol=1e-5, atol=1e-5)
    share = losses.weights(labels, "sample", 5.0)
    pairs = zip(*(torch.autograd.grad((c * share).sum(), (hidden, weight)) for c in (chunked, full)), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_a_masked_token_has_no_z_loss_and_no_gradient_of_it():
    logits, labels = batch()
    logits.requires_grad_()
    loss = losses.cross_entropy(logits[:, :-1], losses.targets(labels), z_loss=1.0)
    assert not loss[4].any()
    loss.sum().backward()
    assert not logits.grad[4].any() and logits.grad[0, :8].any()


def test_an_unknown_reduction_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="loss 'mean' does not exist; there are token, sample, microbatch"):
        losses.count([torch.zeros(1, 2, dtype=torch.int64)], "mean")
