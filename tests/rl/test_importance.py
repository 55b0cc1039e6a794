"""Importance weights for the gap between rollout and trainer, and the figures of the gap, against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.rl.objectives.importance import LIMITS, Correction, gap, weights
from octavo.rl.objectives.metrics import combine_figures, whole
from tests.rl.batches import batch, close
from tests.rl.test_metrics import SingleRank

ALL_CORRECTIONS = pytest.mark.parametrize(("level", "action"), list(LIMITS))
NAME = "sampling/importance_sampling_ratio"


def counts(mask: torch.Tensor) -> tuple[float, float]:
    return float(mask.sum()), float(len(mask))


@ALL_CORRECTIONS
def test_weights_match_loops(level: str, action: str) -> None:
    b = batch(8, 6, 5, spread=0.4)
    how = Correction(level, action, low=0.85, high=1.1)
    computed, figures = weights(b.old_logps, b.ref_logps, b.mask, how, *counts(b.mask))
    expected, cut = [], 0
    for i in range(8):
        d = [(b.old_logps[i, t] - b.ref_logps[i, t]).item() for t in range(6) if b.mask[i, t]]
        raw = (
            [math.exp(x) for x in d]
            if level == "token"
            else [math.exp(sum(d) / (1 if level == "sequence" else len(d)))]
        )
        inside = [0.85 <= w <= 1.1 for w in raw]
        cut += len(raw) - sum(inside)
        expected += [
            min(max(w, 0.85), 1.1) if action == "truncate" else w * ok for w, ok in zip(raw, inside, strict=True)
        ]
    assert computed.shape == ((8, 6) if level == "token" else (8, 1))
    close(computed[b.mask] if level == "token" else computed[:, 0], torch.tensor(expected))
    assert 0 < cut < len(expected)
    close(figures["sampling/limited"], cut / len(expected))
    for name, value in (("min", min(expected)), ("mean", sum(expected) / len(expected)), ("max", max(expected))):
        close(figures[f"{NAME}/{name}"], value)


def test_gap_matches_loops() -> None:
    b = batch(5, 6, 3)
    d = [x.item() for x in (b.old_logps - b.ref_logps)[b.mask]]
    figures = gap(b.old_logps, b.ref_logps, b.mask, float(b.mask.sum()))
    close(figures["logp_gap_mean"], sum(map(abs, d)) / len(d))
    close(figures["logp_gap_max"], max(map(abs, d)))
    close(figures["logp_gap_k1"], -sum(d) / len(d))
    close(figures["logp_gap_k3"], sum(math.exp(x) - x - 1 for x in d) / len(d))


def test_k1_and_k3_of_the_gap_equal_the_kl_divergence() -> None:
    """Over all tokens of a small vocabulary, repeated in proportion to their probability in the rollout."""
    rollout, trainer = torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), torch.tensor([0.25, 0.25, 0.25, 0.25]).double()
    drawn = torch.arange(4).repeat_interleave((rollout * 1000).round().long())
    args = trainer.log()[drawn][None], rollout.log()[drawn][None], torch.ones(1, 1000), 1000.0
    divergence = (rollout * (rollout / trainer).log()).sum()
    assert divergence != (trainer * (trainer / rollout).log()).sum()
    close(gap(*args)["logp_gap_k1"], divergence)
    close(gap(*args)["logp_gap_k3"], divergence)
    mean = weights(*args[:3], Correction("token", high=9.0), 1000.0, 1.0)[1][f"{NAME}/mean"]
    close(mean, 1.0)


@ALL_CORRECTIONS
def test_zero_gap_gives_weight_one(level: str, action: str) -> None:
    b = batch(4, 5, 1)
    computed, figures = weights(b.old_logps, b.old_logps, b.mask, Correction(level, action), *counts(b.mask))
    assert (computed == 1).all() and figures["sampling/limited"] == 0
    assert figures[f"{NAME}/min"] == figures[f"{NAME}/max"] == 1
    assert not any(gap(b.old_logps, b.old_logps, b.mask, 9.0).values())


@ALL_CORRECTIONS
def test_masked_garbage_is_ignored(level: str, action: str) -> None:
    garbage, mask = torch.full((3, 4), math.nan), torch.zeros(3, 4)
    computed, figures = weights(garbage, -garbage, mask, Correction(level, action), 0.0, 0.0)
    figures |= gap(garbage, garbage, mask, 0.0)
    assert (computed == 1).all() and not any(whole(figures, SingleRank()).values())


@ALL_CORRECTIONS
def test_single_token_has_one_weight_at_all_levels_and_extremes_are_finite(level: str, action: str) -> None:
    one = torch.ones(1, 1)
    computed, _ = weights(one * -1.0, one * -1.05, one, Correction(level, action, 0.5, 1.5), 1.0, 1.0)
    close(computed, torch.tensor([[math.exp(0.05)]]))
    for far in (-1e4, 1e4):
        extreme, figures = weights(one * far, one, one, Correction(level, action), 1.0, 1.0)
        assert extreme.isfinite().all() and figures["sampling/limited"] == (
            far > 0 or LIMITS[level, action][0] is not None
        )
        assert gap(one * far, one, one, 1.0)["logp_gap_k3"].isfinite()


@ALL_CORRECTIONS
def test_parts_sum_to_the_batch_in_any_order(level: str, action: str) -> None:
    b, how = batch(7, 5, 2), Correction(level, action, 0.9, 1.1)
    computed, figures = weights(b.old_logps, b.ref_logps, b.mask, how, *counts(b.mask))
    parts = [[3, 0], [6, 1, 2], [5, 4]]
    each = [weights(b.old_logps[p], b.ref_logps[p], b.mask[p], how, *counts(b.mask)) for p in parts]
    close(torch.cat([part[0] for part in each]), computed[sum(parts, [])])
    figures |= gap(b.old_logps, b.ref_logps, b.mask, counts(b.mask)[0])
    gaps = [gap(b.old_logps[p], b.ref_logps[p], b.mask[p], counts(b.mask)[0]) for p in parts]
    summed = combine_figures([part[1] for part in each] + gaps)
    assert summed.keys() == figures.keys()
    for name, value in figures.items():
        close(summed[name], value)


def test_sequence_weights_amplify_small_gaps() -> None:
    """Reason for the default level: 0.012 nats per token over 100 tokens (TRL issue 4772)."""
    old = torch.zeros(1, 100)
    args = old, old - 0.012, torch.ones(1, 100)
    assert weights(*args, Correction("sequence", "mask", high=3.0), 100.0, 1.0)[0] == 0
    assert (weights(*args, Correction(), 100.0, 1.0)[0] > 1.01).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "batch"}, "token, sequence, geometric.*'batch'"),
        ({"action": "drop"}, "truncate, mask.*'drop'"),
        ({"high": 0.9}, "must include 1, .*high 0.9"),
        ({"low": 1.5}, "low 1.5"),
        ({"low": -1.0}, "low -1.0"),
    ],
)
def test_invalid_corrections_are_rejected(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Correction(**arguments)
