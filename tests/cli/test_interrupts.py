"""Commands ended by SIGTERM, SIGHUP or Ctrl-C leave no half-written files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.base import atomic_write, encryption
from octavo.base.encryption.key import write_new
from octavo.cli import stop_signals
from octavo.cli.main import main
from octavo.models.tiny import tiny

CODES = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 130}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Create a key, two files, and an encrypted copy of them."""
    key = tmp_path / "key"
    monkeypatch.setenv(encryption.FILE, str(key))
    monkeypatch.delenv(encryption.VALUE, raising=False)
    write_new(key)
    (tmp_path / "plain").mkdir()
    for name in ("a", "b"):
        (tmp_path / "plain" / name).write_bytes(b"PLAINTEXT" * 99)
    assert main(["encrypt", str(tmp_path / "plain"), str(tmp_path / "stored")]) == 0
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Write a mini Qwen3."""
    return str(tiny.write("qwen3", tmp_path_factory.mktemp("model") / "qwen3", size="mini"))


def send_signal_in(monkeypatch, number: int, name: str = "sync_tree", after: bool = True) -> None:
    """Send this process the signal in or after a function of `octavo.base.atomic_write`."""
    real = getattr(atomic_write, name)

    def send(*args, **kwargs):
        if after:
            real(*args, **kwargs)
        os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    monkeypatch.setattr(atomic_write, name, send)


@pytest.mark.parametrize(("command", "number"), [
    *((command, number) for command in ("decrypt", "encrypt", "examples") for number in CODES),
    *((command, signal.SIGTERM) for command in ("digits", "text", "tiny", "export", "seal")),
])  # fmt: skip
def test_output_of_an_interrupted_command_is_removed(folder, model, monkeypatch, capsys, command, number):
    out = str(folder / "out")
    words = {
        "decrypt": [str(folder / "stored"), out], "encrypt": [str(folder / "plain"), out], "text": [out],
        "digits": [out, "--train", "1", "--test", "1"], "examples": [out], "tiny": ["qwen3", out],
        "export": [model, out, "--format", "bf16"], "seal": ["model", model, out],
    }[command]  # fmt: skip
    before, handlers = sorted(folder.rglob("*")), [signal.getsignal(number) for number in CODES]
    send_signal_in(monkeypatch, number, "_publish" if command == "tiny" else "sync_tree", after=command != "tiny")
    assert main([command, *words]) == CODES[number]
    assert sorted(folder.rglob("*")) == before
    output = capsys.readouterr().err
    assert ("interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}") in output
    assert handlers == [signal.getsignal(number) for number in CODES]


@pytest.mark.parametrize("name", ["a", "b"])
def test_interrupted_decryption_of_a_file_leaves_no_part(folder, monkeypatch, name):
    send_signal_in(monkeypatch, signal.SIGTERM, "swap", after=False)
    assert main(["decrypt", str(folder / "stored" / name), str(folder / "out")]) == 143
    assert not (folder / "out").exists() and not list(folder.glob(".*"))


def test_interrupted_write_text_leaves_no_part(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(stop_signals.Stopped), stop_signals.stop_signals():
        atomic_write.write_text(tmp_path / "run.yaml", "half")
    assert not list(tmp_path.iterdir())


def test_repeated_signals_do_not_interrupt_the_cleanup(tmp_path):
    removed = []
    with pytest.raises(stop_signals.Stopped), stop_signals.stop_signals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            for number in (signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), number)
            removed.append(True)
    assert removed


def test_ignored_and_foreign_handlers_are_kept():
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
        with stop_signals.stop_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_forked_child_ends_by_the_default_action():
    ready, child_is_ready = os.pipe()
    with stop_signals.stop_signals():
        if (child := os.fork()) == 0:
            try:
                os.write(child_is_ready, b".")
                for _ in range(6000):  # signal.pause() would miss an earlier signal
                    time.sleep(0.01)
            finally:
                os._exit(0)  # as the parent's finally blocks would
        os.read(ready, 1)  # signals during the fork are lost
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    os.close(ready)
    os.close(child_is_ready)


def test_terminated_process_leaves_no_files(folder):
    """SIGTERM arrives in a separate process after the first bytes of plain text are written."""
    script = (
        "import os, signal, sys; from octavo.cli import encrypt_decrypt as ciphered; from octavo.cli.main import main; "
        "real = os.fsync;os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGTERM); sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "decrypt", str(folder / "stored"), str(folder / "out")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 143 and done.stderr == "octavo: ended by SIGTERM\n"
    assert not (folder / "out").exists() and not list(folder.glob(".*"))


@pytest.fixture
def trial(tmp_path) -> Path:
    """Write a configuration whose runs take long enough to be interrupted: they would train 100,000 steps."""
    tiny.write("qwen3", tmp_path / "model", size="mini")
    rows = [
        {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": str(n)}]} for n in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {path: model}\n"
        "data: {train: [{path: rows.jsonl}], eval: [{path: rows.jsonl}]}\n"
        "train: {steps: 100000, seq_length: 32, micro_batch: 1, global_batch: 1}\n"
        "run: {dir: trial, tensorboard: false, save_every: 100000}\n"
    )
    return file


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a command in a session of its own, as in a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "octavo", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=folder, start_new_session=True,
    )  # fmt: skip


def read_until(process: subprocess.Popen[str], mark: str) -> list[str]:
    """Read lines up to the first with ``mark``; fails if the process ends before it."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if mark in line:
            return lines
    raise AssertionError(f"the command ended without {mark!r}:\n{''.join(lines)}")


def find_processes(text: str) -> list[str]:
    """Return the command lines of processes that contain ``text``."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            lines.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in lines if text in line]


@pytest.mark.long
@pytest.mark.parametrize("jobs", [1, 2])
def test_interrupted_trial_exits_with_the_signal_and_continues(trial, jobs):
    words, saved = ("compare", str(trial), "--jobs", str(jobs)), 0
    for attempt, number in enumerate((signal.SIGINT, signal.SIGTERM)):
        process = start(trial.parent, *words)
        # In parallel, lines are printed every ten seconds, of the runs that have trained a step.
        lines = read_until(process, "/100000")
        process.send_signal(number)
        rest = process.communicate(timeout=600)[0]
        output = "".join(lines) + rest
        assert process.returncode == CODES[number], output
        assert "Traceback" not in output and len(rest.splitlines()) < 12
        assert not find_processes(str(trial.parent))
        steps = sorted(int(path.name.removeprefix("step_")) for path in trial.parent.rglob("checkpoints/step_*"))
        assert steps, "a run that is interrupted saves"
        # In parallel, the first line may be printed before a run has trained further.
        assert steps[-1] >= saved + (attempt and jobs == 1), "the same command continues the run"
        saved = steps[-1]
