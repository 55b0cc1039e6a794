"""Preference losses equal TRL's on the same tensors; and properties that hold for any numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo.rl.objectives import kto as kto_file
from octavo.rl.objectives.kto import FIGURES, AnswerCounts, baseline, kto
from octavo.rl.objectives.metrics import combine_figures
from octavo.rl.objectives.pairwise import PairCounts, Pairs, answer_logps, dpo, orpo, simpo
from octavo.rl.objectives.registry import PREFERENCES
from tests.rl import oracle
from tests.rl.batches import close, leaf, masks

SHAPES = [(4, 7, 0), (1, 1, 1), (1, 6, 2), (16, 5, 3)]
PAIRED = [name for name, preference in PREFERENCES.items() if preference.paired]


def answers(rows: int, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities [rows, tokens], their mask, and sums of a nearby reference [rows]."""
    g = torch.Generator().manual_seed(seed)
    logps, mask = -torch.rand(rows, tokens, generator=g) * 2 - 0.05, masks(rows, tokens, seed)
    return logps, mask, answer_logps(logps + 0.5 * torch.randn(rows, tokens, generator=g), mask)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("name", "smoothing", "sft"),
    [
        ("sigmoid", 0, 0),
        ("sigmoid", 0, 0.3),
        ("ipo", 0, 0),
        ("hinge", 0, 0.3),
        ("robust", 0.1, 0),
        ("sigmoid_norm", 0, 1),
    ],
)
def test_dpo_matches_trl(name: str, smoothing: float, sft: float, shape: tuple[int, int, int]) -> None:
    logps, mask, ref = answers(2 * shape[0], *shape[1:])
    trl, logps_leaf = leaf(logps), leaf(logps)
    beta = 2.0 if name == "hinge" else 0.3  # margins on both sides of the hinge
    loss, logged = oracle.dpo_loss(trl, mask, ref, {name: 1.0} | ({"sft": sft} if sft else {}), beta, smoothing)
    loss.backward()
    total, figures = dpo(
        Pairs.of(logps_leaf, mask, ref), PairCounts.of([mask]), loss=name, beta=beta, label_smoothing=smoothing, sft=sft
    )
    total.backward()
    close(total, loss)
    close(logps_leaf.grad, trl.grad)
    shared = figures.keys() & logged.keys()
    assert shared == {f"rewards/{x}" for x in ("chosen", "rejected", "accuracies", "margins")} | {
        "logps/chosen", "logps/rejected"
    }  # fmt: skip
    for figure in shared:
        close(figures[figure], logged[figure])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_label_smoothing_matches_trl(smoothing: float) -> None:
    """TRL implements it in CPO, which equals DPO with a reference of 0."""
    logps, mask, _ = answers(12, 6, 4)
    sums, _ = answer_logps(logps, mask)
    trl = oracle.cpo_pairs(*sums.chunk(2), beta=0.2, label_smoothing=smoothing).mean()
    pairs = Pairs.of(logps, mask, torch.zeros(12))
    close(dpo(pairs, PairCounts.of([mask]), beta=0.2, label_smoothing=smoothing)[0], trl)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["orpo", "simpo", "simpo+sft"])
def test_reference_free_losses_match_trl(name: str, shape: tuple[int, int, int]) -> None:
    logps, mask, _ = answers(2 * shape[0], *shape[1:])
    trl, logps_leaf = leaf(logps), leaf(logps)
    means = (trl * mask).sum(1) / mask.sum(1)
    half = shape[0]
    nll = -trl[:half][mask[:half]].mean()
    pairs, counts = Pairs.of(logps_leaf, mask), PairCounts.of([mask])
    if name == "orpo":
        loss, logged = oracle.reference_free_loss(oracle.ORPOTrainer, *means.chunk(2), nll, beta=0.2)
        total, figures = orpo(pairs, counts, beta=0.2)
    else:
        sft = 0.5 if name.endswith("sft") else 0.0
        loss, logged = oracle.reference_free_loss(
            oracle.CPOTrainer, *means.chunk(2), nll, beta=2.0, loss_type="simpo", simpo_gamma=1.0, label_smoothing=0.1,
            cpo_alpha=sft,
        )  # fmt: skip
        total, figures = simpo(pairs, counts, beta=2.0, gamma=1.0, label_smoothing=0.1, sft=sft)
    loss.backward(), total.backward()
    close(total, loss)
    close(logps_leaf.grad, trl.grad)
    shared = figures.keys() & logged.keys()
    assert len(shared) >= 6 and (name != "orpo" or {"log_odds_ratio", "log_odds_chosen", "nll_loss"} <= shared)
    for figure in shared:
        close(figures[figure], logged[figure])


@pytest.mark.parametrize("labels", ["mixed", "all desirable", "none desirable"])
def test_kto_matches_trl(labels: str) -> None:
    logps, mask, ref = answers(8, 6, 6)
    other, _, other_ref = answers(8, 6, 7)
    mismatched = answer_logps(other, mask)[0]
    desirable = torch.tensor({"mixed": [1, 0, 0, 1, 0, 1, 0, 0], "all desirable": [1] * 8}.get(labels, [0] * 8)) > 0
    trl, logps_leaf = leaf(logps), leaf(logps)
    loss, logged = oracle.kto_loss(
        trl, mask, ref, desirable, mismatched, other_ref, beta=0.2, weights=(1.3, 0.7)
    )  # fmt: skip
    loss.backward()
    z = baseline(mismatched, other_ref)
    close(z, logged["kl"])
    sums, tokens = answer_logps(logps_leaf, mask)
    counts = AnswerCounts.of([(tokens, desirable)])
    total, figures = kto(
        sums, tokens, ref, desirable, z, counts, beta=0.2, desirable_weight=1.3, undesirable_weight=0.7
    )
    total.backward()
    close(total, loss)
    close(logps_leaf.grad, trl.grad)
    for figure in figures.keys() & logged.keys():
        close(figures[figure], logged[figure])
    missing = {"mixed": (), "all desirable": ("rejected", "margins")}.get(labels, ("chosen", "margins"))
    assert {*FIGURES} - figures.keys() == {name for name in FIGURES if name.endswith(missing)}, (
        "missing figures are not 0"
    )


def test_kto_baseline_is_not_negative_and_has_no_gradient() -> None:
    logps = leaf(torch.tensor([-1.0, -2.0]))
    assert baseline(logps, torch.zeros(2)) == 0 and baseline(torch.zeros(0), torch.zeros(0)) == 0
    z = baseline(logps, torch.full((2,), -5.0))
    assert z == 3.5 and not z.requires_grad


# --- Properties of all losses -----------------------------------------------------------------------------------------


def loss_of(name: str, logps: Tensor, mask: Tensor, ref: Tensor, counts: PairCounts) -> tuple[Tensor, dict]:
    preference = PREFERENCES[name]
    pairs = Pairs.of(logps, mask, ref if preference.reference else None)
    return preference.loss(pairs, counts, **preference.options | ({"sft": 0.2} if "sft" in preference.options else {}))


def rows(tensor: Tensor, which: Tensor) -> Tensor:
    """Select the pairs `which` of rows [2B], chosen answers first."""
    return torch.cat([half[which] for half in tensor.chunk(2)])


@pytest.mark.parametrize("name", PAIRED)
def test_micro_batches_sum_to_the_batch_in_any_order(name: str) -> None:
    logps, mask, ref = answers(14, 6, 8)
    counts = PairCounts.of([mask])
    single, split = leaf(logps), leaf(logps)
    expected, figures = loss_of(name, single, mask, ref, counts)
    expected.backward()
    order = torch.randperm(7, generator=torch.Generator().manual_seed(1))
    parts = [loss_of(name, rows(split, p), rows(mask, p), rows(ref, p), counts) for p in order.split(3)]
    assert counts == PairCounts(*map(sum, zip(*(PairCounts.of([rows(mask, p)]) for p in order.split(3)), strict=True)))
    total = sum(part[0] for part in parts)
    total.backward()
    close(total, expected)
    close(split.grad, single.grad)
    summed = combine_figures(part[1] for part in parts)
    assert summed.keys() == figures.keys()
    for figure, value in figures.items():
        close(summed[figure], value)


@pytest.mark.parametrize("empty", ["all", "a chosen one", "a rejected one"])
@pytest.mark.parametrize("name", PAIRED)
def test_pair_without_tokens_does_not_count(name: str, empty: str) -> None:
    logps, mask, ref = answers(6, 5, 9)
    cut = mask.clone()
    cut[{"all": slice(None), "a chosen one": 1, "a rejected one": 4}[empty]] = False  # of the second pair
    padded = leaf(torch.where(cut, logps, math.nan))
    counts = PairCounts.of([cut])
    assert counts.pairs == (0 if empty == "all" else 2)
    total, figures = loss_of(name, padded, cut, ref, counts)
    total.backward()
    assert all(value.isfinite() for value in figures.values()) and padded.grad.isfinite().all()
    if empty == "all":
        assert total == 0 and not padded.grad.any() and not any(figures.values())
    else:
        complete = torch.tensor([0, 2])
        close(
            total,
            loss_of(
                name,
                rows(logps, complete),
                rows(mask, complete),
                rows(ref, complete),
                PairCounts.of([rows(mask, complete)]),
            )[0],
        )
        assert not padded.grad[[1, 4]].any() and padded.grad[[0, 2, 3, 5]].any()


@pytest.mark.parametrize("name", PAIRED)
def test_equal_answers_have_opposite_gradients(name: str) -> None:
    logps, mask, _ = answers(1, 4, 3)
    repeated, pair_mask = leaf(logps.repeat(2, 1)), mask.repeat(2, 1)
    ref = answer_logps(repeated.detach(), pair_mask)[0]
    loss, figures = loss_of(name, repeated, pair_mask, ref, PairCounts.of([pair_mask]))
    loss.backward()
    assert figures["rewards/accuracies"] == figures["rewards/margins"] == 0
    assert (repeated.grad[0][mask[0]] < 0).all() and (repeated.grad[1][mask[0]] > 0).all()


def test_orpo_is_finite_for_probability_one() -> None:
    logps = leaf(torch.tensor([[0.0, 0.0], [-1e-9, -1e-9], [-80.0, -90.0], [-1.0, 0.0]]))
    total, figures = orpo(Pairs.of(logps, torch.ones(4, 2)), PairCounts(2.0, 4.0))
    total.backward()
    assert total.isfinite() and logps.grad.isfinite().all() and all(v.isfinite() for v in figures.values())


@pytest.mark.parametrize("desirable", [True, False])
def test_kto_of_empty_answers_and_of_parts(desirable: bool) -> None:
    zeros, labels = torch.zeros(2), torch.tensor([desirable, desirable])
    empty = leaf(torch.full((2,), math.nan))
    total, figures = kto(empty, zeros, zeros, labels, torch.tensor(0.0), AnswerCounts.of([(zeros, labels)]))
    total.backward()
    assert total == 0 and not empty.grad.any() and not any(figures.values())

    logps, mask, ref = answers(6, 5, 10)
    sums, tokens = answer_logps(logps, mask)
    label = torch.tensor([1, 0, 0, 1, 1, 0]) > 0
    counts, z = AnswerCounts.of([(tokens, label)]), torch.tensor(0.3)
    expected, figures = kto(sums, tokens, ref, label, z, counts)
    parts = [kto(sums[p], tokens[p], ref[p], label[p], z, counts) for p in (slice(4, 6), slice(0, 4))]
    close(parts[0][0] + parts[1][0], expected)
    for figure, value in combine_figures(part[1] for part in parts).items():
        close(value, figures[figure])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "sigmoidal"}, "sigmoidal"),
        ({"label_smoothing": 0.5}, "0 to below 0.5: 0.5"),
        ({"loss": "hinge", "label_smoothing": 0.1}, "hinge has no label smoothing"),
        ({"pairs": Pairs(*[torch.ones(2)] * 4)}, "reference"),
    ],
)
def test_invalid_options_are_rejected(arguments: dict, message: str) -> None:
    pairs = arguments.pop("pairs", Pairs(*[torch.ones(2)] * 6))
    with pytest.raises(ValueError, match=message):
        dpo(pairs, PairCounts(2.0, 2.0), **arguments)


def test_bad_shapes_are_rejected() -> None:
    with pytest.raises(ValueError, match="even number of rows"):
        Pairs.of(torch.zeros(3, 2), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"ref_chosen is torch.bfloat16 \[2\]"):
        Pairs(*[torch.ones(2)] * 4, torch.ones(2).bfloat16(), torch.ones(2))


def test_all_options_of_a_loss_have_an_effect() -> None:
    p, n = Pairs(*[torch.ones(2)] * 6), PairCounts(2.0, 2.0)
    for name in PAIRED:
        preference = PREFERENCES[name]
        default = preference.loss(p, n, **preference.options)[0]
        for option, value in preference.options.items():  # each can be message, and says something
            changed = preference.loss(Pairs(-p.chosen, -3 * p.chosen, *[torch.ones(2)] * 4), n, **preference.options)[0]
            other = preference.loss(
                Pairs(-p.chosen, -3 * p.chosen, *[torch.ones(2)] * 4), n, **{**preference.options, option: value + 0.25}
            )[0]
            assert default.isfinite() and not torch.equal(changed, other), f"{name}: {option} does nothing"
    assert PREFERENCES["kto"].loss is kto_file.kto
