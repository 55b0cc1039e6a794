"""Asynchronous saves write the same files as synchronous ones."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from octavo import checkpoint
from octavo.checkpoint.run_state import files
from octavo.parallel import World, shard
from tests import ranks
from tests.checkpoint.models import fresh, load, optimizer_for, small, train, trained

CPU = torch.device("cpu")


def take(model, optimizer, step: int, world, **more) -> checkpoint.Snapshot:
    extra = {"shared": torch.arange(3.0), **more}
    return checkpoint.take_snapshot(
        step, model=model, optimizer=optimizer, extra=extra, counters={"rows": step}, world=world
    )


@contextmanager
def held_back(patch: pytest.MonkeyPatch):
    """No tensor reaches a file before the block ends."""
    real, go = torch.save, threading.Event()
    patch.setattr(torch, "save", lambda *given, **more: go.wait(30) and real(*given, **more))
    try:
        yield
    finally:
        go.set()


def wiped(model, optimizer) -> None:
    """As steps that follow would, write to all there is."""
    with torch.no_grad():
        for tensor in (*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())):
            tensor.zero_()


@pytest.mark.parametrize("states", ["torch", "fp8", "fp32"])
def test_asynchronous_save_writes_state_at_the_call(tmp_path: Path, monkeypatch, states: str) -> None:
    if states == "torch":
        model, optimizer = trained()
    else:
        model, optimizer = small(states, "bf16+16")
        train(model, optimizer, range(3))
    world = World()
    awaited = checkpoint.write(tmp_path / "awaited", take(model, optimizer, 3, world), world, keep=None)
    background = checkpoint.BackgroundSaver(world, CPU)
    assert background.poll(wait=True) is None
    with held_back(monkeypatch):
        background.begin(tmp_path / "beside", take(model, optimizer, 3, world))
        wiped(model, optimizer)
        assert background.has_pending_save and background.poll() is None
        assert checkpoint.steps(tmp_path / "beside") == []
    path = background.poll(wait=True)
    assert path == tmp_path / "beside" / "step_3" and not background.has_pending_save
    assert files.read_state(path) == files.read_state(awaited)  # checksums of all files are in it
    background.begin(tmp_path / "beside", take(model, optimizer, 4, world, more=torch.ones(9)))  # in the same memory
    again, other = fresh() if states == "torch" else small(states, "bf16+16", seed=9)
    assert load(background.poll(wait=True), again, other).step == 4
    assert all(not value.any() for value in again.state_dict().values())
    background.close()


def test_full_disk_is_reported_and_existing_checkpoints_are_kept(tmp_path: Path, monkeypatch) -> None:
    model, optimizer = trained()
    world = World()
    background = checkpoint.BackgroundSaver(world, CPU)
    background.begin(tmp_path, take(model, optimizer, 3, world))
    background.poll(wait=True)

    def full(*given, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        background.begin(tmp_path, take(model, optimizer, 4, world))
        with pytest.raises(checkpoint.CheckpointError, match="disk is full .*Existing checkpoints are untouched"):
            background.poll(wait=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step_3"]
    background.begin(tmp_path, take(model, optimizer, 4, world))
    assert background.poll(wait=True) == tmp_path / "step_4"


class Blocks:
    def layers(self, model):
        return [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]


def _beside_two(world: World, folder: str) -> dict:
    """Save both ways; while rank 1 writes late, both train on, with collectives of their own."""
    here, mine = Path(folder), slice(world.rank, None, world.size)
    model, _ = small("fp8", "bf16+16")
    shard(model, Blocks(), world)
    optimizer = optimizer_for(model, states="fp8", master="bf16+16")
    train(model, optimizer, range(3), mine)
    awaited = checkpoint.write(here / "awaited", take(model, optimizer, 3, world), world, keep=None)
    background = checkpoint.BackgroundSaver(world, CPU)
    with pytest.MonkeyPatch.context() as patch:
        with held_back(patch) if world.rank else patch.context():
            background.begin(here / "beside", take(model, optimizer, 3, world))
            train(model, optimizer, range(3, 6), mine)
            waits = background.poll() is None
        path = background.poll(wait=True)
    same = files.read_state(path) == files.read_state(awaited)

    with pytest.MonkeyPatch.context() as patch:
        if world.rank:
            patch.setattr(torch, "save", _full)
        background.begin(here / "beside", take(model, optimizer, 6, world))
        try:
            background.poll(wait=True)
            told = ""
        except checkpoint.CheckpointError as error:
            told = str(error)
    left = sorted(os.listdir(here / "beside"))
    background.close()
    return {"same": same, "waits": waits, "told": told, "left": left, "sum": world.gather_objects(world.rank)}


def _full(*given, **more):
    raise OSError(28, "No space left on device")


def test_two_ranks_save_asynchronously(tmp_path: Path) -> None:
    for answer in ranks.run(_beside_two, 2, str(tmp_path)):
        assert answer["same"] and answer["waits"]
        assert "the disk is full" in answer["told"] and answer["left"] == ["step_3"]
        assert answer["sum"] == [0, 1]
