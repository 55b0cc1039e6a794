"""PPO against plain Python loops in fp64: advantages per token, both losses and their gradients."""

from __future__ import annotations

import math
from statistics import fmean, variance

import pytest
import torch
from torch import Tensor

from octavo.rl.objectives import gae
from octavo.rl.objectives.metrics import combine_figures
from octavo.rl.objectives.penalties import kl
from octavo.rl.objectives.policy_losses import Batch, Clip, Counts, policy_loss
from octavo.rl.objectives.registry import ALGORITHMS
from octavo.train.forward.critic import ValueHead
from tests.rl.batches import batch, close, leaf, masks

CASES = [(5, 6, 0, 1.0, 1.0), (4, 7, 1, 0.99, 0.95), (1, 1, 2, 0.9, 0.5), (3, 5, 3, 1.0, 0.0), (8, 4, 4, 0.0, 0.7)]


def make_case(rows: int, tokens: int, seed: int) -> tuple[Batch, Tensor, Tensor, Tensor]:
    """Return a batch with a gap in one mask, current values, values at the rollout, and scores."""
    mask = masks(rows, tokens, seed)
    if tokens > 4:
        mask[0] = torch.tensor([True, False, True, True] + [False] * (tokens - 4))
    g = torch.Generator().manual_seed(seed + 100)
    values_now, old_values = torch.randn(2, rows, tokens, generator=g)
    return (
        batch(rows, tokens, seed, mask=mask),
        values_now,
        old_values + 0.1 * values_now,
        torch.randn(rows, generator=g),
    )


def plain_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Sum all discounted later errors, by the definition."""
    n = len(values)
    errors = [r + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t, r in enumerate(rewards)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, n)) for t in range(n)]


def plain(
    b: Batch, values_now: Tensor, old_values: Tensor, scores: Tensor, gamma: float, lam: float, beta: float,
    clip: float = 0.2,
) -> dict:  # fmt: skip
    """Compute PPO one completion and token at a time."""
    places, advantages, returns = [], [], []
    for i in range(len(scores)):
        positions = [t for t in range(b.mask.shape[1]) if b.mask[i, t]]
        distance = [b.old_logps[i, t].item() - b.ref_logps[i, t].item() for t in positions]
        rewards = [-beta * d for d in distance]
        rewards[-1] += scores[i].item()
        values = [old_values[i, t].item() for t in positions]
        row_advantages = plain_gae(rewards, values, gamma, lam)
        places += [(i, t) for t in positions]
        advantages += row_advantages
        returns += [a + v for a, v in zip(row_advantages, values, strict=True)]
    n = len(places)
    mean = fmean(advantages)
    deviation = math.sqrt(variance(advantages) + 1e-8) if n > 1 else math.inf
    white = [(a - mean) / deviation for a in advantages]
    policy, critic = 0.0, 0.0
    policy_grad, critic_grad = torch.zeros(b.mask.shape, dtype=torch.float64), torch.zeros_like(old_values).double()
    for (i, t), a, r in zip(places, white, returns, strict=True):
        ratio = math.exp(b.logps[i, t].item() - b.old_logps[i, t].item())
        limited = min(max(ratio, 0.8), 1.2)
        policy -= min(ratio * a, limited * a) / n
        policy_grad[i, t] = -a * ratio / n if ratio * a <= limited * a else 0.0
        value, bounded = (
            values_now[i, t].item(),
            min(max(values_now[i, t].item(), old_values[i, t].item() - clip), old_values[i, t].item() + clip),
        )
        critic += max((value - r) ** 2, (bounded - r) ** 2) / 2 / n
        critic_grad[i, t] = (value - r) / n if (value - r) ** 2 >= (bounded - r) ** 2 else 0.0
    return {
        "places": places, "advantages": advantages, "returns": returns, "white": white,
        "policy": (policy, policy_grad), "critic": (critic, critic_grad),
    }  # fmt: skip


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ppo_matches_loops(case: tuple, beta: float) -> None:
    rows, tokens, seed, gamma, lam = case
    b, values_now, old_values, scores = make_case(rows, tokens, seed)
    expected = plain(b, values_now, old_values, scores, gamma, lam, beta)

    distance = kl(b.old_logps, b.ref_logps, b.mask, "k1")
    rewards = gae.token_rewards(scores, b.mask, distance, beta)
    advantages, returns = gae.gae(rewards, old_values, b.mask, gamma, lam)
    white = gae.whiten(advantages, b.mask, gae.moments(advantages, b.mask))
    for actual, name in ((advantages, "advantages"), (returns, "returns"), (white, "white")):
        assert not actual[~b.mask].any()
        close(actual[b.mask], torch.tensor(expected[name]))

    logps, values, counts = leaf(b.logps), leaf(values_now), Counts.of([b.mask], tokens)
    clean_batch = Batch(logps, b.old_logps, b.mask, white)
    loss, _ = policy_loss(clean_batch, ALGORITHMS["ppo"].objective(clean_batch, Clip(0.2, 0.2), counts), counts)
    critic, figures = gae.value_loss(values, old_values, returns, b.mask, counts, clip=0.2)
    (loss + critic).backward()
    close(loss, expected["policy"][0])
    close(logps.grad, expected["policy"][1])
    close(critic, expected["critic"][0])
    close(values.grad, expected["critic"][1])
    close(figures["value_mean"], values_now[b.mask].mean())
    if rows * tokens > 8:
        assert 0 < figures["value_clip_ratio"] < 1


def test_undiscounted_advantage_is_the_remaining_reward() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0, 99.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    advantages, returns = gae.gae(rewards, torch.zeros(1, 4), mask, 1.0, 1.0)
    assert advantages.tolist() == [[7.0, 6.0, 4.0, 0.0]] and returns.equal(advantages)
    exact, _ = gae.gae(rewards, torch.tensor([[7.0, 6.0, 4.0, math.nan]]), mask, 1.0, 0.3)
    assert not exact.any(), "exact values leave no advantage"


def test_score_is_at_the_last_counted_token() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    rewards = gae.token_rewards(torch.tensor([2.0, 3.0, math.nan]), mask)
    assert rewards.tolist() == [[0, 2, 0, 0], [0, 0, 3, 0], [0, 0, 0, 0]]


def test_fully_masked_batch_gives_zero() -> None:
    garbage, mask = torch.full((2, 3), math.nan), torch.zeros(2, 3)
    values = leaf(garbage)
    advantages, returns = gae.gae(garbage, garbage, mask, 0.9, 0.9)
    white = gae.whiten(advantages, mask, gae.moments(garbage, mask))
    loss, figures = gae.value_loss(values, garbage, garbage, mask, Counts(0.0, 2.0, 6.0, 0.0))
    loss.backward()
    assert not any(x.any() for x in (advantages, returns, white, values.grad, loss, *figures.values()))


def test_single_token_and_equal_advantages_whiten_to_zero() -> None:
    for given in (torch.tensor([[3.0]]), torch.full((4, 5), 0.1), torch.full((7, 3), -1e6)):
        assert not gae.whiten(given, torch.ones_like(given), gae.moments(given, torch.ones_like(given))).any()


def test_parts_sum_to_the_batch() -> None:
    """Moments and the critic's loss are the same over micro-batches of different sizes and order."""
    b, values_now, old_values, scores = make_case(6, 5, 9)
    advantages, returns = gae.gae(gae.token_rewards(scores, b.mask), old_values, b.mask, 1.0, 0.9)
    close(sum(gae.moments(advantages[p], b.mask[p]) for p in ([5, 0], [3, 1, 4, 2])), gae.moments(advantages, b.mask))
    counts, values, split_values = Counts.of([b.mask], 5), leaf(values_now), leaf(values_now)
    loss, figures = gae.value_loss(values, old_values, returns, b.mask, counts)
    parts = [
        gae.value_loss(split_values[p], old_values[p], returns[p], b.mask[p], counts) for p in ([5, 0], [3, 1, 4, 2])
    ]
    total = sum(part[0] for part in parts)
    loss.backward(), total.backward()
    close(total, loss)
    close(split_values.grad, values.grad)
    for name, value in combine_figures(part[1] for part in parts).items():
        close(value, figures[name])


def test_advantages_do_not_depend_on_micro_batches() -> None:
    """Parts of different widths, one of them fully masked, give bit-identical results."""
    b, _, old_values, scores = make_case(6, 5, 9)
    rewards = gae.token_rewards(scores, b.mask)
    expected = gae.gae(rewards, old_values, b.mask, 0.9, 0.8)
    rows = [[5, 0], [3, 1, 4, 2]]
    parts = [[x[p] for p in rows] + [torch.full((2, 3), math.nan)] for x in (rewards, old_values)]
    wide = [torch.nn.functional.pad(x[0], (2, 1)) for x in parts]  # a prompt before and padding after
    masks_ = [torch.nn.functional.pad(b.mask[rows[0]], (2, 1)), b.mask[rows[1]], torch.zeros(2, 3)]
    results = gae.gae_of_micro_batches([wide[0], *parts[0][1:]], [wide[1], *parts[1][1:]], masks_, 0.9, 0.8)
    for n in (0, 1):
        assert results[0][n][:, 2:-1].equal(expected[n][rows[0]]) and results[1][n].equal(expected[n][rows[1]])
        assert results[2][n].shape == (2, 3) and not results[2][n].any()


def test_value_clip_none_disables_clipping() -> None:
    b, values_now, old_values, _ = make_case(4, 5, 5)
    counts = Counts.of([b.mask], 5)
    loss, figures = gae.value_loss(values_now, old_values, torch.zeros_like(values_now), b.mask, counts, clip=None)
    close(loss, values_now[b.mask].square().mean() / 2)
    assert figures["value_clip_ratio"] == 0


def test_value_head_computes_in_fp32_and_starts_at_zero() -> None:
    head, hidden = ValueHead(8), torch.randn(2, 3, 8).bfloat16()
    assert not head(hidden).any() and head(hidden).shape == (2, 3)
    head(hidden).sum().backward()
    assert head.bias.grad == 6 and torch.allclose(head.weight.grad, hidden.float().sum((0, 1)))
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, 8))
        head.bias.fill_(0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = head(hidden)
    assert values.dtype == torch.float32
    close(values, hidden.double() @ head.weight.double() + 0.5)
