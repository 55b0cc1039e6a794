"""Reward functions that change their arguments, write to the socket, or raise exceptions that cannot be printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from octavo.base import encryption
from octavo.rl.rewards import RewardError, Rewards, worker_client

FUNCTIONS = '''
import json, os, socket, sys, threading

def to_trainer():
    """Return the socket of the process, which a function can find."""
    here = [int(name) for name in os.listdir("/proc/self/fd")]
    return next(fd for fd in here if os.path.exists(f"/proc/self/fd/{fd}")
                and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") and fd > 2)

def drops(completions, **columns):
    completions[:] = [text for text in completions if text]
    return [float(len(text)) for text in completions]

def appends(completions, **columns):
    completions.append("more")
    return [float(len(text)) for text in completions]

def empties(completions, answer, **columns):
    values = [float(text == right) for text, right in zip(completions, answer)]
    completions.clear(), answer.clear()
    return values

def sorts(completions, answer, **columns):
    values = [float(text == right) for text, right in zip(completions, answer)]
    completions.sort(), answer.sort(reverse=True), columns["prompt"][0].append("changed")
    return values

def pops(completions, prompt, weights):
    prompt[0].clear()
    if len(completions) > 1:
        raise ValueError("one at a time")
    return [float(weights.pop())]

def judge(completions, answer, prompt, **columns):
    assert all(turns == ["say it"] for turns in prompt), prompt
    return [float(text == right) for text, right in zip(completions, answer)]

def endless(completions, **columns):
    while True:
        yield 1.0

def floods(completions, **columns):
    while True:
        os.write(to_trainer(), b"x" * 65536)

def drips(completions, **columns):
    while True:
        os.write(to_trainer(), b"x")

def answers_itself(completions, **columns):
    os.write(to_trainer(), json.dumps({"values": [9.0] * len(completions)}).encode() + b"\\n")
    return [1.0] * len(completions)

def answers_ahead(completions, **columns):
    for turn in range(3):
        os.write(to_trainer(), json.dumps({"turn": turn, "values": [9.0]}).encode() + b"\\n")
    return [1.0]

def scribbles(completions, **columns):
    os.write(to_trainer(), b"\\xff\\x00 not JSON\\n")
    return [1.0] * len(completions)

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class Worse(Exception):
    def __str__(self):
        sys.exit(7)

class Named(type):
    @property
    def __name__(self):
        raise RuntimeError("no name")

class Nameless(Exception, metaclass=Named):
    pass

class Odd(SyntaxError):
    @property
    def lineno(self):
        raise RuntimeError("no line")

class Half(str):
    def split(self, *given):
        raise RuntimeError("not split")

class Text(Exception):
    def __str__(self):
        return Half("half a text")

class Sly(Exception):
    @property
    def plain(self):
        raise RuntimeError("not plain")

class Locked(Exception):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

RAISED = {
    "mute": Mute, "worse": Worse, "nameless": Nameless, "text": Text, "sly": Sly, "locked": Locked,
    "huge": lambda: ValueError("x" * 50_000_000), "half": lambda: ValueError("\\ud800 \\x1b[2J"),
    "no text": lambda: type("Number", (Exception,), {"__str__": lambda self: 5})(),
    "odd": lambda: Odd("line"), "deep": lambda: deep(), "group": lambda: ExceptionGroup("some", [Mute(), Mute()]),
}

def deep():
    return deep()

def raises(completions, kind, **columns):
    raise RAISED[kind]()
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "custom.py").write_text(FUNCTIONS)
    return folder


COLUMNS = {"answer": ["b", "a", ""], "prompt": [["say it"], ["say it"], ["say it"]]}


@pytest.mark.parametrize(
    ("function", "counts"),
    [
        pytest.param("drops", "returned 2 values for 3 completions", id="drops"),
        pytest.param("appends", "returned 4 values for 3 completions", id="appends"),
        pytest.param("endless", "returned more than 3 values for 3 completions", id="endless generator"),
    ],
)
def test_wrong_number_of_values_is_an_error(folder: Path, function: str, counts: str):
    with Rewards([f"custom.py:{function}"], folder) as rewards:
        with pytest.raises(RewardError, match=rf"custom\.py:{function}.*{counts}"):
            rewards.score(["b", "c", ""], COLUMNS)


def test_changes_of_arguments_do_not_affect_other_functions(folder: Path):
    """Neither later functions in the same process nor the next step see the changes."""
    with Rewards(["custom.py:empties", "custom.py:sorts", "custom.py:judge"], folder) as rewards:
        for _ in range(2):
            table = rewards.score(["b", "c", ""], COLUMNS)
            assert [values.tolist() for values in table.each.values()] == [[1.0, 0.0, 1.0]] * 3
    assert COLUMNS["prompt"] == [["say it"]] * 3


def test_calls_for_single_rows_receive_the_original_arguments(folder: Path):
    """Each call removes an element from a list in `arguments`."""
    entry = {"reward": "custom.py:pops", "arguments": {"weights": [1.0, 2.0]}}
    shared = ["say it"]
    with Rewards([entry], folder) as rewards:
        with pytest.raises(RewardError, match="for the batch but for none of its rows"):
            rewards.score(["a", "b", "c"], {"prompt": [shared] * 3})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        pytest.param("floods", "wrote [0-9]+ bytes without an end to the socket of its process", id="at full speed"),
        pytest.param("drips", "gave no answer within 1 s, and was ended|bytes without an end", id="byte by byte"),
        pytest.param("answers_itself", r"wrote '\{\"values\": \[9.0", id="forged answer"),
        pytest.param("answers_ahead", 'wrote \'.*"turn": 0', id="answers to other requests"),
        pytest.param("scribbles", "wrote '.*not JSON' to the socket of its process, and was", id="no JSON"),
    ],
)
def test_function_that_writes_to_the_socket_is_ended(folder: Path, function: str, message: str):
    with Rewards([f"custom.py:{function}"], folder, timeout=1 if function == "drips" else 60, on_bad="zero") as rewards:
        table = rewards.score(["a"], {})
        (reason,) = {reason for _, _, reason in table.bad}
        assert table.totals.tolist() == [0.0]
        assert re.search(message, reason), reason
        (worker,) = rewards._workers.values()
        assert worker._process is None, "the process must have ended"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mute", r"raised Mute, whose text cannot be read: reading it raises RuntimeError \(line \d+\)"),
        ("worse", r"raised Worse, whose text cannot be read: reading it raises SystemExit \(line \d+\)"),
        ("nameless", r"raised Nameless: \(line \d+\)"),
        ("text", r"raised Text: half a text \(line \d+\)"),
        ("sly", r"raised Sly, whose text cannot be read: reading it raises RuntimeError"),
        ("no text", r"raised Number, whose text cannot be read: reading it raises TypeError"),
        ("locked", r"raised Locked: \(line \d+\)"),
        ("huge", r"raised ValueError: x{200,300} \(line \d+\)\. Fix"),
        ("half", r"raised ValueError: \\ud800 \\x1b\[2J \(line \d+\)"),
        ("odd", r"raised Odd: .*line \(line \d+\)"),
        ("deep", r"raised RecursionError: maximum recursion depth exceeded"),
        ("group", r"raised ExceptionGroup: some \(2 sub-exceptions\)"),
    ],
)
def test_errors_of_misbehaving_exceptions_reach_the_trainer(shared: Rewards, kind: str, message: str):
    shared.entries[0].arguments["kind"] = kind
    with pytest.raises(RewardError, match=message) as error:
        shared.score(["a"], {})
    assert len(str(error.value)) < 1000 and "exit code" not in str(error.value)


@pytest.fixture(scope="module")
def shared(folder: Path):
    with Rewards([{"reward": "custom.py:raises", "arguments": {"kind": "mute"}}], folder) as rewards:
        yield rewards


def test_user_code_is_rejected_with_a_key_in_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(encryption.VALUE, "ab" * 32)
    with pytest.raises(RewardError, match="drops .*OCTAVO_KEY is set.*--key-file FILE") as error:
        Rewards(["exact_match", "custom.py:drops"], folder)
    assert "abab" not in str(error.value)
    with Rewards(["exact_match"], folder) as rewards:  # a built-in reward
        assert rewards.score(["a"], {"answer": ["a"]}).totals.tolist() == [1.0]


def test_worker_environment_has_no_key_variables(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("OCTAVO_KEY_FILE", "OCTAVO_KEY_ID", "OCTAVO_KEYS", "octavo_key_file"):
        monkeypatch.setenv(name, "/nowhere")
    worker = worker_client.Worker(folder / "custom.py", FUNCTIONS, ["drops"])
    worker.start()
    try:
        raw = Path(f"/proc/{worker._process.pid}/environ").read_bytes()
    finally:
        worker.close()
    assert (
        b"OCTAVO_KEY" not in raw.split(b"PYTEST")[0].upper()
        and b"/nowhere" not in raw
        and os.environ["PATH"].encode() in raw
    )
