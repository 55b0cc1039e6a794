"""Files and modules that pages, examples, settings and sources name are there, so that a move leaves no name behind.

What is looked for in a text:

    octavo.x.y       a module, or a name at the top of one
    octavo/x/y.py    a path from the root, also into tests/, benchmarks/, examples/ and docs/
    x/y.py           the end of such a path, in pages and sources
    y.py             the name of a file of this project, in sources of octavo/

Links are test_links.py's; strings that a program uses are `names_as_text`'s in project_rules.py. Text of other projects
and of old versions is in :data:`NO_FILES`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.project_rules import ROOT

SETTINGS = ("Makefile", "pyproject.toml", "mkdocs.yml", ".ci/run")
FOLDERS = ("octavo", "tests", "benchmarks", "examples", "docs")
DOTTED = re.compile(r"(?<![\w/.-])octavo(?:\.[A-Za-z_]\w*)+")
ROOTED = re.compile(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w")
SHORT = re.compile(r"(?<![\w/.*{}$<>-])\w+(?:/\w+)+\.py\b")
BARE = re.compile(r"(?<![\w/.*{}$<>-])\w+\.py\b")
# Names that look like files or modules of Octavo and are none, by where they are (a file or a folder).
NO_FILES = {
    "CHANGELOG.md": {"octavo.models.save_hf"},
    "CONTRIBUTING.md": {"octavo/cli/NAME.py", "octavo/data/formats/NAME_files.py"},  # what a reader will add
    "pyproject.toml": {"octavo.examples"},  # a link, which a wheel has as a folder
    "octavo/cli": {"octavo.key", "octavo.schema.json"},  # files that users keep
    "octavo/config": {"octavo.schema.json", "FILE.py"},
    "octavo/rl/rewards": {"FILE.py"},
    "octavo": {  # Python's and LLM Foundry's
        "pydoc_data/topics.py",
        "models/utils/config_defaults.py",
        "models/mpt/configuration_mpt.py",
    },
    "benchmarks/gpu": {"torch/cuda/graphs.py"},
    "benchmarks/cost.py": {  # torchtitan's and Megatron's
        "benchmarks/llama3_h100_202412_torchtitan.md",
        "benchmarks/llama3_8b_h200_2025-06_torchtitan.md",
        "docs/performance-summary.md",
    },
}


def texts() -> Iterator[tuple[str, str]]:
    """Whatever names files, as (path, text); of the changelog what is not released, since a release names its own."""
    for name in SETTINGS:
        yield name, (ROOT / name).read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    yield "CHANGELOG.md", re.split(r"^## (?=0\.[0-4]\.)", changes, maxsplit=1, flags=re.MULTILINE)[0]
    at_root = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md")]
    pages = [*at_root, *sorted((ROOT / "docs").rglob("*.md"))]
    scripts = [path for path in sorted((ROOT / "examples").rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    sources = [path for folder in ("octavo", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in [*pages, *scripts, *sources]:
        text = path.read_text(encoding="utf-8")
        if path.name == "README.md":  # a table may say of which version its paths are
            text = re.sub(r"\| file \(paths as of .*?\n\n", "\n\n", text, flags=re.DOTALL)
        if path.name == "coming_from.md":  # a list of files of other projects, at versions that it names
            text = re.sub(r"^### Where it was read\n.*?(?=^## )", "", text, flags=re.DOTALL | re.MULTILINE)
        yield path.relative_to(ROOT).as_posix(), text


@cache
def files() -> frozenset[str]:
    """All ends of the paths of Python files: "octavo/x/y.py", "x/y.py", and "y.py" of octavo/ and tests."""
    parts = [path.relative_to(ROOT).parts for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    by_name = [names[0] == "octavo" or names[-1].startswith("test_") for names in parts]
    ends = ["/".join(n[at:]) for n, alone in zip(parts, by_name, strict=True) for at in range(len(n) - (not alone))]
    return frozenset(ends)


def is_there(path: str) -> bool:
    """Whether a path is there; of one that ends with "_", whether another begins so."""
    return (ROOT / path).exists() or (path.endswith("_") and any(ROOT.glob(f"{path}*")))


def is_module(name: str) -> bool:
    """Whether `octavo.x.y` is a module, or begins with one in which the next word is bound."""
    if re.search("[^_]_$", name):  # the beginning of a name
        return is_there(name.replace(".", "/"))
    words = name.split(".")
    for end in range(len(words), 0, -1):
        stem = ROOT.joinpath(*words[:end])
        file = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
        if file.is_file():
            following = words[end : end + 1]
            return not following or following[0].startswith("__") or following[0] in bound(file)
    return False


@cache
def bound(file: Path) -> frozenset[str]:
    """The names that a module binds at its top."""
    names: set[str] = set()
    todo: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            match node:
                case ast.FunctionDef(name=word) | ast.ClassDef(name=word):
                    names.add(word)
                case ast.alias():
                    names.add(node.asname or node.name)
                case ast.Name(id=word, ctx=ast.Store()):
                    names.add(word)
                case ast.stmt():
                    todo.append(node)
                case ast.Tuple() | ast.ExceptHandler():
                    todo.append(node)
    return frozenset(names)


def stale(path: str, text: str) -> list[str]:
    """What a text names that is not there."""
    no_files = set().union(*(names for at, names in NO_FILES.items() if f"{path}/".startswith(f"{at}/")))
    wrong = [name for name in DOTTED.findall(text) if not is_module(name)]
    wrong += [name for name in ROOTED.findall(text) if not is_there(name)]
    if not path.startswith("examples/"):
        wrong += [name for name in SHORT.findall(text) if name not in files() and not name.startswith(FOLDERS)]
    if path.startswith("octavo/"):
        wrong += [name for name in BARE.findall(text) if name not in files()]
    return [f"{path}: {name}" for name in dict.fromkeys(wrong) if name not in no_files]


def test_named_files_and_modules_are_there() -> None:
    lines = [line for path, text in texts() for line in stale(path, text)]
    assert not lines, "\n".join(lines)


def test_what_is_no_file_is_still_named() -> None:
    """Exceptions that nothing needs are dropped."""
    named: dict[str, set[str]] = {at: set() for at in NO_FILES}
    for path, text in texts():
        for at, names in NO_FILES.items():
            if f"{path}/".startswith(f"{at}/"):
                named[at] |= {name for name in names if name in text}
    assert named == NO_FILES


@pytest.mark.parametrize(
    ("path", "text", "names"),
    [
        ("docs/data.md", "see `octavo.data.gone`, octavo.data.Encoder.", ["octavo.data.gone"]),
        ("docs/data.md", "octavo.data.questions, a word in a docstring", ["octavo.data.questions"]),
        ("docs/data.md", "`octavo.train.Callback.begin`, octavo.fp8", []),
        ("README.md", "octavo/data/gone.py, octavo/data, tests/gone/.", ["octavo/data/gone.py", "tests/gone"]),
        ("docs/data.md", "dense/linear.py calls dense/gone.py", ["dense/gone.py"]),
        ("octavo/data/order.py", "(`gone.py`) as linear.py, test_links.py", ["gone.py"]),
        ("examples/digits.yaml", "train/gone.py, rewards.py, python -m octavo.gone", ["octavo.gone"]),
        ("octavo/rl/rewards/entry.py", "FILE.py:NAME", []),
        ("octavo/rl/run.py", "FILE.py:NAME", ["FILE.py"]),
    ],
)  # fmt: skip
def test_what_is_not_there_is_found(path: str, text: str, names: list[str]) -> None:
    assert stale(path, text) == [f"{path}: {name}" for name in names]
