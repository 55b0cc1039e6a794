"""FP8 optimizer states and split weights are restored exactly on any number of ranks; other forms are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from octavo import checkpoint
from octavo.fp8.optim import layout
from octavo.fp8.weights.shards import span
from octavo.parallel import World, shard
from tests import ranks
from tests.checkpoint.models import fresh, load, optimizer_for, save, small, train, trained


def _bits(tensor: torch.Tensor) -> list:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist()


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Weights, states and settings, down to the bits."""
    names = {p: name for name, p in model.named_parameters()}
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    states = {
        f"{names[p]}.{key}": [str(value.dtype), _bits(value)]
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }
    return {"model": {n: _bits(v) for n, v in model.state_dict().items()}, "states": states, "settings": settings}


@pytest.mark.parametrize(
    ("states", "master"),
    [*(("fp8", master) for master in ("fp32", "bf16+16", "bf16+sr")),
     ("coat", "bf16+16"), ("bf16", "bf16+sr"), ("fp32", "fp32")],
)  # fmt: skip
def test_run_resumes_bit_for_bit(tmp_path, states, master):
    model, optimizer = small(states, master)
    train(model, optimizer, range(3))
    path = save(tmp_path, 3, model, optimizer)
    want = _everything(model, optimizer)
    straight = train(model, optimizer, range(3, 6))
    model, optimizer = small(states, master, seed=9, lr=0.5)
    load(path, model, optimizer)
    assert _everything(model, optimizer) == want
    assert train(model, optimizer, range(3, 6)) == straight


def test_bf16_model_with_fp32_masters_resumes_bit_for_bit(tmp_path):
    model, _ = small()
    optimizer = optimizer_for(model, states="fp8", master="fp32")
    train(model, optimizer, range(2))
    path = save(tmp_path, 2, model, optimizer)
    other, _ = small(seed=9)
    other_optimizer = optimizer_for(other, states="fp8", master="fp32")
    load(path, other, other_optimizer)
    assert _everything(other, other_optimizer) == _everything(model, optimizer)
    assert any("master" in state for state in other_optimizer.state.values())


def test_torch_adamw_checkpoints_load_with_fp32_states_and_back(tmp_path):
    model, optimizer = trained(3)
    path = save(tmp_path, 3, model, optimizer)
    straight = train(model, optimizer, range(3, 6))
    other, other_optimizer = fresh(states="fp32", master="fp32")
    load(path, other, other_optimizer)
    assert "amsgrad" not in other_optimizer.param_groups[0] and other_optimizer.param_groups[0]["lr"] == 1e-2
    back = save(tmp_path, 4, other, other_optimizer)
    assert train(other, other_optimizer, range(3, 6)) == pytest.approx(straight, rel=1e-5)
    model, optimizer = fresh()
    load(back, model, optimizer)
    assert train(model, optimizer, range(3, 6)) == straight


@pytest.mark.parametrize(
    ("saved", "asked", "words"),
    [
        (("fp32", "fp32"), ("fp8", "fp32"), "optimizer.states: fp32, but this run has optimizer.states: fp8"),
        (("fp8", "fp32"), ("bf16", "fp32"), "Continue with optimizer.states=fp8, or start a new run from its weights"),
        (
            ("fp8", "bf16+16"),
            ("fp8", "bf16+sr"),
            r"optimizer.master: bf16\+16, .* this run has optimizer.master: bf16\+sr",
        ),
        (("fp8", "bf16+16"), ("fp8", "fp32"), r"optimizer.master: bf16\+16, .* this run has optimizer.master: fp32"),
        (None, ("fp8", "fp32"), "optimizer.states: fp32, but this run has optimizer.states: fp8"),
        (("fp8", "fp32"), None, "optimizer.states: fp8, but this run has optimizer.states: fp32"),
    ],
)
def test_other_state_form_is_rejected_with_a_fix(tmp_path, saved, asked, words):
    def made(kind):
        if kind is not None:
            return small(*kind)
        model, _ = small("fp32", "fp32")
        return model, optimizer_for(model)

    model, optimizer = made(saved)
    train(model, optimizer, range(1))
    path = save(tmp_path, 1, model, optimizer)
    target, target_optimizer = made(asked)
    train(target, target_optimizer, range(2))
    before = _everything(target, target_optimizer)
    with pytest.raises(checkpoint.CheckpointError, match=words):
        load(path, target, target_optimizer)
    assert _everything(target, target_optimizer) == before


def test_missing_or_resized_state_is_reported(tmp_path):
    model, optimizer = small()
    train(model, optimizer, range(1))
    p = optimizer.param_groups[0]["params"][0]
    scale = optimizer.state[p].pop("exp_avg_scale")
    with pytest.raises(checkpoint.CheckpointError, match=r"of embed.weight, but .* has exp_avg_codes, exp_avg_scale"):
        load(save(tmp_path, 1, model, optimizer), *small())
    optimizer.state[p]["exp_avg_scale"] = scale[1:].clone()
    with pytest.raises(checkpoint.CheckpointError, match=r"embed.weight.exp_avg_scale is float32 \[2\], .* \[3\]"):
        load(save(tmp_path, 2, model, optimizer), *small())


def test_states_take_only_their_bytes_on_disk(tmp_path):
    model, optimizer = small("fp8", "bf16+sr")
    before = save(tmp_path, 0, model, optimizer)
    train(model, optimizer, range(1))
    after = save(tmp_path, 1, model, optimizer)
    grown = sum(f.stat().st_size for f in after.iterdir()) - sum(f.stat().st_size for f in before.iterdir())
    elements = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
    tensors = sum(len(state) for state in optimizer.state.values())
    assert grown < 2.1 * elements + 2500 * tensors  # each tensor is a small archive


class Blocks:
    def layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]


def _sharded(world: World, kind: tuple[str, str], seed: int = 0):
    model, _ = small(*kind, seed=seed)
    shard(model, Blocks(), world)
    return model, optimizer_for(model, states=kind[0], master=kind[1])


KINDS = [("fp8", "bf16+16"), ("coat", "fp32")]


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """This rank's piece of everything: name -> [first element or row of the whole, bits]."""
    found = {}
    for name, p in model.named_parameters():
        mine = span(p)
        for key, value in {"weight": p, **optimizer.state.get(p, {})}.items():
            at = layout.local_groups(mine)[0] if key in layout.PER_GROUP else mine.start
            found[f"{name}.{key}"] = [at, _bits(value.to_local() if hasattr(value, "to_local") else value)]
    return found


def _save_and_go_on(world: World, folder: str) -> dict:
    """Save on these ranks, go on, and again from the checkpoint."""
    answer = {}
    mine = slice(world.rank, None, world.size)
    for kind in KINDS:
        model, optimizer = _sharded(world, kind)
        train(model, optimizer, range(3), mine)
        path = save(Path(folder) / kind[0], 3, model, optimizer, world=world)
        parts = _parts(model, optimizer)
        straight = train(model, optimizer, range(3, 5), mine)
        model, optimizer = _sharded(world, kind, seed=9)
        load(path, model, optimizer, world)
        answer[kind[0]] = {
            "same": _parts(model, optimizer) == parts,
            "resumed": train(model, optimizer, range(3, 5), mine) == straight,
            "parts": parts,
        }
    return answer


def _load_on(world: World, folder: str) -> dict:
    answer = {}
    for kind in KINDS:
        model, optimizer = _sharded(world, kind, seed=9)
        load(Path(folder) / "one" / kind[0] / "step_2", model, optimizer, world)
        answer[f"one {kind[0]}"] = _parts(model, optimizer)
        model, optimizer = _sharded(world, kind, seed=9)
        load(Path(folder) / kind[0] / "step_3", model, optimizer, world)
        answer[kind[0]] = _parts(model, optimizer)
        train(model, optimizer, range(3, 4), slice(world.rank, None, world.size))
        save(Path(folder) / "again" / kind[0], 4, model, optimizer, world=world)
    return answer


def _agree(parts: list[dict], whole: dict) -> None:
    """That every rank's pieces are where they belong in the whole's bits, and that together they are all of it."""
    for name, (_, bits) in whole.items():
        covered = 0
        pieces = [part[name] for part in parts]
        if name.endswith(".step"):
            assert all(piece[1] == bits for piece in pieces), name
            continue
        elements = ELEMENTS[name.rpartition(".")[0]]
        rows = -(-elements // 128) if name.rpartition(".")[2] in layout.PER_GROUP else elements
        size = len(bits) // rows
        for at, piece in pieces:
            assert piece == bits[at * size : at * size + len(piece)], name
            covered = max(covered, at * size + len(piece))
        assert covered == len(bits), name


ELEMENTS = {
    "embed.weight": 360,
    "blocks.0.weight": 1600,
    "blocks.1.weight": 1600,
    "blocks.0.bias": 40,
    "blocks.1.bias": 40,
}


@pytest.mark.parametrize(
    ("first", "second"), [pytest.param(2, 3, marks=pytest.mark.long), pytest.param(3, 2, marks=pytest.mark.long)]
)
def test_any_number_of_ranks_reads_any_checkpoint(tmp_path, first, second):
    for kind in KINDS:
        model, optimizer = small(*kind)
        train(model, optimizer, range(2))
        save(tmp_path / "one" / kind[0], 2, model, optimizer)
    wrote = ranks.run(_save_and_go_on, first, str(tmp_path))
    read = ranks.run(_load_on, second, str(tmp_path))
    for kind in KINDS:
        model, optimizer = small(*kind, seed=9)
        load(tmp_path / "one" / kind[0] / "step_2", model, optimizer)
        _agree([answer[f"one {kind[0]}"] for answer in read], _parts(model, optimizer))
        assert all(answer[kind[0]]["same"] and answer[kind[0]]["resumed"] for answer in wrote)
        model, optimizer = small(*kind, seed=9)
        load(tmp_path / kind[0] / "step_3", model, optimizer)
        whole = _parts(model, optimizer)
        assert any(key in name for name in whole for key in layout.PER_GROUP)
        _agree([answer[kind[0]]["parts"] for answer in wrote], whole)
        _agree([answer[kind[0]] for answer in read], whole)
        load(tmp_path / "again" / kind[0] / "step_4", model, optimizer)  # and what those wrote
        train(model, optimizer, range(4, 5))
