"""Figures of micro-batches and ranks are combined into those of the whole batch."""

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


class SingleRank:
    """A process group of one rank."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    all_reduce_max = sum


class TwoRanks:
    """Two ranks as two threads."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.barrier = threading.Barrier(2)

    def gather(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        self.barrier.wait()
        stacked = torch.stack(self.tensors[-2:])
        self.barrier.wait()
        return stacked

    def sum(self, tensor: Tensor) -> Tensor:
        return self.gather(tensor).sum(dim=0)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return self.gather(tensor).amax(dim=0)


def figures(values: list[float], count: int) -> dict[str, Tensor]:
    tensor = torch.tensor(values, dtype=torch.float64)
    padded = torch.cat([tensor, torch.tensor([-9.0, 9.0])]), torch.tensor([True] * len(values) + [False, False])
    return {"mean": tensor.sum() / count, "of/min": lowest(*padded), "of_max": highest(*padded)}


def test_last_word_of_a_name_determines_the_reduction() -> None:
    assert [kind(n) for n in ("min", "a/min", "low_min", "logp_gap_max", "minimal", "admin", "max/mean")] == [
        "min", "min", "min", "max", "sum", "sum", "sum"
    ]  # fmt: skip


def test_parts_and_ranks_equal_the_whole_batch() -> None:
    values = [[0.5, -3.0], [], [2.5], [1.0, 1.0, 4.0]]
    flat = [v for part in values for v in part]
    parts = [figures(part, len(flat)) for part in values]
    assert whole(combine_figures(parts), SingleRank()) == whole(figures(flat, len(flat)), SingleRank())
    ranks, results = TwoRanks(), {}

    def rank(number: int) -> None:
        results[number] = whole(combine_figures(parts[2 * number : 2 * number + 2]), ranks)

    threads = [threading.Thread(target=rank, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert results[0] == results[1] == {"mean": 1.0, "of/min": -3.0, "of_max": 4.0}


def test_groups_of_equal_rewards_are_counted_despite_rounding() -> None:
    """The mean of three 0.1 is not 0.1."""
    rewards = np.array([[0.1] * 3, [0.1, 0.1, 0.2], [1.0] * 3, [0.7] * 3])
    completions = [Completion(n // 3, n % 3, *[np.zeros(1)] * 3, "stop") for n in range(12)]
    rollout = Rollout([PromptSample(np.zeros(1), np.zeros(1))] * 4, completions, [""] * 12, rewards.flatten())
    results = group_figures(rollout, World(device=torch.device("cpu")))
    assert results["frac_reward_zero_std"] == 0.75
    assert results["reward_std"] == pytest.approx(rewards[1].std(ddof=1) / 4)


def test_empty_batch_gives_zero() -> None:
    empty = figures([], 1)
    assert lowest(torch.zeros(0), torch.zeros(0)) == math.inf == -highest(torch.zeros(0), torch.zeros(0))
    assert empty["of/min"] == math.inf and whole(empty, SingleRank()) == {"mean": 0.0, "of/min": 0.0, "of_max": 0.0}
