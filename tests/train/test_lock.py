"""A run directory has one training process; a second is refused before it touches anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import train
from octavo.train.lock import RunLock

from .conftest import Rows

pytest.importorskip("fcntl")


def test_a_second_run_in_a_directory_in_use_is_refused_at_once(make):
    over = ("data.eval=[]", "train.steps=2", "train.warmup=0")
    refused: list[str] = []

    def again(row):
        for resume in ("auto", "never"):
            with pytest.raises(train.TrainError) as found:
                train.run(make(*over, f"run.resume={resume}"))
            refused.append(str(found.value))

    result = train.run(make(*over), callbacks=[Rows(again)])
    assert len(refused) == 4
    assert all(f"run directory {result.dir} is in use by process {os.getpid()}; " in text for text in refused)
    assert train.run(make(*over, "run.resume=auto")).status == "finished"  # given back at the end


@pytest.mark.long
def test_a_process_that_was_killed_holds_nothing_and_neither_do_its_workers(tmp_path: Path):
    code = (
        "import os, signal, sys, time; from pathlib import Path; from octavo.train.lock import RunLock\n"
        "RunLock.take(lock := RunLock(), Path(sys.argv[1]))\n"
        "worker = os.fork()\n"
        "if not worker: time.sleep(60)\n"
        "print(worker, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    worker = int(child.stdout.readline())
    try:
        with RunLock() as lock, pytest.raises(train.TrainError, match=f"in use by process {child.pid};"):
            lock.take(tmp_path)
        child.kill()
        child.wait()
        with RunLock() as lock:
            lock.take(tmp_path)
            assert (tmp_path / ".lock").read_text() == str(os.getpid())
    finally:
        os.kill(worker, 9)
        child.kill()
        child.stdout.close()


def test_a_refused_directory_gets_no_lock_file(make, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(train.TrainError, match="not empty"):
        train.run(make())
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.txt"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a place where no folder can be made")
def test_a_directory_that_cannot_be_made_is_named(make):
    with pytest.raises(train.TrainError, match="run directory .* cannot be made .* Name another run.dir"):
        train.run(make("data.eval=[]", "train.steps=2", "train.warmup=0", "run.dir=/proc/self/none/run"))
