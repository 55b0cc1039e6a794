"""A run state is restored bit for bit, or fails and falls back to the previous checkpoint."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.base.atomic_write import why_no_space
from octavo.checkpoint import CheckpointError, latest, remove_leftovers, steps
from octavo.checkpoint.run_state import files as ck_files
from tests import ranks
from tests.checkpoint.models import Model, One, fresh, load, optimizer_for, same, save, snapshot, train, trained
from tests.fuzz import mutate


def test_checkpoint_round_trip_is_bit_exact(tmp_path):
    model, optimizer = trained()
    extra = {"rng.0.torch": torch.get_rng_state(), "amax": torch.tensor([1e-7, float("inf")]), "none": torch.zeros(0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = save(tmp_path, 3, model, optimizer, extra=extra, rows=12, nested={"a": [1, 2.5, None]})
    want = snapshot(model, optimizer)
    other, other_optimizer = fresh()
    got = load(path, other, other_optimizer)
    assert same(snapshot(other, other_optimizer), want)
    assert (got.step, got.ranks, got.counters) == (3, 1, {"rows": 12, "nested": {"a": [1, 2.5, None]}})
    assert same(got.extra, extra)
    assert other.head.weight is other.embed.weight
    assert other_optimizer.param_groups[0]["betas"] == (0.9, 0.95)


def test_resumed_losses_equal_uninterrupted_losses(tmp_path):
    model, optimizer = trained(3)
    path = save(tmp_path, 3, model, optimizer)
    straight = train(model, optimizer, range(3, 8))
    model, optimizer = fresh()
    load(path, model, optimizer)
    assert train(model, optimizer, range(3, 8)) == straight


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}, {"amsgrad": True}])
def test_adamw_implementations_can_change_on_resume(tmp_path, settings):
    model, optimizer = trained(2, **settings)
    path = save(tmp_path, 2, model, optimizer)
    other, other_optimizer = fresh(**settings)
    load(path, other, other_optimizer)
    assert same(snapshot(other, other_optimizer), snapshot(model, optimizer))
    if "amsgrad" not in settings:  # how the step is computed belongs to the machine: the state fits the plain form
        other, other_optimizer = fresh()
        load(path, other, other_optimizer)
        assert other_optimizer.param_groups[0]["fused"] is None
        train(other, other_optimizer, range(2, 3))


def test_checkpoint_before_first_step_has_no_optimizer_state(tmp_path):
    model, optimizer = trained(0)
    other, other_optimizer = trained(2)
    load(save(tmp_path, 0, model, optimizer), other, other_optimizer)
    assert same(snapshot(other, other_optimizer), snapshot(model, optimizer))


def test_tensor_learning_rate_stays_a_tensor(tmp_path):
    model, optimizer = trained(1, lr=torch.tensor(0.3))
    other, other_optimizer = fresh(lr=torch.tensor(0.9))
    load(save(tmp_path, 1, model, optimizer), other, other_optimizer)
    lr = other_optimizer.param_groups[0]["lr"]
    assert torch.is_tensor(lr) and lr.item() == optimizer.param_groups[0]["lr"].item()


def test_model_can_be_loaded_without_optimizer(tmp_path):
    model, optimizer = trained()
    other = Model()
    load(save(tmp_path, 3, model, optimizer), other, None)
    assert same(other.state_dict(), model.state_dict())


def test_checkpoint_contains_only_tensors_and_json_without_paths(tmp_path):
    path = save(tmp_path / "somewhere", 3, *trained())
    assert sorted(entry.name for entry in path.iterdir()) == [".metadata", "__0_0.distcp", "state.json"]
    assert not [entry for entry in path.iterdir() if b"somewhere" in entry.read_bytes()]
    document = json.loads((path / "state.json").read_text())
    assert document["groups"][1]["settings"]["weight_decay"] == 0.0
    assert document["groups"][1]["parameters"] == ["blocks.0.bias", "blocks.1.bias"]


def test_prune_keeps_newest_and_drops_abandoned_steps(tmp_path):
    model, optimizer = trained()
    for step in (1, 2, 3, 10):
        save(tmp_path, step, model, optimizer, keep=2)
    assert steps(tmp_path) == [3, 10]
    save(tmp_path, 4, model, optimizer, keep=2)  # the run went back to 3 and goes on from there
    assert steps(tmp_path) == [3, 4]
    assert latest(tmp_path, One()).name == "step_4"
    with pytest.raises(CheckpointError, match="keep=0"):
        save(tmp_path, 5, model, optimizer, keep=0)


def test_saving_a_step_again_replaces_it(tmp_path):
    model, optimizer = trained()
    save(tmp_path, 3, model, optimizer, rows=1)
    path = save(tmp_path, 3, model, optimizer, rows=2)
    assert load(path, *fresh()).counters == {"rows": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_3"]


def test_latest_returns_none_without_checkpoints_and_load_raises(tmp_path):
    assert latest(tmp_path / "never", One()) is None
    assert latest(tmp_path, One()) is None
    save(tmp_path, 3, *trained())
    with pytest.raises(CheckpointError, match=r"no checkpoint .*step_7; .* contains step_3"):
        load(tmp_path / "step_7", *fresh())


def _cut(path):
    path.write_bytes(path.read_bytes()[:-10])


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _edit(path):
    path.write_text(path.read_text().replace('"rows": 5', '"rows": 6'))


def _placed(path, what):
    mutate.replace_file(None, path, what)


DAMAGE = [
    ("__0_0.distcp", _cut, r"__0_0\.distcp has \d+ bytes instead of \d+"),
    ("__0_0.distcp", _flip, r"__0_0\.distcp is corrupt"),
    ("__0_0.distcp", os.remove, r"__0_0\.distcp is missing"),
    (".metadata", _cut, r"\.metadata has \d+ bytes instead of"),
    (".metadata", _flip, r"\.metadata is corrupt"),
    (".metadata", os.remove, r"\.metadata is missing"),
    ("state.json", _cut, r"state\.json is damaged"),
    ("state.json", lambda p: _placed(p, "pipe"), r"state\.json is a named pipe"),
    ("state.json", lambda p: _placed(p, "device"), r"state\.json is a device"),
    ("state.json", lambda p: _placed(p, "loop"), r"state\.json cannot be read: Too many levels"),
    (".metadata", lambda p: _placed(p, "folder"), r"\.metadata (has \d+ bytes|is a folder)"),
    ("__0_0.distcp", lambda p: _placed(p, "pipe"), r"__0_0\.distcp has 0 bytes"),
    ("state.json", _edit, r"state\.json was changed after it was written"),
    ("state.json", os.remove, r"state\.json is missing: .* not a checkpoint that Octavo finished"),
    ("state.json", lambda p: p.write_text("[]"), r"state\.json is damaged"),
    ("state.json", lambda p: p.write_text("[1]"), r"state\.json is damaged"),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGE)
def test_damage_is_reported_and_previous_checkpoint_is_used(tmp_path, name, damage, words):
    model, optimizer = trained()
    save(tmp_path, 3, model, optimizer, rows=4)
    broken = save(tmp_path, 4, model, optimizer, rows=5)
    damage(broken / name)
    target, target_optimizer = fresh()
    before = snapshot(target, target_optimizer)
    with pytest.raises(CheckpointError, match=words):
        load(broken, target, target_optimizer)
    assert same(snapshot(target, target_optimizer), before), "a refused checkpoint changes nothing"
    messages: list[str] = []
    found = latest(tmp_path, One(), messages.append)
    assert load(found, target, target_optimizer).step == 3
    assert len(messages) == 1 and messages[0].startswith("checkpoint step_4 is skipped: ")
    damage_all = ck_files.step_path(tmp_path, 3) / "state.json"
    damage_all.unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: .*step_4.*step_3"):
        latest(tmp_path, One())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": "3"}, "'step' is '3', not a number from 0"),
        ({"step": True}, "'step' is 'True'"),
        ({"ranks": 0}, "'ranks' is '0', not a number from 1"),
        ({"counters": [1]}, "'counters' is"),
        ({"groups": {}}, "'groups' is"),
        ({"groups": [{"parameters": 3, "settings": {}}]}, "'groups' is"),
        ({"groups": [["lr"]]}, "'groups' is"),
        ({"files": ["__0_0.distcp"]}, "'files' is"),
        ({"files": {"__0_0.distcp": 5}}, "'files' is"),
        ({"files": {"__0_0.distcp": {"size": "5", "crc32": 1}}}, "'files' is"),
    ],
)
def test_state_json_with_wrong_types_is_reported(tmp_path, change, words):
    path = save(tmp_path, 3, *trained())
    ck_files.write_state(path, {**ck_files.read_state(path), **change})  # its checksum is right
    with pytest.raises(CheckpointError, match=rf"step_3.state\.json: {words}"):
        load(path, *fresh())
    with pytest.raises(CheckpointError, match=words):
        latest(tmp_path, One())


@pytest.mark.parametrize(("key", "value"), [("lr", "fast"), ("betas", 0.5), ("betas", [0.5, None])])
def test_optimizer_setting_that_is_not_a_number_is_reported(tmp_path, key, value):
    path = save(tmp_path, 3, *trained())
    state = ck_files.read_state(path)
    state["groups"][0]["settings"][key] = value
    ck_files.write_state(path, state)
    with pytest.raises(
        CheckpointError, match=rf"the optimizer's '{key}' in .*state\.json is .*, which is not a number"
    ):
        load(path, *fresh())


def test_unlisted_file_is_rejected(tmp_path):
    path = save(tmp_path, 3, *trained())
    shutil.copy(path / "__0_0.distcp", path / "__9_0.distcp")
    with pytest.raises(CheckpointError, match="__9_0.distcp is not in the list"):
        load(path, *fresh())


def test_leftovers_of_killed_saves_are_ignored_and_removed(tmp_path):
    model, optimizer = trained()
    save(tmp_path, 3, model, optimizer)
    shutil.copytree(tmp_path / "step_3", tmp_path / ".step_4.tmp")
    (tmp_path / ".step_2.gone").mkdir()
    (tmp_path / ".step_4.tmp" / "state.json").unlink()
    assert latest(tmp_path, One()).name == "step_3"
    save(tmp_path, 4, model, optimizer)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step_3", "step_4"]


def test_remove_leftovers_accepts_missing_directory(tmp_path):
    remove_leftovers(tmp_path / "none")
    save(tmp_path, 3, *trained())
    for left in (".step_2.gone", ".step_4.tmp", ".other"):
        (tmp_path / left).mkdir()
    remove_leftovers(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".other", "step_3"]


def test_interrupted_replacement_restores_previous_checkpoint(tmp_path):
    save(tmp_path, 3, *trained(), rows=1)
    os.rename(tmp_path / "step_3", tmp_path / ".step_3.old")
    assert load(latest(tmp_path, One()), *fresh()).counters == {"rows": 1}


class Wider(Model):
    def __init__(self):
        super().__init__(width=6)


class Deeper(Model):
    def __init__(self):
        super().__init__()
        self.more = torch.nn.Linear(5, 5)


def test_checkpoint_of_another_model_is_rejected(tmp_path):
    path = save(tmp_path, 3, *trained())
    for kind, words in ((Wider, r"model\.embed\.weight is float32 \[9, 5\], the run's is float32 \[9, 6\]"),
                        (Deeper, "has no values for 2 tensors of this run, first model.more.bias")):  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            load(path, kind(), None)
    with pytest.raises(CheckpointError, match=r"the run's is bfloat16"):
        load(path, Model().bfloat16(), None)
    deep = Deeper()
    with pytest.raises(CheckpointError, match=r"holds 2 tensors that this model does not have, first more\.bias"):
        load(save(tmp_path, 4, deep, None), Model(), None)


def test_other_freezing_or_parameter_groups_are_rejected(tmp_path):
    path = save(tmp_path, 3, *trained())
    model = Model()
    model.blocks[0].weight.requires_grad_(True)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.weight is trained in only one of them.*model\.freeze"):
        load(path, model, optimizer_for(model))
    model = Model()
    with pytest.raises(CheckpointError, match="the groups are divided differently"):
        load(path, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))


def test_optimizer_of_another_model_is_rejected(tmp_path):
    model, _ = trained()
    with pytest.raises(CheckpointError, match=r"holds a parameter of shape \[9, 5\] that is not the model's"):
        save(tmp_path, 3, model, trained()[1])
    assert steps(tmp_path) == []


def test_values_other_than_tensors_are_rejected(tmp_path):
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match=r"extra\.x is a list; checkpoints hold tensors"):
        save(tmp_path, 3, model, optimizer, extra={"x": [1]})
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        save(tmp_path, 3, model, optimizer, rows=object())
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_reported_and_previous_checkpoint_is_kept(tmp_path, monkeypatch):
    model, optimizer = trained()
    save(tmp_path, 3, model, optimizer)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "__0_0.distcp")

    monkeypatch.setattr("torch.save", full)
    with pytest.raises(
        CheckpointError, match=r"could not write .*step_4.*No space left.*Existing checkpoints are untouched"
    ):
        save(tmp_path, 4, model, optimizer)
    monkeypatch.undo()
    monkeypatch.setattr("octavo.checkpoint.run_state.files.write_state", full)
    with pytest.raises(CheckpointError, match=r"could not finish .*No space left"):
        save(tmp_path, 4, model, optimizer)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_3"]
    assert load(latest(tmp_path, One()), *fresh()).step == 3


def _cut_short(folder: Path, told: Any) -> None:
    model, optimizer = trained()
    save(folder, 3, model, optimizer)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    with pytest.raises(CheckpointError) as found:
        save(folder, 4, model, optimizer)
    told.send(str(found.value))


@pytest.mark.skipif(ranks.START != "fork", reason="the limit is a fork's")
def test_short_write_in_torch_archive_is_reported_as_full_disk(tmp_path):
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_cut_short, args=(tmp_path, there))
    process.start()
    process.join(60)
    last = here.recv() if here.poll() else ""
    assert "could not write" in last and "ulimit -f" in last and "run.resume=auto" in last, process.exitcode
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_3"]


def test_free_space_is_checked_if_errno_was_lost(tmp_path, monkeypatch):
    lost = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    assert why_no_space(tmp_path / "gone", ValueError("a defect")) is None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    assert why_no_space(tmp_path / "gone", lost) == "the disk is full (4 KiB are free)"
    assert why_no_space(tmp_path, RuntimeError("a defect")) is None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    assert why_no_space(tmp_path, lost) is None


def test_directory_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "checkpoints").write_text("a file, not a folder")
    with pytest.raises(CheckpointError, match=r"could not write the checkpoint .*checkpoints.*File exists"):
        save(tmp_path / "checkpoints", 3, *trained())
