"""Asynchronous checkpoints of tensors on a GPU: pinned copies of the state at the call."""

from pathlib import Path

import pytest
import torch
from torch import nn

from octavo import checkpoint, fp8
from octavo.fp8.optim import OffloadedAdamW
from octavo.parallel import World

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("kind", [fp8.AdamW, OffloadedAdamW])
def test_copy_is_pinned_and_consistent(tmp_path: Path, kind: type[fp8.AdamW]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def made() -> tuple[nn.Module, fp8.AdamW]:
        model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(4))).to(device, torch.bfloat16)
        return model, kind(model.parameters(), lr=1e-2, states="fp8", master="bf16+16")

    def values(model: nn.Module, optimizer: fp8.AdamW) -> list[torch.Tensor]:
        states = [value for p in model.parameters() for _, value in sorted(optimizer.state[p].items())]
        return [tensor.detach().to("cpu", copy=True) for tensor in (*model.parameters(), *states)]

    model, optimizer = made()

    def step() -> None:
        model(torch.ones(64, 1000, device=device, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    world = World(device=device)
    background = checkpoint.BackgroundSaver(world, device)
    for number in (1, 2, 3):
        step()
        moment = checkpoint.take_snapshot(number, model=model, optimizer=optimizer, extra={}, counters={}, world=world)
        expected = values(model, optimizer)
        background.begin(tmp_path, moment)
        assert background._staging._buffer.is_pinned()
        for _ in range(5):
            step()
        path = background.poll(wait=True)
        again, theirs = made()
        checkpoint.load(path, model=again, optimizer=theirs, world=world)
        assert all(map(torch.equal, values(again, theirs), expected))
    background.close()
