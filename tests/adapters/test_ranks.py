"""Adapters under FSDP2: attached equally on all ranks, gathered to PEFT's file, loaded shard by shard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from octavo import adapters, models
from octavo.parallel import World, shard
from tests import ranks
from tests.adapters.conftest import inputs, lora, quantized


def _build(path: str) -> tuple[nn.Module, models.Family]:
    model = models.load(path, dtype=torch.float32)
    family = models.describe(model)
    quantized(model, "block", "blockwise")
    adapters.attach(model, family, lora(rank=3, targets=("foundation",), dora=True), seed=2)
    return model, family


def _steps(model: nn.Module, family: models.Family, share: float) -> None:
    """Two steps of a loss of which the first rank has all, so that the sum over ranks is exact."""
    batch = inputs(model, family)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        (model(**batch, labels=batch["input_ids"], use_cache=False).loss * share).backward()
        optimizer.step()
        optimizer.zero_grad()


def _rank(world: World, path: str, target: str) -> dict[str, bool]:
    single, family = _build(path)
    first = {name: value.clone() for name, value in adapters.adapter_state(single).items()}
    _steps(single, family, 1.0)
    expected = adapters.adapter_state(single)
    model, _ = _build(path)
    shard(model, family, world)
    _steps(model, family, float(world.rank == 0))
    found = adapters.adapter_state(model)
    checks = {
        "names": found.keys() == expected.keys(),
        "trained": all(torch.allclose(found[n], expected[n], atol=1e-6) for n in expected),
        "moved": not any(torch.equal(found[n], first[n]) for n in first),
    }
    if world.rank == 0:
        adapters.save(model, Path(target) / "adapter", path, state=found)
    adapters.load_adapter_state(model, first)
    again = adapters.adapter_state(model)
    checks["filled"] = all(torch.equal(again[n], first[n]) for n in first)
    world.barrier()
    read = models.load(path, dtype=torch.float32)
    adapters.load(read, Path(target) / "adapter")
    state = adapters.adapter_state(read)
    checks["saved"] = all(torch.equal(state[n], found[n]) for n in found)
    return checks


@pytest.mark.long
def test_two_ranks_train_like_one(folder, tmp_path: Path) -> None:
    """With DoRA, which has all three kinds of parameters, and a rank that two ranks cannot halve."""
    for checks in ranks.run(_rank, 2, str(folder("qwen3")), str(tmp_path)):
        assert all(checks.values()), checks
