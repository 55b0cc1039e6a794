"""Objectives, advantages, corrections and figures equal TRL's on the same tensors, and so do gradients."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from octavo.rl.objectives import advantages, importance, penalties
from octavo.rl.objectives.policy_losses import Batch, Clip, Counts, policy_loss
from octavo.rl.objectives.registry import ALGORITHMS
from octavo.rl.phases.rl_step import RlStepper
from octavo.rl.rollout.experience import Experience, Rollout
from octavo.train.forward.losses import IGNORE
from tests.rl import oracle
from tests.rl.batches import batch, close, leaf
from tests.rl.test_metrics import SingleRank

SHAPES = [(6, 7, 0), (1, 1, 1), (5, 1, 2), (1, 9, 3), (16, 12, 4)]
EXTRAS = [{}, {"beta": 0.1}, {"beta": 0.1, "kl_weighted": False}, {"entropy_bonus": 0.05}]


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "corrected"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo"])
def test_policy_objectives_match_trl(name: str, shape: tuple[int, int, int], weighted: bool, extra: dict) -> None:
    rows, tokens, seed = shape
    algorithm = ALGORITHMS[name]
    data = batch(rows, tokens, seed)
    weights = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed)) * 2 if weighted else None
    clip = Clip(algorithm.clip.low, 0.1) if name == "cispo" else algorithm.clip  # clips some tokens

    trl = leaf(data.logps), leaf(data.entropy)
    # TRL's `cispo` takes the limit itself, its other losses the distance from 1; level sequence is GSPO
    loss, logged = oracle.grpo_loss(
        "grpo" if name == "gspo" else name, trl[0], data.old_logps, data.mask, data.advantages[:, 0],
        ref=data.ref_logps, weights=weights, entropy=trl[1], low=clip.low or 0.0,
        high=1 + clip.high if name == "cispo" else clip.high, level="sequence" if name == "gspo" else "token",
        longest=tokens + 3, **extra,
    )  # fmt: skip
    loss.backward()

    ours = leaf(data.logps), leaf(data.entropy)
    inputs = batch(rows, tokens, seed, logps=ours[0], entropy=ours[1], weights=weights)
    counts = Counts.of([inputs.mask], max_new_tokens=tokens + 3)
    total, figures = policy_loss(inputs, algorithm.objective(inputs, clip, counts), counts, **extra)
    total.backward()

    close(total, loss)
    close(ours[0].grad, trl[0].grad)
    if extra.get("entropy_bonus"):
        close(ours[1].grad, trl[1].grad)
        close(figures["policy_loss"], logged["policy_loss"])
    shared = figures.keys() & logged.keys()
    assert {name for name in figures if "clip" in name} == {name for name in logged if "clip" in name}
    assert "entropy" in shared and ("kl" in shared) == ("beta" in extra)
    for figure in shared:
        close(figures[figure], logged[figure])
    if rows * tokens > 100:
        high = "cispo_clip_ratio" if name == "cispo" else "clip_ratio/high_mean"
        assert logged[high] > 0, "the case must clip something"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rloo_matches_trl(shape: tuple[int, int, int]) -> None:
    rows, tokens, seed = shape
    data = batch(rows, tokens, seed, spread=0.1)
    trl, ours = leaf(data.logps), leaf(data.logps)
    loss, logged = oracle.rloo_loss(trl, data.old_logps, data.mask, data.advantages[:, 0], 0.2, 0.2)
    loss.backward()
    inputs = batch(rows, tokens, seed, spread=0.1, logps=ours, entropy=None)
    counts = Counts.of([inputs.mask], tokens)
    total, figures = policy_loss(inputs, ALGORITHMS["rloo"].objective(inputs, Clip(0.2, 0.2), counts), counts)
    total.backward()
    close(total, loss)
    close(ours.grad, trl.grad)
    for figure in figures.keys() & logged.keys():
        close(figures[figure], logged[figure])
    assert len(figures.keys() & logged.keys()) == 5


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo"])
def test_micro_batches_of_an_update_match_trl(name: str) -> None:
    """Equal micro-batches of one update have the same sum as in TRL, which divides each for accumulation."""
    algorithm, data = ALGORITHMS[name], batch(8, 6, 11)
    parts = [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    loss = sum(
        oracle.grpo_loss(
            "grpo" if name == "gspo" else name, data.logps[p], data.old_logps[p], data.mask[p],
            data.advantages[p, 0], low=algorithm.clip.low or 0.0,
            high=1 + algorithm.clip.high if name == "cispo" else algorithm.clip.high,
            level="sequence" if name == "gspo" else "token", longest=6, tokens=float(data.mask.sum()), parts=4,
        )[0]
        for p in parts
    )  # fmt: skip
    counts = Counts.of([data.mask[p] for p in parts], 6)
    total = 0.0
    for p in parts:
        fields = ("logps", "old_logps", "mask", "advantages", "entropy")
        part = batch(2, 6, **{name: getattr(data, name)[p] for name in fields})
        total = total + policy_loss(part, algorithm.objective(part, algorithm.clip, counts), counts)[0]
    close(total, loss)


def rewards(prompts: int, group: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 4, (prompts, group), generator=torch.Generator().manual_seed(seed)) / 3


@pytest.mark.parametrize(("prompts", "group"), [(4, 6), (1, 2), (7, 3)])
@pytest.mark.parametrize(("scale", "ours"), [("group", "group"), ("none", "group_unscaled"), ("batch", "batch")])
def test_advantages_match_trl(scale: str, ours: str, prompts: int, group: int) -> None:
    data = rewards(prompts, group)
    output, logged = oracle.score_completions(oracle.GRPOTrainer, data, [3] * data.numel(), scale=scale)
    close(advantages.ADVANTAGES[ours](data).flatten(), output["advantages"])
    if scale != "batch":
        close(1 - advantages.informative(data).float().mean(), logged["frac_reward_zero_std"])


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_leave_one_out_with_kl_in_the_reward_matches_trl(beta: float) -> None:
    data, b = rewards(3, 4, 1), batch(12, 5, 2)
    lengths = b.mask.sum(1).tolist()
    longest = max(lengths)
    old, ref = b.old_logps[:, :longest], b.ref_logps[:, :longest]
    output, _ = oracle.score_completions(oracle.RLOOTrainer, data, lengths, old, ref=ref, beta=beta)
    each = penalties.kl(b.old_logps, b.ref_logps, b.mask, "k1").sum(1).view(3, 4)
    close(advantages.leave_one_out(data - beta * each).flatten(), output["advantages"])


# The settings of each paper according to TRL's documentation, under TRL's names.
TRL_SETTINGS = {
    "grpo": {"loss_type": "grpo", "scale": "group", "low": 0.2, "high": 0.2},
    "dr_grpo": {"loss_type": "dr_grpo", "scale": "none", "low": 0.2, "high": 0.2},
    "dapo": {"loss_type": "dapo", "scale": "group", "low": 0.2, "high": 0.28},
    "bnpo": {"loss_type": "bnpo", "scale": "group", "low": 0.2, "high": 0.2},
    "gspo": {"loss_type": "grpo", "scale": "group", "low": 3e-4, "high": 4e-4, "level": "sequence"},
    "cispo": {"loss_type": "cispo", "scale": "group", "high": 5.0},
}


@pytest.mark.parametrize("name", [*TRL_SETTINGS, "rloo"])
def test_paper_settings_match_trl_from_rewards_to_gradients(name: str) -> None:
    algorithm, data, each = ALGORITHMS[name], batch(8, 6, 13, spread=1.5 if name == "cispo" else 0.5), rewards(2, 4, 5)
    old, ref, mask = (x[:, : int(data.mask.sum(1).max())] for x in (data.old_logps, data.ref_logps, data.mask))
    trl, ours, lengths = *(leaf(data.logps[:, : mask.shape[1]]) for _ in "ab"), mask.sum(1).tolist()
    if name == "rloo":
        output, _ = oracle.score_completions(oracle.RLOOTrainer, each, lengths, old, ref=ref, beta=0.05)
        loss, _ = oracle.rloo_loss(trl, old, mask, output["advantages"], 0.2, 0.2)
    else:
        settings = dict(TRL_SETTINGS[name])
        output, _ = oracle.score_completions(oracle.GRPOTrainer, each, lengths, scale=settings.pop("scale"))
        loss, _ = oracle.grpo_loss(
            settings.pop("loss_type"), trl, old, mask, output["advantages"], longest=6, **settings
        )
    loss.backward()
    if algorithm.kl_in == "reward":
        each = each - algorithm.beta * penalties.kl(old, ref, mask, algorithm.kl).sum(1).view(2, 4)
    computed = advantages.ADVANTAGES[algorithm.advantage](each).flatten()
    inputs, counts = Batch(ours, old, mask, computed), Counts.of([mask], 6)
    total, _ = policy_loss(inputs, algorithm.objective(inputs, algorithm.clip, counts), counts)
    total.backward()
    close(total, loss)
    close(ours.grad, trl.grad)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("action", "low", "high"), [("truncate", None, 1.2), ("mask", 0.8, 1.3), ("truncate", 0.9, 1.1)]
)
def test_corrections_and_gap_match_trl(level: str, action: str, low: float | None, high: float) -> None:
    b = batch(8, 6, 5)
    lengths = b.mask.sum(1).tolist()
    longest = max(lengths)
    old, sampled = b.old_logps[:, :longest], b.ref_logps[:, :longest]
    mask = b.mask[:, :longest]
    output, logged = oracle.score_completions(
        oracle.GRPOTrainer, rewards(2, 4), lengths, old, sampled, mode=f"{level}_{action}", low=low, high=high
    )
    how = importance.Correction(level, action, low, high)
    if action == "truncate" and low is None:
        assert how.limits == (None, high)
    weights, figures = importance.weights(old, sampled, mask, how, float(mask.sum()), 8.0)
    close(weights, output["importance_sampling_ratio"])
    figures |= importance.gap(old, sampled, mask, float(mask.sum()))
    for name in ("min", "mean", "max"):
        close(
            figures[f"sampling/importance_sampling_ratio/{name}"], logged[f"sampling/importance_sampling_ratio/{name}"]
        )
    for name in ("mean", "max"):
        close(figures[f"logp_gap_{name}"], logged[f"sampling/sampling_logp_difference/{name}"])
    assert 0 < figures["sampling/limited"] < 1


def test_truncated_completions_are_masked_as_in_trl() -> None:
    cut, lengths = [False, True, False, True], [3, 5, 5, 2]
    output, _ = oracle.score_completions(oracle.GRPOTrainer, rewards(1, 4), lengths, truncated=cut)
    full_mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    ours = penalties.mask_out_truncated(full_mask, torch.tensor(cut))
    assert ours.long().equal(output["completion_mask"]) and 0 < ours.sum() < full_mask.sum()


def test_kl_of_masked_completions_is_not_in_the_reward() -> None:
    """With masked truncated completions, the KL subtracted from rewards equals TRL's."""
    data, b, cut = rewards(3, 4, 1), batch(12, 5, 2), torch.arange(12) % 3 == 1
    lengths, t = b.mask.sum(1).tolist(), int(b.mask.sum(1).max())
    old, ref, mask = b.old_logps[:, :t], b.ref_logps[:, :t], b.mask[:, :t]
    output, logged = oracle.score_completions(
        oracle.RLOOTrainer, data, lengths, old, ref=ref, beta=0.2, truncated=[bool(x) for x in cut]
    )
    rows = Experience((*range(12),), torch.zeros_like(old), cut, torch.zeros(12), old, ref)
    labels = torch.cat([torch.full((12, 1), IGNORE), torch.where(mask, 5, IGNORE)], dim=1)
    settings = SimpleNamespace(beta=0.2, kl="k1", section=SimpleNamespace(mask_truncated=True))
    stepper = SimpleNamespace(settings=settings, world=SingleRank())
    stepper.mask = partial(RlStepper.mask, stepper)
    rollout = Rollout([], [], [], data.double().flatten().numpy())
    computed = RlStepper._subtract_kl_from_rewards(stepper, rollout, [{"labels": labels, "experience": rows}])
    close(advantages.leave_one_out(torch.from_numpy(rollout.rewards).view(3, 4)).flatten(), output["advantages"])
    close(torch.tensor(computed), logged["kl"])


@pytest.mark.parametrize(("longest", "buffer"), [(20, 4), (20, 20), (20, 0), (1, 1)])
def test_overlong_penalty_matches_trl(longest: int, buffer: int) -> None:
    from trl.rewards import get_soft_overlong_punishment

    lengths = list(range(1, longest + 4))
    trl = get_soft_overlong_punishment(longest, buffer)(completion_ids=[[0] * n for n in lengths])
    close(penalties.overlong_penalty(torch.tensor(lengths), longest, buffer), torch.tensor(trl, dtype=torch.float32))
