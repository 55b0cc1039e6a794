"""A server that does not start, dies, hangs or refuses: one sentence, and no process is left. Needs no vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.server.client import Server, ServerDied, ServerRefused

pytestmark = pytest.mark.race_is_a_bug

DRIVER = """
import json, os, signal, subprocess, sys, time
answers = os.fdopen(int(sys.argv[1]), "w")
def answer(**what):
    print(json.dumps(what), file=answers, flush=True)
START
for line in sys.stdin:
    command = json.loads(line)
    folder = command.get("folder", "")
    if folder.endswith("refused"):
        answer(error="ValueError: no such folder")
    elif folder.endswith("killed"):
        print("about to end", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif folder.endswith("hangs"):
        time.sleep(600)
    else:
        answer(value=command)
"""
READY = 'answer(value="ready")'
#: as a compiler that the engine starts; its id is the first answer
CHILD = (
    'child = subprocess.Popen(["sleep", "600"]); print(child.pid, file=sys.stderr, flush=True); answer(value="ready")'
)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment with a Python and without vLLM."""
    folder = tmp_path / "environment" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    return folder.parent


def driver(tmp_path: Path, start: str = READY) -> Path:
    file = tmp_path / "driver.py"
    file.write_text(DRIVER.replace("START", start))
    return file


def lives(pid: int) -> bool:
    """Whether a process runs: an ended one that waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    """Wait until a process has ended; for a minute on a machine that is too busy."""
    end = time.monotonic() + 60
    while lives(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not lives(pid)


def test_answers_and_refusals(environment: Path, tmp_path: Path) -> None:
    with Server(environment, tmp_path / "scratch", driver(tmp_path)) as server:
        with pytest.raises(ServerRefused, match="^ValueError: no such folder$"):
            server.load(Path("refused"))
        assert server.load(Path("folder"), "block")["kernel"] == "block"
        pid = server.process.pid
    assert server.process.returncode == 0 and ends(pid)


def test_python_without_vllm(environment: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerDied) as error:
        Server(environment, tmp_path / "scratch")
    how, last = str(error.value).split("; ")
    assert how == "The server did not start: it ended with exit code 1"
    assert last.startswith("the last line of its stderr: ModuleNotFoundError: No module named ")


def test_environment_without_python(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    with pytest.raises(ServerDied, match=f"^The server did not start: {python}: No such file or directory.$"):
        Server(tmp_path, tmp_path / "scratch")


def test_server_that_is_killed(environment: Path, tmp_path: Path) -> None:
    with Server(environment, tmp_path / "scratch", driver(tmp_path)) as server:
        with pytest.raises(ServerDied) as error:
            server.load(Path("killed"))
        expected = "The server died in 'load': it was ended by SIGKILL; the last line of its stderr: about to end"
        assert str(error.value) == expected
        with pytest.raises(ServerDied, match="died in 'score'"):  # and stays dead, in a sentence
            server.score([[1, 2]])


def test_server_that_does_not_start_in_time(environment: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerDied, match="^The server did not answer 'start' within 0.5 s and was stopped.$"):
        Server(environment, tmp_path / "scratch", driver(tmp_path, "time.sleep(600)"), start_seconds=0.5)


def test_command_without_an_answer(environment: Path, tmp_path: Path) -> None:
    server = Server(environment, tmp_path / "scratch", driver(tmp_path, CHILD), answer_seconds=0.5)
    child = int(server.stderr.read_text())
    with pytest.raises(ServerDied, match="^The server did not answer 'load' within 0.5 s and was stopped.$"):
        server.load(Path("hangs"))
    assert server.process.returncode == -signal.SIGKILL and ends(child)


def test_end_of_the_block_stops_children(environment: Path, tmp_path: Path) -> None:
    with Server(environment, tmp_path / "scratch", driver(tmp_path, CHILD)) as server:
        child = int(server.stderr.read_text())
        assert lives(child)
    assert ends(child)


def test_server_ends_with_a_killed_client(environment: Path, tmp_path: Path) -> None:
    client = f"""
import os, signal
from pathlib import Path
from tests.server.client import Server
server = Server(Path({str(environment)!r}), Path({str(tmp_path / "scratch")!r}), Path({str(driver(tmp_path))!r}))
print(server.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-c", client],
        capture_output=True,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert ends(int(result.stdout))


def test_scratch_has_what_the_server_prints(environment: Path, tmp_path: Path) -> None:
    text = 'print("not an answer", flush=True); ' + READY
    with Server(environment, tmp_path / "scratch", driver(tmp_path, text)) as server:
        assert server.versions() == {"do": "versions"}
    assert server.stderr.read_text() == "not an answer\n"
