"""Properties of all policy objectives, and the differences between them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo.rl.objectives import advantages, gae
from octavo.rl.objectives.metrics import combine_figures, whole
from octavo.rl.objectives.policy_losses import Batch, Clip, Counts, policy_loss
from octavo.rl.objectives.registry import ALGORITHMS, Algorithm
from tests.rl.batches import batch, close, leaf, masks
from tests.rl.test_metrics import SingleRank

ALL_ALGORITHMS = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=list(ALGORITHMS))
FIELDS = ("logps", "old_logps", "mask", "advantages", "ref_logps", "weights", "entropy")
TERMS = {"beta": 0.1, "entropy_bonus": 0.02}


def compute_loss(algorithm: Algorithm, b: Batch, n: Counts | None = None, **fields) -> tuple[Tensor, dict[str, Tensor]]:
    n = n or Counts.of([b.mask], max_new_tokens=9)
    return policy_loss(b, algorithm.objective(b, algorithm.clip, n), n, **fields)


def part(b: Batch, rows: Tensor | slice, **fields: Tensor) -> Batch:
    """Select rows of a batch; tensors in `fields` replace its own and receive the gradient."""
    tensors = {name: getattr(b, name) for name in FIELDS} | fields
    return Batch(**{name: None if value is None else value[rows] for name, value in tensors.items()})


@ALL_ALGORITHMS
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -7.3])
@pytest.mark.parametrize("group", [2, 3, 7])
def test_equal_rewards_have_no_gradient(algorithm: Algorithm, reward: float, group: int) -> None:
    rewards, mask = torch.full((3, group), reward), masks(3 * group, 5, group)
    if algorithm.values:
        tokens = gae.token_rewards(rewards.flatten(), mask)
        plain, _ = gae.gae(tokens, torch.zeros_like(tokens), mask, 1.0, 1.0)
        advantage_values = gae.whiten(plain, mask, gae.moments(plain, mask))
    else:
        advantage_values = advantages.ADVANTAGES[algorithm.advantage](rewards).flatten()
        assert not advantages.informative(rewards).any()
    assert not advantage_values.any()
    logps = leaf(batch(3 * group, 5, group, mask=mask).logps)
    loss, _ = compute_loss(algorithm, batch(3 * group, 5, group, mask=mask, logps=logps, advantages=advantage_values))
    loss.backward()
    assert loss == 0 and not logps.grad.any()


@ALL_ALGORITHMS
@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_gradient_of_a_single_token(algorithm: Algorithm, advantage: float) -> None:
    """In the first update on a rollout, the gradient of a single token is -A times its share."""
    logps = leaf(torch.tensor([[-0.7]]))
    one = Batch(logps, logps.detach(), torch.ones(1, 1), torch.tensor([advantage]))
    counts = Counts.of([one.mask], max_new_tokens=4)
    loss, figures = compute_loss(algorithm, one, counts)
    loss.backward()
    share = 0.25 if algorithm.normalisation == "room" else 1.0
    close(loss, -advantage * share * (-0.7 if algorithm.name == "cispo" else 1.0))
    close(logps.grad, torch.tensor([[-advantage * share]]))
    assert figures["cispo_clip_ratio" if algorithm.name == "cispo" else "clip_ratio/region_mean"] == 0


@ALL_ALGORITHMS
@pytest.mark.parametrize("counted", ["none", "other micro-batch"])
@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf, -math.inf])
def test_fully_masked_batch_gives_zero(algorithm: Algorithm, garbage: float, counted: str) -> None:
    mask = torch.zeros(3, 4, dtype=torch.bool)
    filled = torch.full((3, 4), garbage)
    logps, entropy = leaf(filled), leaf(filled)
    empty = Batch(logps, filled, mask, filled[:, 0], filled, filled, entropy)
    counts = Counts.of([mask] + [torch.ones(2, 4)] * (counted == "other micro-batch"), 4)
    loss, figures = compute_loss(algorithm, empty, counts, **TERMS)
    loss.backward()
    assert loss == 0 and not logps.grad.any() and not entropy.grad.any()
    assert not any(whole(figures, SingleRank()).values())


@ALL_ALGORITHMS
def test_masked_values_are_not_read(algorithm: Algorithm) -> None:
    """Garbage in masked positions, more padding and empty rows change neither loss, gradient nor figures."""
    b = batch(5, 6, 3, advantages=torch.randn(5, 6), weights=torch.rand(5, 6))
    wide = {}
    for name in FIELDS:
        value = getattr(b, name)
        padded = torch.full((6, 8), math.nan) if value.is_floating_point() else torch.zeros(6, 8, dtype=torch.bool)
        padded[:5, :6] = torch.where(b.mask, value, padded[:5, :6])
        wide[name] = padded
    counts = Counts.of([b.mask], 9)
    logps, padded = leaf(b.logps), leaf(wide["logps"])
    loss, figures = compute_loss(algorithm, part(b, slice(None), logps=logps), counts, **TERMS)
    actual, actual_figures = compute_loss(algorithm, Batch(**(wide | {"logps": padded})), counts, **TERMS)
    loss.backward(), actual.backward()
    close(actual, loss)
    close(padded.grad[:5, :6], logps.grad)
    assert not padded.grad[5:].any() and not padded.grad[:, 6:].any()
    for name, value in figures.items():
        close(actual_figures[name], value)


@ALL_ALGORITHMS
def test_loss_does_not_depend_on_the_order_of_rows(algorithm: Algorithm) -> None:
    b, order = batch(9, 5, 6), torch.randperm(9, generator=torch.Generator().manual_seed(2))
    logps, shuffled = leaf(b.logps), leaf(b.logps)
    loss, figures = compute_loss(algorithm, part(b, slice(None), logps=logps), **TERMS)
    actual, actual_figures = compute_loss(algorithm, part(b, order, logps=shuffled), **TERMS)
    loss.backward(), actual.backward()
    close(actual, loss)
    close(shuffled.grad, logps.grad)
    for name, value in figures.items():
        close(actual_figures[name], value)


@ALL_ALGORITHMS
@pytest.mark.parametrize("cut", [[1, 2, 6], [4, 5], [3, 3, 3]], ids=str)
def test_micro_batches_sum_to_the_batch(algorithm: Algorithm, cut: list[int]) -> None:
    """Uneven micro-batches, one with a row without tokens. BNPO is a mean over micro-batches and checked separately."""
    mask = masks(9, 5, 7)
    mask[4] = False
    b = batch(9, 5, 7, mask=mask)
    single, split = leaf(b.logps), leaf(b.logps)
    loss, figures = compute_loss(algorithm, part(b, slice(None), logps=single), **TERMS)
    rows = torch.arange(9).split(cut)
    counts = Counts.of([b.mask[r] for r in rows], 9)
    assert counts == Counts(*map(sum, zip(*(Counts.of([b.mask[r]], 9) for r in rows), strict=True)))
    parts = [compute_loss(algorithm, part(b, r, logps=split), counts, **TERMS) for r in rows]
    total = sum(p[0] for p in parts)
    total.backward()
    if algorithm.name == "bnpo":
        alone = [compute_loss(algorithm, part(b, r, logps=single), beta=0.1)[0] for r in rows]
        close(total, sum(alone) / len(rows) - TERMS["entropy_bonus"] * figures["entropy"])
        return
    loss.backward()
    close(total, loss)
    close(split.grad, single.grad)
    summed = combine_figures(p[1] for p in parts)
    assert summed.keys() == figures.keys()
    for name, value in figures.items():
        close(summed[name], value)


@ALL_ALGORITHMS
def test_shares_match_the_stated_normalisation(algorithm: Algorithm) -> None:
    b = batch(6, 5, 2)
    counts = Counts.of([b.mask, torch.ones(1, 2)], max_new_tokens=8)
    share = algorithm.objective(b, algorithm.clip, counts).share
    lengths = b.mask.sum(1, keepdim=True)
    expected = {
        "token": 1 / (b.mask.sum() + 2) * torch.ones(6, 5),
        "sequence": 1 / 7 / lengths * torch.ones(6, 5),
        "room": torch.full((6, 5), 1 / 56),
        "microbatch": 1 / 2 / b.mask.sum() * torch.ones(6, 5),
    }
    close(share, expected[algorithm.normalisation] * b.mask)


def test_counts_of_tokens_completions_and_micro_batches() -> None:
    """A completion without tokens counts as a completion; a micro-batch without tokens does not count."""
    some = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert Counts.of([some, torch.zeros(1, 3)], max_new_tokens=4) == Counts(2.0, 3.0, 12.0, 1.0)
    assert Counts.of([], max_new_tokens=4) == Counts(0.0, 0.0, 0.0, 0.0)


def test_empty_completion_is_ignored_in_the_smallest_clip_ratio() -> None:
    old, mask = torch.zeros(2, 2) - 1, torch.tensor([[1, 1], [0, 0]])
    b = Batch(old - 1, old, mask, torch.tensor([-1.0, -1.0]))
    figures = compute_loss(ALGORITHMS["grpo"], b)[1]
    assert figures["clip_ratio/low_min"] == 1 and figures["clip_ratio/low_mean"] == 1


# --- What sets them split ---------------------------------------------------------------------------------------------


def gradient(name: str, ratios: list[float], advantage: float, clip: Clip | None = None) -> Tensor:
    """Return the gradient of the log-probabilities of one completion whose tokens have these ratios."""
    algorithm = ALGORITHMS[name]
    logps = leaf(torch.tensor([ratios]).log() - 1)
    b = Batch(logps, torch.full_like(logps, -1.0), torch.ones_like(logps), torch.tensor([advantage]))
    n = Counts.of([b.mask], len(ratios))
    policy_loss(b, algorithm.objective(b, clip or algorithm.clip, n), n)[0].backward()
    return logps.grad[0]


def test_clip_removes_the_gradient_only_beyond_the_limit() -> None:
    for name in ("grpo", "dr_grpo", "bnpo", "ppo"):
        assert (gradient(name, [1.3, 1.1, 0.7], 1.0) != 0).tolist() == [False, True, True], name
        assert (gradient(name, [1.3, 0.9, 0.7], -1.0) != 0).tolist() == [True, True, False], name


def test_dapo_has_a_higher_upper_limit() -> None:
    assert gradient("grpo", [1.25], 1.0) == 0 and gradient("dapo", [1.25], 1.0) != 0
    assert gradient("dapo", [1.3], 1.0) == 0 and gradient("dapo", [0.75], -1.0) == 0


def test_gspo_and_rloo_clip_completions() -> None:
    """GSPO clips the geometric mean of the ratios, RLOO their product."""
    balanced = [2.0, 0.5, 1.0]
    close(gradient("gspo", balanced, 1.0), torch.full((3,), -1 / 3))
    close(gradient("rloo", balanced, 1.0), torch.full((3,), -1.0))
    far = [1.1, 1.1, 1.1]
    assert not gradient("gspo", far, 1.0, Clip(0.2, 0.09)).any() and not gradient("rloo", far, 1.0).any()
    assert gradient("gspo", far, 1.0, Clip(0.2, 0.2)).all(), "1.1 is within 1.2, its product is not"


def test_cispo_keeps_gradients_and_bounds_weights() -> None:
    close(gradient("cispo", [9.0, 1.5, 0.1], 1.0, Clip(None, 1.0)), -torch.tensor([2.0, 1.5, 0.1]) / 3)
    close(gradient("cispo", [9.0, 1.5, 0.1], 1.0, Clip(0.5, 1.0)), -torch.tensor([2.0, 1.5, 0.5]) / 3)


def test_grpo_gives_less_weight_to_tokens_of_long_completions() -> None:
    mask = torch.arange(6) < torch.tensor([[2], [6]])
    grads = {}
    for name in ("grpo", "dr_grpo", "dapo"):
        b = batch(2, 6, 0, spread=0.0, mask=mask, advantages=torch.ones(2))
        logps = leaf(b.logps)
        compute_loss(ALGORITHMS[name], part(b, slice(None), logps=logps))[0].backward()
        grads[name] = (logps.grad[0, 0] / logps.grad[1, 0]).item()
    assert grads == pytest.approx({"grpo": 3.0, "dr_grpo": 1.0, "dapo": 1.0})


def test_weights_scale_only_the_policy_term() -> None:
    b = batch(4, 5, 1, weights=torch.zeros(4, 1))
    loss, figures = compute_loss(ALGORITHMS["grpo"], b, beta=0.1, entropy_bonus=0.02)
    plain, _ = compute_loss(ALGORITHMS["grpo"], batch(4, 5, 1, advantages=torch.zeros(4)), beta=0.1, entropy_bonus=0.02)
    assert figures["policy_loss"] == 0 and loss != 0
    close(loss, plain)


def test_extreme_differences_stay_finite() -> None:
    for algorithm in ALGORITHMS.values():
        logps = leaf(torch.tensor([[-1e4, -1.0], [-1.0, -0.5]]).repeat(1, 8))
        old = torch.tensor([[-1.0, -1e4], [-3e3, -0.5]]).repeat(1, 8)
        b = Batch(logps, old, torch.ones(2, 16), torch.tensor([0.0, -1.0]), old)
        loss, figures = compute_loss(algorithm, b, beta=0.1)
        loss.backward()
        assert loss.isfinite() and logps.grad.isfinite().all() and all(v.isfinite() for v in figures.values())


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({"ref_logps": None}, {"beta": 0.1}, "0.1 in the loss needs the reference"),
        ({"entropy": None}, {"entropy_bonus": 0.3}, "bonus of 0.3 needs the entropy"),
        ({}, {"beta": 0.1, "estimator": "k1", "kl_weighted": False}, "k1 in the loss has a gradient of mean 0"),
        ({}, {"beta": 0.1, "estimator": "k4"}, "'k4' does not exist; there are k1, k2, k3"),
        ({"old_logps": torch.zeros(4, 6)}, {}, r"old_logps is \[4, 6\]; log-probabilities are \[4, 5\]"),
        ({"advantages": torch.zeros(5)}, {}, r"advantages is \[5, 1\]; log-probabilities are"),
        ({"logps": torch.zeros(4, 5).bfloat16()}, {}, "logps is torch.bfloat16.*float32"),
        ({"mask": torch.ones(4)}, {}, r"as the mask: \[4, 5\], \[4\]"),
    ],
)
def test_invalid_inputs_are_rejected(fields: dict, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_loss(ALGORITHMS["grpo"], batch(4, 5, 0, **fields), **arguments)


def test_two_sided_clip_needs_both_limits() -> None:
    b = batch()
    for name in ALGORITHMS.keys() - {"cispo"}:
        with pytest.raises(ValueError, match="a lower limit is needed"):
            ALGORITHMS[name].objective(b, Clip(None, 0.2), Counts.of([b.mask], 7))
