"""Reward functions that modify their arguments at random: rewards are correct, or an error has both counts.

    python -m tests.fuzz.test_rewards --cases 10000 --seed 1

Each case is a short program that a reward function runs: it changes its list of completions and its columns in place,
then returns correct rewards, rewards of the remaining rows, too many, none, invalid values, or raises. A second
function that is called afterwards for the same rows must get them unchanged.
"""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path
from typing import Any

from octavo.rl.rewards import RewardError, Rewards
from tests.fuzz import mutate
from tests.fuzz.bounded import Finding, command

FUNCTIONS = """
import random

class Silent(Exception):
    def __str__(self):
        raise KeyError("none")

def change(completions, columns, program):
    for what, number in program["changes"]:
        rng = random.Random(number)
        target = rng.choice([completions, *columns.values()])
        inner = [value for value in target if isinstance(value, list | dict)]
        if what == "inner" and inner:
            rng.choice(inner).clear()
        elif what == "sort":
            target.sort(key=repr)
        elif what == "shuffle":
            rng.shuffle(target)
        elif what == "clear":
            target.clear()
        elif what == "append":
            target.append("more")
        elif what == "drop" and target:
            target.pop(rng.randrange(len(target)))
        elif what == "set" and target:
            target[rng.randrange(len(target))] = None

def f(completions, program, **columns):
    right, plan = [float(len(text)) for text in completions], {**program[0]}
    change(completions, {**columns, "program": program}, plan)
    how = plan["returns"]
    if how == "raise":
        raise Silent()
    left = [float(len(str(text))) for text in completions]
    kinds = {"right": right, "left": left, "tuple": tuple(right), "iterator": iter(right), "twice": right * 2,
             "endless": iter(float, 1.0), "none": None, "strange": plan["strange"]}
    return kinds[how]

def g(completions, answer, tags, **columns):
    return [float(text == right and one["n"] == len(text)) for text, right, one in zip(completions, answer, tags)]
"""
CHANGES = ("inner", "sort", "shuffle", "clear", "append", "drop", "set")
RETURNS = ("right", "left", "tuple", "iterator", "twice", "endless", "none", "strange", "raise")


def case_of(rng: random.Random) -> tuple[list[str], dict[str, list[Any]], dict[str, Any]]:
    """Return completions, their columns, and the program in each row."""
    texts = ["x" * rng.randrange(5) for _ in range(rng.randrange(1, 6))]
    program = {
        "changes": [[rng.choice(CHANGES), rng.randrange(10**6)] for _ in range(rng.randrange(4))],
        "returns": rng.choice(RETURNS),
        "strange": [rng.choice(mutate.STRANGE) for _ in range(rng.randrange(6))],
    }
    columns = {"answer": [*texts], "tags": [{"n": len(text)} for text in texts], "program": [program] * len(texts)}
    return texts, columns, program


def run(seed: int, cases: int) -> list[Finding]:
    rng, findings = random.Random(seed), list[Finding]()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.py").write_text(FUNCTIONS)
        with Rewards(["mine.py:f", "mine.py:g"], folder, on_bad="zero") as rewards:
            strict = Rewards(["mine.py:f"], folder)
            with strict:
                for number in range(cases):
                    texts, columns, program = case_of(rng)
                    case = f"case {number} of seed {seed}, {program['returns']} after {program['changes']}"
                    before = copy.deepcopy((texts, columns))
                    table = rewards.score(texts, columns)
                    right = [float(len(text)) for text in texts]
                    if table.each["g"].tolist() != [1.0] * len(texts):
                        findings.append(Finding(case, f"the next function saw other rows: {table.each['g']}"))
                    if (texts, columns) != before:
                        findings.append(Finding(case, "the trainer's own rows were changed"))
                    good = program["returns"] in ("right", "tuple", "iterator")
                    if good and table.each["f"].tolist() != right:
                        findings.append(Finding(case, f"gave {table.each['f']} for {right}: {table.bad}"))
                    never = program["returns"] in ("twice", "endless", "none", "raise")
                    if never and len(table.bad) != len(texts):
                        findings.append(Finding(case, f"counted as numbers: {table.each['f']}"))
                    if never and number % 8 == 0:
                        try:
                            strict.score(texts, columns)
                            findings.append(Finding(case, "is no error"))
                        except RewardError as error:
                            if "exit code" in str(error):
                                findings.append(Finding(case, f"ended its process: {error}"))
    return findings


def test_rewards_cannot_change_their_arguments() -> None:
    assert run(seed=11, cases=300) == []


if __name__ == "__main__":
    command(run, cases=10_000, seed=0)
