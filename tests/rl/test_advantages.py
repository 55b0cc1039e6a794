"""Advantages against loops, and penalties and KL estimators against exact sums."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.rl.objectives.advantages import ADVANTAGES, EPS, informative, leave_one_out
from octavo.rl.objectives.penalties import kl, overlong_penalty
from octavo.rl.objectives.policy_losses import Batch, Clip, Counts, grpo, policy_loss
from tests.rl.batches import close, leaf

ALL_ADVANTAGES = pytest.mark.parametrize("name", list(ADVANTAGES))
GROUPS = st.lists(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=1, max_size=4
)  # completions of some prompts


@ALL_ADVANTAGES
@settings(max_examples=30, deadline=None)
@given(groups=GROUPS)
def test_advantages_match_loops(name: str, groups: list[list[float]]) -> None:
    computed = ADVANTAGES[name](torch.tensor(groups))
    flat = [r for group in groups for r in group]
    for group, row in zip(groups, computed.tolist(), strict=True):
        scale = {"group": stdev(group), "batch": stdev(flat)}.get(name)
        for i, r in enumerate(group):
            if len(set(group)) == 1:
                assert row[i] == 0.0
            elif name == "leave_one_out":
                assert row[i] == pytest.approx(r - fmean(group[:i] + group[i + 1 :]), rel=1e-5, abs=1e-5)
            else:
                expected = (r - fmean(group)) / (1.0 if scale is None else scale + EPS)
                assert row[i] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert informative(torch.tensor(groups)).tolist() == [len(set(group)) > 1 for group in groups]


@ALL_ADVANTAGES
def test_order_of_prompts_and_completions_does_not_matter(name: str) -> None:
    rewards = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    plain = ADVANTAGES[name](rewards)
    assert ADVANTAGES[name](rewards[[3, 1, 4, 0, 2]][:, [2, 0, 3, 1]]).allclose(plain[[3, 1, 4, 0, 2]][:, [2, 0, 3, 1]])
    assert plain.dtype == torch.float32 and plain.sum(dim=1).abs().max() < 1e-5


@ALL_ADVANTAGES
def test_equal_rewards_give_exactly_zero_despite_rounding(name: str) -> None:
    for group in range(2, 40):
        for dtype in (torch.float32, torch.float64):
            assert not ADVANTAGES[name](torch.full((2, group), 0.1, dtype=dtype)).any()
        assert not ADVANTAGES[name](torch.full((2, group), 1e9)).any()


def test_single_completion_per_prompt() -> None:
    one = torch.tensor([[3.0], [5.0]])
    for name in ADVANTAGES.keys() - {"leave_one_out"}:
        assert not ADVANTAGES[name](one).any()
    with pytest.raises(ValueError, match=r"\[2, 1\] have 1 per prompt; set rl.group to 2"):
        leave_one_out(one)


@ALL_ADVANTAGES
def test_bad_rewards_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=r"\(1, 0\).*nan"):
        ADVANTAGES[name](torch.tensor([[0.0, 1.0], [math.nan, 1.0]]))
    for empty in (torch.zeros(0, 4), torch.zeros(4), torch.zeros(2, 0)):
        with pytest.raises(ValueError, match="prompts, completions"):
            ADVANTAGES[name](empty)


def test_overlong_buffer_must_not_exceed_the_length() -> None:
    for buffer in (-1, 21):
        with pytest.raises(ValueError, match=f"0 to 20 tokens.*{buffer}"):
            overlong_penalty(torch.tensor([3]), 20, buffer)


# --- KL estimators, over all tokens of a small vocabulary, weighted by their probability -----------------------------


def distributions() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(6, generator=g).double().requires_grad_(True), torch.randn(6, generator=g).double().log_softmax(
        0
    )


def divergence(logps: Tensor, ref: Tensor) -> Tensor:
    return (logps.exp() * (logps - ref)).sum()


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_estimators_have_the_documented_mean(estimator: str, unbiased: bool) -> None:
    logits, ref = distributions()
    logps = logits.log_softmax(0).detach()
    each = kl(logps[None], ref[None], torch.ones(1, 6), estimator)[0]
    mean = (logps.exp() * each).sum()
    assert bool((mean - divergence(logps, ref)).abs() < 1e-9) is unbiased
    assert estimator == "k1" or (each >= 0).all()


@pytest.mark.parametrize(
    ("estimator", "weighted", "gradient"),
    [("k1", True, "kl"), ("k3", True, "kl"), ("k2", False, "kl"), ("k3", False, "reverse"), ("k1", False, "none")],
)
def test_estimators_in_the_loss_have_the_documented_gradient(estimator: str, weighted: bool, gradient: str) -> None:
    logits, ref = distributions()
    exact = {
        "kl": lambda p: divergence(p, ref),
        "reverse": lambda p: divergence(ref, p),
        "none": lambda p: 0.0 * p.sum(),
    }[gradient]
    (expected,) = torch.autograd.grad(exact(logits.log_softmax(0)), logits)
    logps = logits.log_softmax(0)
    rows = logps[:, None]
    each = kl(rows, ref[:, None], torch.ones(6, 1), estimator)
    each = each * (rows - rows.detach()).exp() if weighted else each
    (computed,) = torch.autograd.grad((logps.exp().detach() * each[:, 0]).sum(), logits)
    close(computed, expected)


def test_policy_converges_to_the_reference_under_the_penalty_only() -> None:
    """All tokens of the vocabulary are one-token completions, weighted by their probability; 200 steps on the KL must
    reach the reference."""
    logits, ref = distributions()
    logits = leaf(logits)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(200):
        logps = logits.log_softmax(0)[:, None]
        b = Batch(logps, logps.detach(), torch.ones(6, 1), torch.zeros(6), ref[:, None])
        n = Counts(1.0, 1.0, 1.0, 1.0)
        terms = grpo(b, Clip(0.2, 0.2), n)
        weighted = terms._replace(share=logps.detach().exp())
        optimizer.zero_grad()
        policy_loss(b, weighted, n, beta=1.0)[0].backward()
        optimizer.step()
    assert (logits.log_softmax(0).exp() - ref.exp()).abs().max() < 1e-3
