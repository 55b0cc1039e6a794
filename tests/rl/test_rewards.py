"""Reward functions: their values, and errors that name the function and the row."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

from octavo.rl.rewards import RewardError, Rewards, changed, worker
from octavo.rl.rewards.builtin import letter
from tests import ranks

SCORES = """
import dataclasses, os, sys, time
import helper

CALLS = []

@dataclasses.dataclass
class Seen:
    texts: list

def score(completions, **columns):
    print("a function may print")
    CALLS.append(Seen(completions))
    return [helper.length(text) + 100 * (len(CALLS) - 1) for text in completions]

def by_level(completions, level, factor=1, **rest):
    return (factor * float(one) for one in level)

def needs(completions, tests):
    return [0.0] * len(completions)

def raises(completions, **columns):
    return [1 / int(text) for text in completions]

def together(completions, **columns):
    if len(completions) > 1:
        raise RuntimeError("not of this batch")
    return [1.0]

def mixed(completions, **columns):
    import numpy
    values = [1, True, numpy.float32(0.5), None, "3", float("nan"), float("inf"), 10**400, [1.0]]
    return values[:len(completions)]

def few(completions, **columns):
    return [0.0]

def one(completions, **columns):
    return 0.5

def leaves(completions, **columns):
    sys.exit(3)

def dies(completions, **columns):
    os._exit(3)

def splits(completions, **columns):
    os.fork()
    return [float(len(text)) for text in completions]

def leaves_a_child(completions, **columns):
    if os.fork():
        os._exit(3)
    time.sleep(60)

def unordered(completions, **columns):
    return {float(len(text)) for text in completions}

def killed(completions, **columns):
    os.kill(os.getpid(), 9)

def sulks(completions, **columns):
    if len(completions) == 1:
        time.sleep(60)
    raise ValueError("all of them")

def hangs(completions, **columns):
    if "hang" in completions:
        time.sleep(60)
    return [1.0] * len(completions)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rewards.py").write_text(SCORES)
    (tmp_path / "helper.py").write_text("def length(text):\n    return len(text)\n")
    return tmp_path


@pytest.fixture
def make(folder):
    created = []

    def make_rewards(*entries, **options):
        created.append(Rewards(entries, folder, **options))
        return created[-1]

    yield make_rewards
    for rewards in created:
        rewards.close()


def test_functions_of_a_file_are_called_with_their_columns(make, capfd, monkeypatch):
    """The process persists over steps, imports files of the folder, and receives the columns that a function names."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # prints must not wait in a buffer of the process
    rewards = make("rewards.py:score", {"reward": "rewards.py:by_level", "weight": -0.5, "arguments": {"factor": 3}})
    first = rewards.score(["a", "bb"], {"level": [1, 2], "answer": [None, "x"]})
    assert first.each["score"].tolist() == [1.0, 2.0] and first.each["by_level"].tolist() == [3.0, 6.0]
    assert first.totals.tolist() == [1 - 1.5, 2 - 3.0] and first.totals.dtype == np.float64 and first.bad == []
    assert rewards.score(["é\n\u2028"], {"level": [0]}).each["score"].tolist() == [103.0]
    assert rewards.score([], {}).totals.shape == (0,) and set(rewards.score([], {}).each) == {"score", "by_level"}
    output = capfd.readouterr()
    assert output.out == "" and "a function may print" in output.err  # not on the stdout of the trainer


def test_optional_columns_are_always_passed(make):
    rewards = make({"reward": "rewards.py:needs", "name": "custom"}, "rewards.py:by_level")
    for columns in (["answer"], ["answer", "level"]):
        with pytest.raises(RewardError, match=r"custom \(rewards.py:needs\) takes tests, but the columns of the rows "
                           rf"are {', '.join(columns)}\. Add it"):  # fmt: skip
            rewards.expect(columns)
    rewards.expect(["tests", "level"])
    table = rewards.score(["a", "b"], {"level": [1, 2]})
    assert table.each["custom"].tolist() == [0.0, 0.0] and table.each["by_level"].tolist() == [1.0, 2.0]


def test_rewards_above_the_limit_are_rejected(tmp_path):
    (tmp_path / "large.py").write_text("def f(completions):\n    return [1e12, -2e12][: len(completions)]\n")
    for on_bad in ("error", "zero"):
        with Rewards([{"reward": "large.py:f", "weight": 100}], tmp_path, on_bad=on_bad) as rewards:
            if on_bad == "zero":
                assert rewards.score(["a", "b"], {}).totals.tolist() == [1e14, 0]
            else:
                with pytest.raises(
                    RewardError, match=r"Row 1 .*returned -2e\+12.*, and the limit of rewards is 1e\+12\."
                ):
                    rewards.score(["a", "b"], {})


@pytest.mark.parametrize(
    ("function", "completions", "reason", "rows"),
    [
        ("raises", ["1", "0", "2", "x"],
         r"Row 1 \(train, row 1: '0'\): raised ZeroDivisionError: .*\(line 23\)\. Row 3 .*: raised ValueError", [1, 3]),
        ("together", ["1", "2"], r"Rows 0 to 1 \(train, row 0: '1', \.\.\.\): raised RuntimeError: not of this batch "
         r"\(line 27\), for the batch but for none of its rows", [0, 1]),
        ("mixed", list("abcdefghi"), r"Row 3 .*: returned NoneType None, which is not a number\. .*; 3 more reasons",
         [3, 4, 5, 6, 7, 8]),
        ("sulks", ["a", "b"], r"Rows 0 to 1 .*: raised ValueError: all of them \(line \d+\)\. Fix", [0, 1]),
        ("few", ["a", "b", "c"], "Rows 0 to 2 .*: returned 1 values for 3 completions", [0, 1, 2]),
        ("one", ["a"], "returned float 0.5 instead of a list of 1 numbers", [0]),
        ("needs", ["a"], "takes tests, but the columns of the rows are answer", [0]),
        ("leaves", ["a", "b"], "raised SystemExit: 3", [0, 1]),
        ("dies", ["a", "b"], r"ended its process \(exit code 3\)", [0, 1]),
        ("leaves_a_child", ["a"], r"ended its process \(exit code 3\)", [0]),
        ("unordered", ["a", "bb"], "returned set {1.0, 2.0} instead of a list of 2 numbers", [0, 1]),
        ("killed", ["a"], r"ended its process \(signal 9\)", [0]),
        ("hangs", ["a", "hang"], r"gave no answer within 1\.5 s, and was ended", [0, 1]),
    ],
)  # fmt: skip
def test_errors_name_their_rows(make, function, completions, reason, rows):
    entry = {"reward": f"rewards.py:{function}", "name": "custom"}
    columns, where = {"answer": completions}, [f"train, row {n}" for n in range(len(completions))]
    limit = 1.5 if function in ("hangs", "sulks", "leaves_a_child") else 60.0
    strict = make(entry, timeout=limit)
    message = rf"reward custom \(rewards.py:{function}\) returned no number for {len(rows)} of {len(completions)} "
    with pytest.raises(RewardError, match=message + rf"completions\. .*{reason}") as error:
        strict.score(completions, columns, where)
    assert [row for row, _, _ in error.value.bad] == rows and "rl.on_bad_reward: zero" in str(error.value)
    lenient = make(entry, {"reward": "exact_match", "weight": 2.0}, on_bad="zero", timeout=limit)
    table = lenient.score(completions, columns, where)
    assert [row for row, _, _ in table.bad] == rows and np.isnan(table.each["custom"][rows]).all()
    (sentence,), counts = lenient.take_reports()
    assert sentence.startswith(str(error.value).partition(". Fix")[0] + ". They count as 0;")
    assert counts == {"custom": len(rows)} and lenient.take_reports() == ([], {})
    assert np.isfinite(table.totals).all() and (table.totals[rows] == 2.0).all()
    if function == "mixed":
        assert table.each["custom"][:3].tolist() == [1.0, 1.0, 0.5]
        assert [reason for row, _, reason in table.bad if row in (5, 6)] == ["returned nan", "returned inf"]
    if function == "hangs":  # the next step has a new process
        assert lenient.score(["a"], {"answer": ["a"]}).totals.tolist() == [3.0]


def test_forking_function_answers_once(make):
    """A second answer would be taken for that of the next step."""
    rewards = make("rewards.py:splits")
    assert [rewards.score([text, ""], {}).totals.tolist() for text in ("a", "bb", "ccc")] == [[1, 0], [2, 0], [3, 0]]


def test_worker_runs_the_source_that_was_read_first(make, folder):
    rewards = make({"reward": "rewards.py:hangs", "weight": 1}, on_bad="zero", timeout=1.5)
    (folder / "rewards.py").write_text("raise SystemExit")
    rewards.score(["hang"], {})
    assert rewards.score(["a"], {}).each["hangs"].tolist() == [1.0]
    (folder / "helper.py").write_text("def length(text):\n    return 0\n")
    rewards.score(["hang"], {})
    for _ in range(2):
        bad = rewards.score(["a"], {}).bad
        assert bad == [(0, "hangs", "imports files that changed since the run began: helper.py")]
    assert not (folder / "__pycache__" / "rewards.cpython-311.pyc").exists()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("rewards.py:nothing", "rewards.py cannot be used: the file has no function 'nothing'; it has score, by_level"),
        ("broken.py:f", r"broken\.py cannot be used: the file raised SyntaxError: .* \(line 2\)"),
        ("early.py:f", r"early\.py cannot be used: the file raised ModuleNotFoundError: No module named 'nowhere'"),
        ("none.py:f", r"reward 'none\.py:f': there is no file .*none\.py; paths are relative"),
        ("pipe.py:f", "pipe.py is a named pipe, not a file"),
        ("rewards.py:a.b", "'a.b' is not the name of a function; write FILE.py:FUNCTION"),
        ({"reward": "rewards.py:score", "arguments": {"completions": 1}}, "'completions', which Octavo passes"),
        ({"reward": "rewards.py:score", "arguments": {"x": {1, 2}}}, "has arguments that JSON cannot hold"),
        ({"reward": "rewards.py:score", "arguments": [1]}, r"has the arguments \[1\]; expected a mapping of names"),
        ({"reward": "rewards.py:score", "x": 1}, "'x', which it does not take; it takes name, weight, arguments"),
        ("exactmatch", "there is no reward 'exactmatch': not one of exact_match, number, .* is not a model folder"),
        ({"reward": "regex"}, r"reward regex has the pattern None; give it a text: \{reward: regex, pattern: ...\}"),
        ({"reward": "format", "pattern": "("}, r"the pattern '\(' is not a regular expression \(missing \)"),
        ({"reward": "number", "tolerance": -1}, "has the tolerance -1; expected a number from 0"),
        ({"reward": "number", "pattern": "a"}, "the argument 'pattern', which it does not take; it takes name, we"),
        ({"reward": "exact_match", "weight": float("nan")}, "has the weight nan; expected a finite number"),
        ({"reward": "exact_match", "weight": True}, "has the weight True; expected a finite number"),
        ({"reward": "exact_match", "name": "a b"}, "has the name 'a b'; expected up to 64 letters"),
        ({"weight": 1}, r"has the entry \{'weight': 1\}; expected a name"),
        (None, "has the entry None; expected a name"),
    ],
)  # fmt: skip
def test_unusable_entries_are_rejected(folder, entry, message):
    (folder / "broken.py").write_text("x = 1\ndef f(:\n")
    (folder / "early.py").write_text("import nowhere\n")
    os.mkfifo(folder / "pipe.py")
    with pytest.raises(RewardError, match=message):
        Rewards([entry], folder)


def test_file_that_hangs_while_loading_is_named(folder, monkeypatch):
    monkeypatch.setattr("octavo.rl.rewards.worker_client.STARTING", 0.5)
    (folder / "slow.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(
        RewardError, match=r"slow\.py cannot be used: the file gave no answer within 0\.5 s, and was ended"
    ):
        Rewards(["slow.py:f"], folder)


def test_texts_larger_than_the_socket_buffer(make):
    texts = ["a" * 300_000 + "é" * n for n in range(20)]
    assert make("rewards.py:score").score(texts, {"answer": texts}).totals.tolist() == [300_000 + n for n in range(20)]


def test_invalid_settings_are_rejected(folder):
    for entries, options, message in (
        ([], {}, "rl.rewards is empty; name at least one of exact_match"),
        (["number", "number"], {}, "has two named 'number'; give one of them another: .*name: number_2"),
        (["number"], {"on_bad": "skip"}, "on_bad_reward is 'skip'; it must be error or zero"),
        (["number"], {"timeout": 0}, "the time limit of rewards is 0; expected a number of seconds above 0"),
    ):
        with pytest.raises(RewardError, match=message):
            Rewards(entries, folder, **options)
    with (
        Rewards(["number"], folder) as rewards,
        pytest.raises(ValueError, match="column 'answer' has 1 values for 2 completions"),
    ):
        rewards.score(["a", "b"], {"answer": ["a"]})


def test_math_needs_math_verify(folder, monkeypatch):
    monkeypatch.setattr("octavo.rl.rewards.entry.find_spec", lambda name: None)
    with pytest.raises(
        RewardError, match=r"math needs math-verify, which is not installed: pip install 'octavo\[math\]'"
    ):
        Rewards(["math"], folder)


def values(name, pairs, **arguments):
    with Rewards([{"reward": name, **arguments}], ".") as rewards:
        columns = {"answer": [answer for _, answer in pairs]}
        return rewards.score([text for text, _ in pairs], columns).totals.tolist()


def test_built_in_rewards():
    assert values("exact_match", [(" 7\n", "7"), ("7.", "7"), ("b", ["a", "b "]), ("A", "a")]) == [1, 0, 1, 0]
    numbers = [("It is 1,234.50 dollars", "1234.5"), ("3 or 4", "4"), ("-2e3", "-2000"), ("none", "1"), ("3-5", "5"),
               ("1/3 = .3333333", "0.33333333"), ("x2", "2"), ("7.", "7"), ("12,34", "34"), ("", "0")]  # fmt: skip
    assert values("number", numbers) == [1, 1, 1, 0, 1, 1, 0, 1, 1, 0]
    assert values("number", [("99", "100"), ("98", "100")], tolerance=0.01) == [1, 0]
    with Rewards(["number"], ".") as rewards:  # a column may have the name of an argument
        assert rewards.score(["1"], {"answer": ["1"], "tolerance": ["fine"]}).totals.tolist() == [1]
    letters = [("B", "B"), ("(b)", "B"), ("B) two", "(B) two"), ("The answer is **B**.", "B"), ("\\boxed{B}", "B"),
               ("A cat sits here", "A"), ("Answer: C\nNo, answer: B", "B"), ("maybe (A), rather (B)", "B"), ("", "B"),
               ("<answer>B</answer>", "Answer: B"), ("Answers vary", "V"), ("Answer: I say (B)", "B")]  # fmt: skip
    assert values("choice", letters) == [1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 0, 1]
    for text in ("Option B", "The correct option is B", "B, since it is", "B because A is wrong", "The answer is b",
                 "Answer: b", "A or B? I choose B", "I'd go with option B.", "The best choice: B", "option B, not A",
                 "I think option B", "B - two", "B is the correct answer", "The answer is 'B'.", "answer is b, not a",
                 "<answer>b</answer>", "The answer should be (B)", "A, B or C? The answer is B", "Final_answer: B",
                 "\n**B**\nas A is wrong"):  # fmt: skip
        assert letter(text) == "B", text
    for text in ("A cat", "A, B or C?", "I, for one, say so", "The answer is a cat", "To answer a question",
                 "My answers.", "I'm not sure", "A cat, since it purrs", "Options are A", "A is for apple",
                 "Answer: I'm lost", "I choose a cat.", "as a rule, a b", "An option Better than none"):  # fmt: skip
        assert letter(text) is None, text
    assert values("regex", [("a 12 b", None), ("ab", None)], pattern=r"\d+") == [1, 0]
    assert values("regex", [("Answer: 3\nAnswer:  4 ", "4"), ("Answer: 4", "3")], pattern="Answer:(.*)") == [1, 0]
    form = "<think>.*</think>.+"
    assert values("format", [(" <think>a\nb</think>c\n", None), ("<think></think>", None)], pattern=form) == [1, 0]


@pytest.mark.parametrize(("name", "good", "bad", "reason"), [
    ("exact_match", "a", None, "the row has no answer to compare with"),
    ("number", "1", "seven", "the reference 'seven' has no number"),
    ("number", "1", "9" * 400, "the reference '9+' has no number below 1e308"),
    ("choice", "A", "the second", "the reference 'the second' has no letter"),
])  # fmt: skip
def test_unusable_references_are_named(name, good, bad, reason):
    with (
        Rewards([name], ".") as rewards,
        pytest.raises(RewardError, match=rf"for 1 of 3 completions\. Row 1 \('2'\): {reason}\. Fix"),
    ):
        rewards.score(["1", "2", "A"], {"answer": [good, bad, good]})


def test_endless_pattern_search_is_ended():
    with Rewards([{"reward": "regex", "pattern": "(a|aa)+$"}], ".", "zero", timeout=1.0) as rewards:
        start = time.monotonic()
        table = rewards.score(["a" * 60 + "b"], {"answer": ["a"]})
        assert table.bad == [(0, "regex", "gave no answer within 1 s, and was ended")]
        assert time.monotonic() - start < 30


def test_math_compares_mathematically():
    pytest.importorskip("math_verify")
    pairs = [("So \\boxed{\\frac{1}{2}}.", "0.5"), ("The answer is $2\\sqrt{2}$", "\\sqrt{8}"), ("3", "$x^2+1$"),
             ("$x^2 + 1$", "1+x^2"), ("no idea", "7"), ("12", ["13", "12"]), ("{2, 1}", "{1,2}"), ("x", "x"),
             ("$\\{2,1\\}$", "\\{1,2\\}"), ("(2,1)", "(1,2)"), ("[1, 2)", "$[1,2)$"), ("5", "5 apples")]  # fmt: skip
    assert values("math", pairs) == [1, 1, 0, 1, 0, 1, 1, 1, 1, 0, 1, 1]
    for words in ("two", "no solution", "\\text{two}"):
        with pytest.raises(
            RewardError, match=f"reference {re.escape(repr(words))} is not an expression that math-verify"
        ):
            values("math", [("2", words)])
    assert values("math", [("$\\sin x$", "\\sin x"), ("$\\log y$", "$\\log y$")]) == [1, 1]


def _score_endlessly(sender) -> None:
    rewards = Rewards([{"reward": "regex", "pattern": "(a|aa)+$"}], ".", timeout=600.0)
    sender.send(rewards._workers.popitem()[1]._process.pid)
    rewards.score(["a" * 80 + "b"], {"answer": ["a"]})


@pytest.mark.skipif(ranks.START != "fork", reason="the trainer is forked")
def test_hanging_worker_ends_when_the_trainer_is_killed():
    """Even though a regular expression search holds the GIL."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    trainer = multiprocessing.get_context("fork").Process(target=_score_endlessly, args=(sender,))
    trainer.start()
    group = receiver.recv()
    time.sleep(0.3)
    trainer.kill()
    trainer.join()
    for _ in range(100):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, 0)
            time.sleep(0.1)
            continue
        break
    else:
        os.killpg(group, signal.SIGKILL)
        pytest.fail("the worker is still running")


def test_close_ends_child_processes_of_a_function(make, folder):
    (folder / "starts.py").write_text(
        "import subprocess, sys\n"
        "def f(completions):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    return [child.pid]\n"
    )
    rewards = make("starts.py:f")
    child = int(rewards.score(["a"], {}).totals[0])
    os.kill(child, 0)
    rewards.close()
    for _ in range(50):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            break
        if state == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child process is still running")


def test_digest_identifies_rewards(make, folder):
    entries = ["exact_match", {"reward": "rewards.py:score", "weight": 0.5, "name": "custom"}]
    before = json.loads(json.dumps(make(*entries).digest()))
    assert changed(before, make(*entries).digest()) is None
    assert changed(before, make(entries[0]).digest()) == "the reward 'custom' was removed"
    assert changed(before, make(*entries, "number").digest()) == "the reward 'number' was added"
    heavier = make(entries[0], {**entries[1], "weight": 0.25}).digest()
    assert changed(before, heavier) == "the reward 'custom' has changed: its weight is 0.25 and was 0.5"
    other = make(entries[0], {**entries[1], "arguments": {"factor": 2}}).digest()
    assert changed(before, other) == "the reward 'custom' has changed: its arguments is {'factor': 2} and was {}"
    content = "the reward 'custom' has changed: its file, a file that it imports, or its folder has changed"
    (folder / "unused.py").write_text("")
    (folder / "helper.py").write_text("def length(text):\n    return 2 * len(text)\n")
    changed_helper = make(*entries).digest()
    assert changed(before, changed_helper) == content
    (folder / "rewards.py").write_text(SCORES + "\n")
    assert changed(changed_helper, make(*entries).digest()) == content


def test_installed_packages_are_not_in_the_digest():
    """For example a virtual environment in the folder."""
    packages = Path(sysconfig.get_paths()["purelib"])
    assert "__init__.py" in worker._imported_files(str(packages / "numpy"))
    assert not [name for name in worker._imported_files(str(packages.parent)) if "site-packages" in name]
