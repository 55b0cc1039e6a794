"""Advantages: how much better a completion is than the policy's other completions of the same prompt.

Rewards are ``[P, G]``: P prompts, G completions each, of the whole batch (a few numbers, which the ranks gather first).
Each function returns ``[P, G]`` in fp32. Where all rewards of a group are equal, its advantages are exactly 0: the mean
of equal numbers may differ from them in the last bit, and a division by a spread of 0 + eps would turn that bit into a
gradient.

Advantages over tokens, which need a critic, are in ``octavo/rl/objectives/gae.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-4  # added to standard deviations; the value of GRPO's reference code and of TRL


def group(rewards: Tensor, scale: bool = True) -> Tensor:
    """GRPO (DeepSeekMath, arXiv 2402.03300, 4.1.2): (r - mean of the group) / (its standard deviation + eps).

    Dr. GRPO (arXiv 2503.20783, 3.1) omits the division (``scale=False``), because it gives more weight to prompts that
    are nearly solved or nearly hopeless. The deviation is the sample deviation (G - 1), and 0 for a single completion.
    """
    wide = _to_valid_fp64(rewards)
    centred = wide - wide.mean(dim=1, keepdim=True)
    return _zero_where_equal(centred / (_deviation(wide, dim=1) + EPS) if scale else centred, wide)


def group_unscaled(rewards: Tensor) -> Tensor:
    """Dr. GRPO: :func:`group` without the division."""
    return group(rewards, scale=False)


def batch(rewards: Tensor) -> Tensor:
    """Lite PPO (arXiv 2508.08221): the group's mean as the baseline, the whole batch's deviation as the scale."""
    wide = _to_valid_fp64(rewards)
    centred = wide - wide.mean(dim=1, keepdim=True)
    return _zero_where_equal(centred / (_deviation(wide.flatten(), dim=0) + EPS), wide)


def leave_one_out(rewards: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740): r minus the mean of the group's *other* rewards. Needs two completions."""
    wide = _to_valid_fp64(rewards)
    others = wide.shape[1] - 1
    if others < 1:
        raise ValueError(
            f"leave-one-out compares a completion with the others of its prompt, but rewards {list(rewards.shape)} "
            "have 1 per prompt; set rl.group to 2 or more"
        )
    return _zero_where_equal(wide - (wide.sum(dim=1, keepdim=True) - wide) / others, wide)


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "group": group,
    "group_unscaled": group_unscaled,
    "batch": batch,
    "leave_one_out": leave_one_out,
}


def informative(rewards: Tensor) -> Tensor:
    """DAPO's dynamic sampling (arXiv 2503.14476, eq. 11): bool [P], the groups whose rewards are not all equal.

    The other groups have no gradient; DAPO replaces them by new prompts until the batch is full.
    """
    wide = _to_valid_fp64(rewards)
    return wide.amax(dim=1) != wide.amin(dim=1)


def _to_valid_fp64(rewards: Tensor) -> Tensor:
    """Convert the rewards to fp64, in which the rounding of sums is negligible. Raises ValueError for a wrong shape and
    for values that are not finite."""
    if rewards.dim() != 2 or not rewards.numel():
        raise ValueError(f"rewards are [prompts, completions of each], at least one; found {list(rewards.shape)}")
    if not bool(rewards.isfinite().all()):
        bad = [tuple(place) for place in (~rewards.isfinite()).nonzero()[:3].tolist()]
        raise ValueError(f"rewards must be finite; at (prompt, completion) {bad}: {[float(rewards[b]) for b in bad]}")
    return rewards.double()


def _deviation(wide: Tensor, dim: int) -> Tensor:
    if wide.shape[dim] < 2:
        return torch.zeros((), dtype=wide.dtype, device=wide.device)
    return wide.std(dim=dim, keepdim=True)


def _zero_where_equal(advantages: Tensor, wide: Tensor) -> Tensor:
    equal = wide.amax(dim=1, keepdim=True) == wide.amin(dim=1, keepdim=True)
    return torch.where(equal, 0.0, advantages).float()
