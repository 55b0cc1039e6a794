"""`octavo train --nproc`: ranks are started, watched and ended together; with small programs and with a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from octavo.cli import launch_ranks
from octavo.cli.main import main
from octavo.report.trial import parallel_runs
from tests import ranks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Replace Octavo in the ranks by a Python program with the variables `rank` and `here`, a shared folder."""

    def use(text: str) -> None:
        head = "import os, pathlib, signal, sys, time\nrank = int(os.environ['RANK'])\n"
        monkeypatch.setattr(parallel_runs, "COMMAND", f"{head}here = pathlib.Path({str(tmp_path)!r})\n{text}")

    return use


def test_ranks_use_the_store_of_the_launcher(program, tmp_path):
    program(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo'); results = [None] * dist.get_world_size()\n"
        "dist.all_gather_object(results, (rank, int(os.environ['LOCAL_RANK'])))\n"
        "(here / f'{rank}').write_text(repr(results)); dist.destroy_process_group()\n"
    )
    assert launch_ranks.launch([], 2) == 0
    assert {(tmp_path / str(rank)).read_text() for rank in (0, 1)} == {"[(0, 0), (1, 1)]"}


def test_failed_rank_ends_the_others_and_its_exit_code_and_stderr_are_kept(program, capfd):
    program("if rank == 1: sys.exit('rank one has no data')\ntime.sleep(60)\n")
    start = time.monotonic()
    assert launch_ranks.launch([], 3) == 1
    assert time.monotonic() - start < 30
    output = capfd.readouterr().err
    assert "rank 1, exit code 1:\nrank one has no data" in output
    program(  # both ranks fail at the same time
        "(here / f'mesh{rank}').touch()\n"
        "while rank and not all((here / f'mesh{n}').exists() for n in (1, 2)): time.sleep(0.01)\n"
        "if rank: print('no such mesh', file=sys.stderr); sys.exit(2)\n"
    )
    assert launch_ranks.launch([], 3) == 2
    output = capfd.readouterr().err
    assert "ranks 1, 2, exit code 2:\nno such mesh" in output and output.count("no such mesh") == 1
    program("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)")
    assert launch_ranks.launch([], 2) == 137
    output = capfd.readouterr().err
    assert "rank 1 was killed by SIGKILL." in output and "dmesg" in output and "rank 0" not in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_reaches_every_rank_once(number, program, tmp_path):
    program(
        "seen = []\n"
        f"signal.signal({int(number)}, lambda *_: seen.append(1))\n"
        "(here / f'up{rank}').touch()\n"
        "while not seen: time.sleep(0.05)\n"
        "time.sleep(0.5)\n"  # simulates saving
        f"(here / f'saved{{rank}}').write_text(str(len(seen))); sys.exit({128 + number})\n"
    )

    def send() -> None:
        while sum((tmp_path / f"up{rank}").exists() for rank in (0, 1)) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    assert launch_ranks.launch([], 2) == 128 + number
    sender.join()
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_invalid_process_counts_are_rejected(monkeypatch, capsys, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "a.json").write_text("[]")
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: model}\ndata: {train: [{path: a.json}]}\ntrain: {steps: 1}\n")
    assert main(["train", str(file), "--nproc", "two"]) == 2
    assert "expected a whole number" in capsys.readouterr().err
    monkeypatch.setattr("octavo.base.accelerator.detect", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    assert (launch_ranks.resolve_process_count(None), launch_ranks.resolve_process_count(3)) == (4, 3)
    assert main(["train", str(file), "--nproc", "8"]) == 2
    assert "--nproc 8: this machine has only 4 GPU(s)" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(file), "--nproc", "2"]) == 2
    assert "this process was started by torchrun" in capsys.readouterr().err


@pytest.mark.long
def test_run_on_two_processes_is_stopped_and_resumed(tmp_path, monkeypatch):
    """Arguments reach every rank, SIGTERM saves a checkpoint, and the same command resumes."""
    from octavo.data.builtin import digits
    from octavo.models.tiny import tiny

    tiny.write("qwen3", tmp_path / "model", size="mini")
    digits.write(tmp_path / "digits", train=16, test=4)
    (tmp_path / "run.yaml").write_text(
        "model: {path: model}\ndata: {train: [{path: digits/train_text.json}]}\n"
        "train: {steps: 30, micro_batch: 1, global_batch: 2, seq_length: 256}\n"
        "run: {hf: false, tensorboard: false, health_every: 0, threads: 1}\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}

    command = ["train", "run.yaml", "--fp8-recipe", "rowwise", "run.dir=stopped"]
    words = [sys.executable, "-m", "octavo", *command, "--nproc", "2"]
    stopped = subprocess.Popen(words, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    metrics, deadline = tmp_path / "stopped" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    stopped.terminate()
    out, err = stopped.communicate(timeout=120)
    assert stopped.returncode == 143, err
    assert "next: octavo train run.yaml run.dir=stopped fp8.recipe=rowwise run.resume=auto --nproc 2" in out
    monkeypatch.chdir(tmp_path)  # continue with forks, which need no imports
    codes, out, err = ranks.commands([*command, "run.resume=auto"], 2)
    assert codes == [0, 0] and out.count("finished after step 30") == 1, err
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [*range(1, 31)]
