"""Encrypted run states and model folders are restored bit for bit, and swapped files are rejected."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest
import torch

from octavo import checkpoint, models
from octavo.base import encryption
from octavo.fp8.weights import is_frozen
from octavo.models.tiny import tiny
from octavo.parallel import World, shard
from tests import ranks
from tests.checkpoint.models import One, fresh, load, same, snapshot, train, trained
from tests.checkpoint.test_two_ranks import _sharded, _whole

KEY = bytes(range(32)).hex()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(encryption.FILE, raising=False)
    monkeypatch.setenv(encryption.VALUE, KEY)


def save(directory: Path, step: int, model, optimizer, world=None, **more) -> Path:
    return checkpoint.save(
        directory, step, model=model, optimizer=optimizer, extra=more, counters={"rows": step}, world=world or One(),
        keep=2, encrypt=True,
    )  # fmt: skip


def test_encrypted_checkpoint_is_restored_and_contains_no_plain_bytes(tmp_path):
    model, optimizer = trained(3)
    model.seen.copy_(torch.tensor([1.25, 2.5, 3.75]))
    path = save(tmp_path, 3, model, optimizer, shared=torch.arange(9.0))
    stored = {file.name: file.read_bytes() for file in path.iterdir()}
    assert sorted(stored) == [".metadata", "__0_0.distcp", "state.json"] and all(
        map(encryption.has_magic, stored.values())
    )
    for plain in (
        b"embed",
        b"rows",
        b"seen",
        model.seen.numpy().tobytes(),
        model.embed.weight.detach().numpy().tobytes()[:32],
    ):
        assert not any(plain in raw for raw in stored.values())
    straight = train(model, optimizer, range(3, 6))
    model, optimizer = fresh()
    got = load(checkpoint.latest(tmp_path, One()), model, optimizer)
    assert got.counters == {"rows": 3} and train(model, optimizer, range(3, 6)) == straight


def test_swapped_files_are_rejected(tmp_path, monkeypatch):
    model, optimizer = trained(3)
    good = save(tmp_path / "good", 3, model, optimizer)
    plain = checkpoint.save(
        tmp_path / "plain", 3, model=model, optimizer=optimizer, extra={}, counters={"rows": 3}, world=One(), keep=2
    )
    other = save(tmp_path / "other", 3, *trained(2))
    target = fresh()
    before = snapshot(*target)

    def flipped(file: Path) -> None:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)

    cut = lambda file: os.truncate(file, file.stat().st_size - 1)  # noqa: E731
    for name in ("__0_0.distcp", ".metadata", "state.json"):
        for why, damage in (
            (rf"{name} is damaged: chunk \d+ of \d+ \(bytes", flipped),
            (f"{name} is damaged", cut),
            (
                "must both be encrypted or both be plain;",
                lambda file: shutil.copy(plain / file.name, file),
            ),
        ):
            path = shutil.copytree(good, tmp_path / "tried")
            damage(path / name)
            with pytest.raises(checkpoint.CheckpointError, match=why):
                load(path, *target)
            shutil.rmtree(path)
    path = shutil.copytree(good, tmp_path / "tried")
    shutil.copy(other / "__0_0.distcp", path / "__0_0.distcp")  # whole, and of the same key
    with pytest.raises(checkpoint.CheckpointError, match="is corrupt: its checksum"):
        load(path, *target)
    assert same(snapshot(*target), before)
    monkeypatch.setenv(encryption.VALUE, KEY[::-1])
    with pytest.raises(
        checkpoint.CheckpointError, match=r"state.json was encrypted with another key, eeeacf5d17c30722"
    ):
        load(good, *target)
    monkeypatch.delenv(encryption.VALUE)
    with pytest.raises(checkpoint.CheckpointError, match="there is no key"):
        load(good, *target)
    with pytest.raises(checkpoint.CheckpointError, match="there is no key"):
        save(tmp_path / "none", 4, model, optimizer)
    assert not (tmp_path / "none").exists()


def test_interrupted_save_keeps_previous_checkpoint(tmp_path, monkeypatch):
    model, optimizer = trained(3)
    save(tmp_path, 3, model, optimizer)
    real = encryption.Writer.finish
    monkeypatch.setattr(encryption.Writer, "finish", lambda self: os._exit(9) if self.tell() > 1000 else real(self))
    if (child := os.fork()) == 0:  # a kill before the last chunk
        with contextlib.suppress(BaseException):
            save(tmp_path, 4, model, optimizer)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.undo()
    monkeypatch.setenv(encryption.VALUE, KEY)
    (left,) = tmp_path.glob(".step_4.tmp")
    with pytest.raises(encryption.Damaged):
        encryption.decrypt((left / "__0_0.distcp").read_bytes(), "it")
    assert checkpoint.latest(tmp_path, One()) == tmp_path / "step_3"
    checkpoint.remove_leftovers(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_3"]


def test_asynchronous_save_is_encrypted(tmp_path):
    model, optimizer = trained(3)
    want = snapshot(model, optimizer)
    background = checkpoint.BackgroundSaver(World(), torch.device("cpu"), encrypt=True)
    moment = checkpoint.take_snapshot(
        3, model=model, optimizer=optimizer, extra={}, counters={"rows": 3}, world=World()
    )
    background.begin(tmp_path, moment)
    train(model, optimizer, range(3, 5))
    path = background.poll(wait=True)
    background.close()
    assert path is not None and all(map(encryption.is_encrypted, path.iterdir()))
    target = fresh()
    load(path, *target)
    assert same(snapshot(*target), want)


def _on_two(world: World, folder: str) -> list:
    os.environ[encryption.VALUE] = KEY
    model, optimizer = _sharded(world)
    train(model, optimizer, range(3), slice(world.rank, None, world.size))
    path = save(Path(folder), 3, model, optimizer, world=world)
    want = _whole(model, optimizer, world)
    again, its = _sharded(world)
    load(path, again, its, world)
    found = [_whole(again, its, world) == want, sorted(file.name for file in path.iterdir())]
    small = models.load(Path(folder) / "tiny", torch.bfloat16)
    shard(small, models.describe(small), world)
    checkpoint.save_hf(small, Path(folder) / "tiny", Path(folder) / "hf", world, 150_000, encrypt=True)
    os.environ[encryption.VALUE] = KEY if world.is_main else KEY[::-1]
    try:
        save(Path(folder), 4, model, optimizer, world=world)
    except checkpoint.CheckpointError as error:
        found.append(str(error))
    return found


@pytest.mark.long
def test_one_process_reads_checkpoint_of_two_ranks(tmp_path):
    tiny.write("qwen3_vl_moe", tmp_path / "tiny", size="mini")
    for same_again, names, why in ranks.run(_on_two, 2, str(tmp_path)):
        assert same_again and names == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"]
        assert "the ranks have different keys" in why
    target = fresh()
    assert load(tmp_path / "step_3", *target).ranks == 2
    files_of_hf = sorted(file.name for file in (tmp_path / "hf").iterdir())
    assert len([name for name in files_of_hf if name.endswith(".safetensors")]) > 2
    assert all(map(encryption.is_encrypted, (tmp_path / "hf").iterdir()))
    assert checkpoint.verify(tmp_path / "hf").ok


@pytest.mark.parametrize("recipe", [None, "row"])
def test_encrypted_model_folder_loads_the_model(tmp_path, recipe):
    source = tiny.write("qwen3_vl", tmp_path / "plain", size="mini")
    model = models.load(source, torch.bfloat16)
    checkpoint.save_hf(model, source, tmp_path / "hf", World(), 150_000, encrypt=True)
    assert all(map(encryption.is_encrypted, (tmp_path / "hf").iterdir()))
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    checkpoint.save_hf(model, source, tmp_path / "open", World())
    found = models.load(tmp_path / "hf", torch.bfloat16, load_in_fp8=recipe)
    wanted = models.load(tmp_path / "open", torch.bfloat16, load_in_fp8=recipe)
    left, right = found.state_dict(), wanted.state_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        mine, its = (w.dequantize() if is_frozen(w) else w for w in (value, right[name]))
        assert torch.equal(mine, its), name
    assert found.generation_config.to_dict() == wanted.generation_config.to_dict()
    assert found.config.name_or_path == str(tmp_path / "hf")
    if recipe is None:
        verified = checkpoint.verify(tmp_path / "hf", quick=True)  # sound, and nothing that a server could open
        assert verified.ok and [f.kind for f in verified.findings] == ["encrypted"]
        assert {one.verdict for one in verified.verdicts} == {"refuses"}
        one, other = models.load_processor(tmp_path / "hf"), models.load_processor(source)
        assert one.tokenizer.get_vocab() == other.tokenizer.get_vocab() and one.chat_template == other.chat_template
        shard_ = next((tmp_path / "hf").glob("*.safetensors"))
        raw = bytearray(shard_.read_bytes())
        raw[-300] ^= 1
        shard_.write_bytes(raw)
        with pytest.raises(models.ModelError, match=rf"{shard_.name} is damaged: chunk"):
            models.load(tmp_path / "hf", torch.bfloat16)
