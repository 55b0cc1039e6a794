"""Exports are atomic: after a kill, on a full disk, after an error, and over an earlier export."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from octavo import models
from octavo.base import atomic_write
from octavo.checkpoint import CheckpointError
from octavo.checkpoint.checksums import MARKER
from octavo.checkpoint.export import export
from octavo.checkpoint.export import files as export_files
from octavo.checkpoint.export.files import Shards, parse_size
from octavo.checkpoint.export.values import iter_values
from tests.checkpoint.export_models import write


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write("qwen3", tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture(scope="module")
def model(folder):
    return models.load(folder)


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def forked(work) -> tuple[int, int]:
    """(pid, pipe to read from) of a child process that runs `work(tell)` and ends; it shares no file with this one."""
    read, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            work(lambda text: os.write(write_end, f"{text}\n".encode()))
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    return pid, read


def test_killed_export_keeps_earlier_one_and_next_cleans_up(folder, model, tmp_path):
    """kill -9 while tensors are written, in the first export of a folder and in those that replace another."""
    out = tmp_path / "out"

    def work(tell) -> None:
        while True:
            for format in ("fp8-block", "bf16"):
                export(iter_values(model), folder, out, format, progress=lambda done, total, name: tell(name))
                tell("whole")

    for tensors in (3, 45, 60, 90, 130):
        pid, pipe = forked(work)
        with open(pipe, encoding="utf-8") as stream:
            lines = [stream.readline() for _ in range(tensors)]
            os.kill(pid, signal.SIGKILL)
            assert os.waitpid(pid, 0)[1] == signal.SIGKILL and all(lines)
        assert out.exists() or "whole\n" not in lines
        if out.exists():  # whole: everything that its list promises is there
            promised = json.loads((out / MARKER).read_text())
            size = sum(t.nbytes for name in promised["files"] for t in tensors_of(out / name).values())
            assert size == promised["bytes"] and (out / "config.json").exists() and (out / "tokenizer.json").exists()
    assert out.exists() and len(list(tmp_path.iterdir())) <= 2
    export(iter_values(model), folder, out, "fp8-dynamic")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def tensors_of(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118


def test_file_size_limit_is_reported(folder, model, tmp_path):
    """A real refusal of the machine (the limit of ulimit -f), in the middle of a file."""

    def work(tell) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
        try:
            export(iter_values(model), folder, tmp_path / "out", "bf16")
        except CheckpointError as error:
            tell(error)

    pid, pipe = forked(work)
    with open(pipe, encoding="utf-8") as stream:
        words = stream.read()
    assert os.waitpid(pid, 0)[1] == 0 and "out could not be written: " in words and "ulimit -f" in words
    assert list(tmp_path.iterdir()) == []


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Killed()])
@pytest.mark.parametrize("when", ["write", "finish", "rename"])
def test_failed_export_keeps_earlier_one(folder, model, tmp_path, monkeypatch, error, when):
    out = tmp_path / "out"
    export(iter_values(model), folder, out, "bf16")
    before = contents(out)
    calls = 0

    def stop(*args, **kwargs):
        nonlocal calls
        calls += when != "rename" or args == (tmp_path,)
        if calls == {"write": 7, "finish": 1, "rename": 1}[when]:
            raise error
        return real(*args, **kwargs)

    owner = {"write": Shards, "finish": Shards, "rename": atomic_write}[when]
    name = {"write": "write", "finish": "finish", "rename": "sync"}[when]
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, stop)
    expected: type[BaseException] = type(error)
    if isinstance(error, OSError) and when != "rename":
        expected = CheckpointError
    with pytest.raises(expected) as caught:
        export(iter_values(model), folder, out, "fp8-block")
    if expected is CheckpointError:
        assert "No space left on device). Nothing was left half-written; free some space" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    now = contents(out)
    if when != "rename":
        assert now == before
    else:  # the new one was in place when the machine failed to confirm it
        assert now == before or json.loads(now[MARKER])["format"] == "fp8-block"


def test_missing_disk_space_is_reported_before_writing(folder, model, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"needs [\d.]+ [KM]B, but 1 KB are free on that disk. .*free some space"):
        export(iter_values(model), folder, tmp_path / "out", "bf16")
    assert list(tmp_path.iterdir()) == []


def test_only_an_earlier_export_is_replaced(folder, model, tmp_path):
    (tmp_path / "empty").mkdir()
    export(iter_values(model), folder, tmp_path / "empty", "bf16")
    export(iter_values(model), folder, tmp_path / "empty", "fp8-tensor")  # an earlier export
    assert json.loads((tmp_path / "empty" / MARKER).read_text())["format"] == "fp8-tensor"
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.png").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"is not empty \(cat.png\) and is not an earlier export: it has no octavo_ex"
    ):
        export(iter_values(model), folder, other, "bf16")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file; choose a directory that is new, empty"):
        export(iter_values(model), folder, tmp_path / "file", "bf16")
    for target in (folder, folder.parent):
        with pytest.raises(CheckpointError, match="that is exported"):
            export(iter_values(model), folder, target, "bf16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "photos"]


def test_written_callback_can_stop_the_export(folder, model, tmp_path):
    seen: dict[str, list] = {}

    def judge(name, slot, rows, value):
        seen.setdefault(name, []).append((slot, rows, value))

    export(iter_values(model), folder, tmp_path / "out", "fp8-block", written=judge)
    assert set(seen) == {name for name, _ in iter_values(model)}
    ((slot, rows, q),) = seen["model.layers.0.mlp.down_proj.weight"]
    assert (slot, rows) == (None, (0, 256)) and q.scale.shape == (2, 3)
    ((slot, rows, norm),) = seen["model.norm.weight"]
    assert (slot, rows, norm.dtype) == (None, None, torch.bfloat16)

    def refuse(name, slot, rows, value):
        raise CheckpointError(f"not {name}")

    with pytest.raises(CheckpointError, match=r"not model.embed_tokens.weight"):
        export(iter_values(model), folder, tmp_path / "other", "fp8-block", written=refuse)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_progress_ends_at_the_total(folder, model, tmp_path):
    seen: list[tuple[int, int]] = []
    done = export(
        iter_values(model),
        folder,
        tmp_path / "out",
        "fp8-block",
        progress=lambda d, total, name: seen.append((d, total)),
    )
    assert seen[-1] == (done.bytes, done.bytes) and seen == sorted(seen)


# The files ----------------------------------------------------------------------------------------------------------


def test_files_are_planned_before_values_arrive(tmp_path):
    tensors = {
        "a": torch.arange(5, dtype=torch.uint8),
        "b": torch.randn(3, 3),
        "c": torch.randn(7).bfloat16(),
        "d": torch.tensor(3),
        "e": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "f": torch.zeros(0, 3),
    }
    planned = [(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    for largest, count in ((10**6, 1), (40, 3), (1, 5)):
        directory = tmp_path / str(largest)
        directory.mkdir()
        with Shards(directory, planned, largest) as shards:
            for name in reversed(tensors):
                shards.write(name, tensors[name])
            shards.finish()
        assert len(shards.names) == count
        found = {n: t for name in shards.names for n, t in tensors_of(directory / name).items()}
        assert found.keys() == tensors.keys()
        for name, t in tensors.items():
            assert found[name].dtype is t.dtype and found[name].shape == t.shape
            assert torch.equal(found[name].reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8))
    with pytest.raises(CheckpointError, match="no values for 2 tensors of the model, first b"):
        with Shards(tmp_path, planned[:2], 10**6) as shards:
            shards.finish()


def test_parse_size():
    assert [parse_size(t) for t in ("5GB", "500 MB", "2GiB", "1.5kb", "77", "1b")] == [
        5 * 10**9, 5 * 10**8, 2 * 2**30, 1500, 77, 1,
    ]  # fmt: skip
    for text in ("", "GB", "-1GB", "0", "5 gigs", "1e9"):
        with pytest.raises(ValueError, match="expected a size such as 5GB"):
            parse_size(text)
    assert export_files.nbytes(torch.bfloat16, (3, 5)) == 30
