"""Figures of parts and ranks become the whole batch's."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.data import PromptSample
from octavo.generation import Completion
from octavo.parallel import World
from octavo.rl.objectives.metrics import combine_figures, highest, kind, lowest, whole
from octavo.rl.rollout.experience import Rollout
from octavo.rl.rollout.rollout import group_figures


class Alone:
    """One rank."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    all_reduce_max = sum


class Two:
    """Two ranks as two threads."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.barrier = threading.Barrier(2)

    def both(self, tensor: Tensor) -> Tensor:
        self.given.append(tensor)
        self.barrier.wait()
        both = torch.stack(self.given[-2:])
        self.barrier.wait()
        return both

    def sum(self, tensor: Tensor) -> Tensor:
        return self.both(tensor).sum(dim=0)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return self.both(tensor).amax(dim=0)


def figures(values: list[float], count: int) -> dict[str, Tensor]:
    given = torch.tensor(values, dtype=torch.float64)
    known = torch.cat([given, torch.tensor([-9.0, 9.0])]), torch.tensor([True] * len(values) + [False, False])
    return {"mean": given.sum() / count, "of/min": lowest(*known), "of_max": highest(*known)}


def test_the_last_word_of_a_name_says_how_parts_are_put_together() -> None:
    assert [kind(n) for n in ("min", "a/min", "low_min", "logp_gap_max", "minimal", "admin", "max/mean")] == [
        "min", "min", "min", "max", "sum", "sum", "sum"
    ]  # fmt: skip


def test_parts_and_ranks_give_what_the_whole_gives() -> None:
    values = [[0.5, -3.0], [], [2.5], [1.0, 1.0, 4.0]]
    flat = [v for part in values for v in part]
    parts = [figures(part, len(flat)) for part in values]
    assert whole(combine_figures(parts), Alone()) == whole(figures(flat, len(flat)), Alone())
    ranks, found = Two(), {}

    def rank(number: int) -> None:
        found[number] = whole(combine_figures(parts[2 * number : 2 * number + 2]), ranks)

    threads = [threading.Thread(target=rank, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert found[0] == found[1] == {"mean": 1.0, "of/min": -3.0, "of_max": 4.0}


def test_groups_of_equal_rewards_are_counted_whatever_their_sum_rounds_to() -> None:
    """The mean of three 0.1 is not 0.1."""
    rewards = np.array([[0.1] * 3, [0.1, 0.1, 0.2], [1.0] * 3, [0.7] * 3])
    every = [Completion(n // 3, n % 3, *[np.zeros(1)] * 3, "stop") for n in range(12)]
    rollout = Rollout([PromptSample(np.zeros(1), np.zeros(1))] * 4, every, [""] * 12, rewards.flatten())
    found = group_figures(rollout, World(device=torch.device("cpu")))
    assert found["frac_reward_zero_std"] == 0.75
    assert found["reward_std"] == pytest.approx(rewards[1].std(ddof=1) / 4)


def test_of_nothing_there_is_zero() -> None:
    empty = figures([], 1)
    assert lowest(torch.zeros(0), torch.zeros(0)) == math.inf == -highest(torch.zeros(0), torch.zeros(0))
    assert empty["of/min"] == math.inf and whole(empty, Alone()) == {"mean": 0.0, "of/min": 0.0, "of_max": 0.0}
