"""A run directory has one training process; a second is refused before it touches anything."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from octavo import train
from octavo.train.run_dir import run_lock as lock_file
from octavo.train.run_dir.run_lock import RunLock
from tests import ranks
from tests.train.conftest import Rows

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
def test_killed_process_and_its_workers_release_the_lock(tmp_path: Path):
    code = (
        "import os, signal, sys, time; from pathlib import Path; from octavo.train.run_dir.run_lock import RunLock\n"
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
            assert (tmp_path / ".lock").read_text().split()[0] == str(os.getpid())
    finally:
        os.kill(worker, 9)
        child.kill()
        child.stdout.close()


def _hold(directory: Path, alive: bool, pipe: Connection) -> None:
    """Hold the lock as if from another host."""
    lock_file._boot_id, lock_file.socket.gethostname, lock_file.HEARTBEAT_S = lambda: "another", lambda: "node7", 0.05
    if not alive:
        RunLock._beat = lambda *given: None
    (held := RunLock()).take(directory)
    pipe.send(held._file is not None)
    time.sleep(60)


@pytest.fixture
def elsewhere(tmp_path: Path):
    """elsewhere(alive) -> a process that holds the lock of tmp_path as if from another host."""
    made: list[BaseProcess] = []

    def start(alive: bool) -> BaseProcess:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        made.append(context.Process(target=_hold, args=(tmp_path, alive, there)))
        made[-1].start()
        assert here.recv()
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.join()


@pytest.mark.skipif(ranks.START != "fork", reason="the other host is a fork")
def test_remote_holder_keeps_its_lock_while_it_is_alive(elsewhere, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(lock_file, "HEARTBEAT_S", 0.5)
    process, told = elsewhere(alive=True), []
    with RunLock() as lock, pytest.raises(train.TrainError, match=f"in use by process {process.pid} on node7;"):
        lock.take(tmp_path, told.append)
    assert told == [f"{tmp_path} was last held by process {process.pid} on node7: waiting up to 3 s for a sign of life"]
    (tmp_path / ".lock").unlink()  # by a person: nobody else holds it
    time.sleep(0.3)
    assert process.is_alive()
    # One whose file another process has taken meanwhile, while it was stopped, ends and does not train on.
    (tmp_path / ".lock").write_text("12 node8 third 000000000001\n")
    process.join(30)
    assert process.exitcode == 1 and "was taken over by process 12 on node8" in capfd.readouterr().err


@pytest.mark.skipif(ranks.START != "fork", reason="the other host is a fork")
def test_dead_remote_holder_loses_its_lock(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr(lock_file, "HEARTBEAT_S", 0.05)
    elsewhere(alive=False)  # the file system goes on locking for it
    with RunLock() as lock:
        lock.take(tmp_path)
        assert (tmp_path / ".lock").read_text().split()[0] == str(os.getpid())
        with RunLock() as other, pytest.raises(train.TrainError, match=f"in use by process {os.getpid()};"):
            other.take(tmp_path)
    assert (tmp_path / ".lock").read_text() == ""  # who comes next need not wait


def test_a_refused_directory_gets_no_lock_file(make, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(train.TrainError, match="not empty"):
        train.run(make())
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.txt"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a place where no folder can be made")
def test_error_names_a_directory_that_cannot_be_created(make):
    with pytest.raises(train.TrainError, match="run directory .* cannot be created .* Name another run.dir"):
        train.run(make("data.eval=[]", "train.steps=2", "train.warmup=0", "run.dir=/proc/self/none/run"))
