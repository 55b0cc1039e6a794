"""Two ranks save and one process resumes, and vice versa; an error on one rank is raised on both."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from octavo import checkpoint
from octavo.parallel import World, shard
from tests import ranks
from tests.checkpoint.models import Model, fresh, load, optimizer_for, same, save, train, trained


class Blocks:
    def layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]


def _sharded(world: World) -> tuple[Model, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Model()
    shard(model, Blocks(), world)
    return model, optimizer_for(model)


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> list:
    """Parameters and optimizer state of a sharded run as lists, gathered."""
    whole = ranks.whole_state(model, world)
    state = [whole["embed.weight"].tolist()] if world.is_main else whole
    moments = []
    for parameter in model.parameters():
        for key, value in sorted(optimizer.state[parameter].items() if parameter in optimizer.state else ()):
            moments.append([key, (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()])
    return [list(state), moments] if world.is_main else [[], moments]


def _work(world: World, folder: str) -> dict:
    here = Path(folder)
    mine = slice(world.rank, None, world.size)
    model, optimizer = _sharded(world)
    train(model, optimizer, range(3), mine)
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))  # as after an evaluation: the root's weights lie gathered
    extra = {**checkpoint.rng.collect(world.rank), "shared": torch.tensor([4.0])}
    path = save(here / "two", 3, model, optimizer, extra=extra, world=world, rows=world.rank + 7)
    want = _whole(model, optimizer, world)
    drawn = torch.rand(2).tolist()
    straight = train(model, optimizer, range(3, 5), mine)

    model, optimizer = _sharded(world)
    got = load(checkpoint.latest(here / "two", world), model, optimizer, world)
    answer = {
        "same": _whole(model, optimizer, world) == want,
        "rng": checkpoint.rng.restore(got.extra, world.rank) and torch.rand(2).tolist() == drawn,
        "resumed": train(model, optimizer, range(3, 5), mine) == straight,
        "counters": got.counters,
        "ranks": got.ranks,
        "path": str(path),
        "straight": float(world.sum(torch.tensor(straight, dtype=torch.float64))[0]),
    }

    model, optimizer = _sharded(world)
    load(here / "one" / "step_3", model, optimizer, world)
    answer["from_one"] = _whole(model, optimizer, world)

    answer["refused"] = []
    for damage in ("__1_0.distcp", "state.json"):
        if world.is_main:
            (path / damage).rename(path / "hidden")
        world.barrier()
        try:
            load(path, model, optimizer, world)
        except checkpoint.CheckpointError as error:
            answer["refused"].append(str(error))
        world.barrier()
        if world.is_main:
            (path / "hidden").rename(path / damage)
        world.barrier()
    real = torch.save
    if world.rank == 1:
        torch.save = _full
    try:
        save(here / "two", 4, model, optimizer, world=world)
    except checkpoint.CheckpointError as error:
        answer["refused"].append(str(error))
    torch.save = real
    world.barrier()
    answer["left"] = sorted(entry.name for entry in (here / "two").iterdir())
    return answer


def _full(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_number_of_ranks_may_change_between_save_and_load(tmp_path):
    model, optimizer = trained(3)
    model.seen.zero_()
    save(tmp_path / "one", 3, model, optimizer)
    answers = ranks.run(_work, 2, str(tmp_path))
    for answer in answers:
        assert answer["same"] and answer["rng"] and answer["resumed"]
        assert answer["counters"] == {"rows": 7} and answer["ranks"] == 2
        assert "__1_0.distcp is missing" in answer["refused"][0]
        assert "state.json is missing" in answer["refused"][1]
        assert "No space left on device" in answer["refused"][2]
        assert answer["left"] == ["step_3"]
    assert answers[0]["path"] == str(tmp_path / "two" / "step_3")

    # One process' state came back on two ranks ...
    moments = [[k, v.tolist()] for p in model.parameters() for k, v in sorted(optimizer.state.get(p, {}).items())]
    assert all(answer["from_one"][1] == moments for answer in answers)
    assert answers[0]["from_one"][0] == [model.embed.weight.tolist()]
    # ... and the two ranks' comes back in one, which then goes on as they did.
    other, other_optimizer = fresh()
    got = load(answers[0]["path"], other, other_optimizer)
    assert {name.split(".")[1] for name in got.extra if name.startswith("rng")} == {"0", "1"}
    assert same(got.extra["shared"], torch.tensor([4.0]))
    assert not checkpoint.rng.restore(got.extra, rank=2)
    for (name, mine), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=name)
    assert abs(train(other, other_optimizer, range(3, 4))[0] - answers[0]["straight"]) < 1e-5


def _die_in_mid_save(world: World, folder: str) -> None:
    model, optimizer = _sharded(world)
    save(folder, 3, model, optimizer, world=world)
    if world.rank == 1:
        torch.save = lambda *args, **kwargs: os._exit(0)  # the writer calls it for its first tensor
    try:
        save(folder, 4, model, optimizer, world=world)
    except checkpoint.CheckpointError as error:
        (Path(folder) / "told").write_text(str(error))
    os._exit(0)


@pytest.mark.long
def test_rank_that_dies_during_save_loses_only_that_save(tmp_path):
    with pytest.raises(FileNotFoundError):  # neither rank lives to write its answer
        ranks.run(_die_in_mid_save, 2, str(tmp_path))
    assert "could not write the checkpoint" in (tmp_path / "told").read_text()
    assert checkpoint.steps(tmp_path) == [3]
    model, optimizer = fresh()
    assert load(checkpoint.latest(tmp_path, World()), model, optimizer).step == 3
