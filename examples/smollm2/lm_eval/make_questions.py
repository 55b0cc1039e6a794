"""Writes a small multiple-choice task for lm-eval from the Python that runs it: which function has this docstring?

python examples/smollm2/lm_eval/make_questions.py build/lm_eval --questions 100

The folder gets `stdlib_names.yaml` (the task) and `stdlib_names.jsonl` (the questions). The texts are docstrings of
Python's standard library; they are built here and belong in no repository. The same version of Python and the same
seed write the same questions.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import re
from pathlib import Path
from types import ModuleType

#: modules with documented functions that do nothing when they are imported
MODULES = (
    "ast", "bisect", "calendar", "cmath", "colorsys", "copy", "csv", "datetime", "difflib", "fnmatch", "fractions",
    "functools", "glob", "gzip", "hashlib", "heapq", "html", "inspect", "itertools", "json", "keyword", "linecache",
    "locale", "math", "mimetypes", "operator", "os", "os.path", "pathlib", "pprint", "random", "re", "secrets",
    "shlex", "shutil", "statistics", "string", "struct", "subprocess", "sys", "tempfile", "textwrap", "threading",
    "time", "tokenize", "traceback", "types", "unicodedata", "urllib.parse", "uuid", "warnings", "zlib",
)  # fmt: skip
CHOICES = 4
TASK = """\
task: stdlib_names
dataset_path: json
dataset_kwargs:
  data_files: {{test: {questions}}}
test_split: test
output_type: multiple_choice
doc_to_text: "A function of Python's standard library has this docstring: {{{{docstring}}}}\\nThe function is called"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: " "
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def first_sentence(function: object) -> str | None:
    """Return the first sentence of a docstring, or None if it is too short or too long for a question."""
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z)])\. ", text)[0].rstrip(".") + "."
    return sentence if 25 <= len(sentence) <= 200 and "->" not in sentence else None


def functions_of(module: ModuleType) -> dict[str, str]:
    """Return name -> first sentence of its docstring, for the public functions of a module whose name is no part of
    that sentence."""
    functions = {}
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or not (inspect.isfunction(value) or inspect.isbuiltin(value)):
            continue
        sentence = first_sentence(value)
        if sentence is not None and name.lower() not in sentence.lower():
            functions[name] = sentence
    return functions


def make_questions(count: int, seed: int) -> list[dict[str, object]]:
    """Return questions with a docstring, four names of functions of the same module, and the index of the right one."""
    draw = random.Random(seed)
    tables = [functions_of(importlib.import_module(name)) for name in MODULES]
    asked = [(names, name) for names in tables if len(names) >= CHOICES for name in names]
    if len(asked) < count:
        raise SystemExit(f"--questions {count}: this Python has only {len(asked)} functions with usable docstrings")
    questions: list[dict[str, object]] = []
    seen: set[str] = set()
    for names, name in draw.sample(asked, len(asked)):
        if names[name] in seen or len(questions) == count:  # `os` and `posix` share functions
            continue
        seen.add(names[name])
        others = [other for other in names if names[other] != names[name]]
        if len(others) < CHOICES - 1:
            continue
        choices = [name, *draw.sample(others, CHOICES - 1)]
        draw.shuffle(choices)
        questions.append({"docstring": names[name], "choices": choices, "answer": choices.index(name)})
    return questions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the task and its questions are written")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    questions = make_questions(args.questions, args.seed)
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"{args.folder}: {error.strerror}") from error
    file = (args.folder / "stdlib_names.jsonl").absolute()
    file.write_text("".join(json.dumps(row) + "\n" for row in questions))
    (args.folder / "stdlib_names.yaml").write_text(TASK.format(questions=file))
    print(f"{args.folder}: {len(questions)} questions of {CHOICES} choices")


if __name__ == "__main__":
    main()
