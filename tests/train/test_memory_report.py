"""Memory by kind: what counts as an activation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from octavo.train.step.memory_report import Memory

FAMILY = SimpleNamespace(layers=lambda model: [], component_of=lambda name: None)


def saved_bytes(model: nn.Module) -> int:
    counted = Memory(model, FAMILY)
    with counted.forward():
        loss = model(torch.ones(3, 64)).square().sum()
    loss.backward()
    return counted.activations


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(3)])


@pytest.mark.parametrize("reshard", [True, False])
def test_weights_that_fsdp_gathers_are_no_activations(reshard: bool):
    want = saved_bytes(build())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        model = build()
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        assert saved_bytes(model) == want < 64 * 64 * 4  # less than one weight
        assert saved_bytes(model) == want
    finally:
        dist.destroy_process_group()
