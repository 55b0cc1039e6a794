"""kill -9 during a conversion: the destination does not exist, and the same command continues."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from octavo.checkpoint import CheckpointError, convert
from tests.checkpoint.convert_folders import same_files, write

ROOT = Path(__file__).resolve().parents[2]
SHARDS = 6
FORK = multiprocessing.get_context("fork")  # a child that has everything imported: it is killed, not waited for


def slowly(command: str, source: Path, target: Path) -> None:
    """Convert with a pause after each tensor, so that there is a middle."""
    getattr(convert, command)(source, target, workers=1, progress=lambda done, total: time.sleep(0.05))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shards = [{f"layers.{i}.weight": torch.randn(64, 32), f"layers.{i}.bias": torch.randn(9)} for i in range(SHARDS)]
    return write(tmp_path / "model", shards)


def kill_after(command: str, source: Path, target: Path, parts: int) -> list[Path]:
    """Convert in a process of its own, kill it once `parts` are finished; their files."""
    process = FORK.Process(target=slowly, args=(command, source, target))
    process.start()
    finished = target.with_name(f"{target.name}.converting") / "finished"
    deadline = time.monotonic() + 60
    while len(list(finished.glob("*.json")) if finished.is_dir() else []) < parts:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not target.exists()
    done = sorted(int(note.stem) for note in finished.glob("*.json"))
    made = finished.parent / "made"
    names = [f"release/__{i}_0.distcp" if command == "hf_to_dcp" else f"model-{i + 1:05d}-of-00006.safetensors"
             for i in done]  # fmt: skip
    return [made / name for name in names]


def test_killed_conversions_resume_in_both_directions(folder, tmp_path):
    there, back = tmp_path / "dcp", tmp_path / "back"
    for command, source, target in (("hf_to_dcp", folder, there), ("dcp_to_hf", there, back)):
        kept = kill_after(command, source, target, 2)
        before = [(file.stat().st_mtime_ns, file.stat().st_ino) for file in kept]
        messages: list[str] = []
        found = getattr(convert, command)(source, target, log=messages.append)
        assert found.kept == len(kept) >= 2 and messages == [
            f"continues: {len(kept)} of {SHARDS} files are finished and intact"
        ]
        now = [target / file.relative_to(target.with_name(f"{target.name}.converting") / "made") for file in kept]
        assert [(file.stat().st_mtime_ns, file.stat().st_ino) for file in now] == before  # not written again
        assert not list(tmp_path.glob("*.converting"))
    same_files(folder, back)


def test_damaged_finished_file_is_rewritten(folder, tmp_path):
    for command, source, target in (
        ("hf_to_dcp", folder, tmp_path / "dcp"),
        ("dcp_to_hf", tmp_path / "dcp", tmp_path / "back"),
    ):
        kept = kill_after(command, source, target, 2)
        whole = bytearray(kept[0].read_bytes())
        whole[len(whole) // 2] ^= 4
        kept[0].write_bytes(whole)
        assert getattr(convert, command)(source, target).kept == len(kept) - 1
    same_files(folder, tmp_path / "back")


def test_concurrent_conversions_are_rejected(folder, tmp_path):
    process = FORK.Process(target=slowly, args=("hf_to_dcp", folder, tmp_path / "dcp"))
    process.start()
    try:
        task = tmp_path / "dcp.converting" / "task.json"
        deadline = time.monotonic() + 60
        while not task.is_file():
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.005)
        with pytest.raises(CheckpointError, match="another process is working in .*dcp.converting"):
            convert.hf_to_dcp(folder, tmp_path / "dcp")
    finally:
        process.kill()
        process.join()


MEASURED = """
import sys
from octavo.checkpoint import convert
from octavo.train.step.memory_report import peak_rss
before = peak_rss()
convert.hf_to_dcp(sys.argv[1], sys.argv[2], workers=2)
convert.dcp_to_hf(sys.argv[2], sys.argv[3], workers=2)
print(peak_rss() - before)
"""


@pytest.mark.long
def test_memory_stays_below_two_tensors_per_worker(tmp_path):
    """Peak memory is that of the tensors in hand (8 MiB each), not of the model (256 MiB)."""
    folder = tmp_path / "model"
    shards = [{f"{i}.{j}": torch.full((1 << 21,), i + j, dtype=torch.float32) for j in range(8)} for i in range(4)]
    write(folder, shards)
    del shards
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(folder), str(tmp_path / "dcp"), str(tmp_path / "back")],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 4 * (8 << 20) + (64 << 20)
    same_files(folder, tmp_path / "back")
