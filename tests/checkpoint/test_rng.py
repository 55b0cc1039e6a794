"""States of random generators survive a round trip through tensors."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from octavo.checkpoint import CheckpointError
from octavo.checkpoint.run_state import rng


def _draw() -> tuple:
    return random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(3).tolist()


def test_generators_continue_exactly():
    _draw()
    random.gauss(0, 1)  # leaves a second normal number cached, which is part of the state
    numpy.random.randn()
    states = rng.collect()
    assert all(t.dtype == torch.uint8 and t.dim() == 1 for t in states.values())
    first = _draw()
    _draw()
    assert rng.restore(states)
    assert _draw() == first


def test_rng_state_is_per_rank_and_missing_state_is_reported():
    random.seed(1)
    states = rng.collect(rank=1)
    assert set(states) >= {"rng.1.python", "rng.1.numpy", "rng.1.torch"}
    before = random.getstate()
    assert not rng.restore(states, rank=0)
    assert random.getstate() == before


@pytest.mark.parametrize("generator", ["python", "numpy", "torch"])
def test_invalid_rng_state_raises(generator):
    states = rng.collect()
    states[f"rng.0.{generator}"] = torch.tensor([91, 49], dtype=torch.uint8)  # "[1"
    with pytest.raises(CheckpointError, match="random states of rank 0 do not fit"):
        rng.restore(states)
