"""Functions of a program as rewards: the values, errors and digests of functions in a file, without a process."""

from __future__ import annotations

import functools
import importlib
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import checkpoint
from octavo.rl.rewards import RewardError, Rewards, changed, python_functions
from octavo.rl.rewards.builtin import number
from octavo.rl.rewards.python_functions import check_functions, hold, name_of

PIDS = []


def length(completions, **columns):
    PIDS.append(os.getpid())
    return [len(text) for text in completions]


def by_level(completions, level, factor=1.0):
    return (factor * float(one) for one in level)


def raises(completions, **columns):
    return [1 / int(text) for text in completions]


def together(completions, **columns):
    if len(completions) > 1:
        raise RuntimeError("not of this batch")
    return [1.0]


def few(completions, **columns):
    return [0.0]


def nan(completions, **columns):
    return [float("nan")] * len(completions)


def changes(completions, level, **columns):
    level.clear()
    completions.append("x")
    return [1.0] * (len(completions) - 1)


def draws(completions, **columns):
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    return [torch.rand(()).item() for _ in completions]


class Judge:
    def __call__(self, completions, **columns):
        return [2.0 for _ in completions]


async def later(completions):
    return [0.0]


def rewards_of(*functions: Callable[..., Any], entries: list[Any] | None = None, **options: Any) -> Rewards:
    with hold(functions):
        return Rewards(entries or [f"python:{name_of(f)}" for f in functions], Path(), **options)


def test_functions_are_called_here_with_columns_weights_and_arguments():
    entries = [
        "python:length", {"reward": "python:by_level", "weight": 0.5, "arguments": {"factor": 4}}, "python:Judge",
        {"reward": "python:lambda", "name": "ends"}, "exact_match",
    ]  # fmt: skip
    judge, ends = (
        Judge(),
        lambda completions, answer: [text == one for text, one in zip(completions, answer, strict=True)],
    )
    with rewards_of(length, by_level, functools.partial(judge), ends, entries=entries) as rewards:
        rewards.expect(["answer", "level"])
        table = rewards.score(["a", "bcd"], {"answer": ["a", "b"], "level": [1, 2]})
        assert rewards.names == ["length", "by_level", "Judge", "ends", "exact_match"]
    assert PIDS[-1] == os.getpid()
    assert table.totals.tolist() == [1 + 0.5 * 4 + 2 + 1 + 1, 3 + 0.5 * 8 + 2 + 0 + 0]
    assert table.each["by_level"].tolist() == [4, 8] and not table.bad


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (raises, r"reward raises \(python:raises\) returned no number for 1 of 2 completions. Row 1 .*'x'\): raised "
                 r"ValueError: .* \(line \d+\)"),
        (together, "raised RuntimeError: not of this batch.*, for the batch but for none of its rows"),
        (few, "returned 1 values for 2 completions"),
        (nan, "Rows 0 to 1 .*: returned nan"),
    ],
)  # fmt: skip
def test_errors_are_those_of_functions_in_files(function: Callable[..., Any], error: str):
    with rewards_of(function) as rewards, pytest.raises(RewardError, match=error):
        rewards.score(["2", "x"], {})
    with rewards_of(function, on_bad="zero") as rewards:
        table = rewards.score(["2", "x"], {})
        assert np.isnan(table.each[function.__name__][1]) and table.totals[1] == 0


def test_interrupt_in_a_function_is_no_reward():
    def interrupted(completions):
        raise KeyboardInterrupt

    with rewards_of(interrupted, on_bad="zero") as rewards, pytest.raises(KeyboardInterrupt):
        rewards.score(["a"], {})


def test_function_changes_neither_its_inputs_nor_random_numbers_of_the_run():
    level = [1, 2]
    with rewards_of(changes, draws) as rewards:
        before = checkpoint.rng.collect()
        rewards.score(["a", "b"], {"level": level})
        after = checkpoint.rng.collect()
    assert {*before} == {*after} and all(torch.equal(before[name], after[name]) for name in before)
    assert level == [1, 2]


def test_missing_column_is_an_error_before_the_first_step():
    with rewards_of(by_level) as rewards, pytest.raises(RewardError, match=r"\(python:by_level\) takes level, but"):
        rewards.expect(["answer"])


def test_function_of_another_process_is_named():
    with pytest.raises(RewardError, match="reward 'python:score' is a function that a Python program passed to octavo"):
        Rewards(["python:score"], Path())
    with hold([length]), pytest.raises(RewardError, match="has the argument 'batch', which it does not take"):
        Rewards([{"reward": "python:length", "batch": 3}], Path())


def test_digest_is_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def digest(*functions: Any) -> list[dict[str, Any]]:
        with rewards_of(*functions) as rewards:
            return rewards.digest()

    same, other = digest(length), digest(few)
    assert digest(length) == same and same[0]["sha256"]
    assert changed(digest(Judge()), digest(Judge())) is None
    assert "was removed" in str(changed(same, other))
    # the whole module if it can be imported: a function may call others
    monkeypatch.syspath_prepend(tmp_path)
    text = "def score(completions):\n    return [limit()] * len(completions)\n\n\ndef limit():\n    return {}\n"
    digests = []
    for value in (1, 1, 2):
        (tmp_path / "my_rewards_of_test.py").write_text(text.format(value))
        importlib.invalidate_caches()
        sys.modules.pop("my_rewards_of_test", None)
        python_functions.inspect.linecache.clearcache()
        digests.append(digest(importlib.import_module("my_rewards_of_test").score))
    sys.modules.pop("my_rewards_of_test", None)
    assert digests[0] == digests[1] and "has changed" in str(changed(digests[1], digests[2]))


LOCAL = lambda completions: [0.0]  # noqa: E731


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        (length, "expected a list of functions, such as [length], found <function length"),
        ([], "it is empty; pass at least one function"),
        (["exact_match"], "entry 0 is the text 'exact_match'; write it under rl.rewards"),
        ([length, 3], "entry 1 is 3 (int), which cannot be called"),
        ([later], "entry 0, later, is a coroutine function"),
        ([length, few, length], "the entries 0 and 2 are both named length; rename one of them"),
        ([lambda completions: [1.0], lambda completions: [2.0]], "are both named lambda"),
        ([lambda texts: texts], "entry 0, lambda, takes (texts); its first parameter must be named completions"),
        ([dict.fromkeys], "entry 0, fromkeys, "),
    ],
)
def test_unusable_functions_are_named(rewards: Any, problem: str):
    (only,) = check_functions(rewards)
    assert only.startswith(problem) or problem in only


def test_all_problems_are_reported():
    assert len(check_functions([3, "a", later, length, length])) == 4
    assert check_functions([length, by_level, Judge()]) == []


def test_several_ranks_need_functions_of_a_module(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert check_functions([length, functools.partial(by_level, factor=2), number]) == []
    for function in (LOCAL, lambda completions: [0.0], Judge()):
        (problem,) = check_functions([function])
        assert "is not in a module that can be imported, which 2 ranks need: move it to a file" in problem
    monkeypatch.setattr(length, "__module__", "__main__")
    assert check_functions([length])
