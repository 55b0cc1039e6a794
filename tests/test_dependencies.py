"""What Octavo imports is what pyproject.toml declares, at the top of a file and inside functions, nothing by chance.

A module that comes with another package's dependencies is there until that package does without it.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Modules that a file imports where they are there and does without where they are not, or that no list can name.
OPTIONAL = {
    "deep_gemm": "a kernel library that is built on the spot",
    "triton": "comes with torch on Linux",
    "torchvision": "pixels are made by Pillow where it is missing",
    "transformer_engine": "is compared with by `octavo bench`, where it is installed",
    "torchao": "is compared with by `octavo bench`, where it is installed",
    "benchmarks": "of the repository; `octavo bench` says so without it",
    "reward_functions": "the user's own file, under this name in the worker",
}
#: Modules whose package has another name.
PACKAGES = {"PIL": "pillow", "ruamel": "ruamel.yaml", "sklearn": "scikit-learn", "yaml": "pyyaml"}
#: Modules of packages that a declared package requires and whose names are part of its own interface.
BROUGHT = {"pydantic_core": "pydantic", "markupsafe": "jinja2"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {normal(re.match(r"[A-Za-z0-9_.-]+", one)[0]) for one in requirements}  # type: ignore[index]


DECLARED = names(PROJECT["dependencies"])
EXTRAS = {
    extra: names(needed) for extra, needed in PROJECT["optional-dependencies"].items() if extra not in ("dev", "docs")
}


@cache
def modules(source: str) -> tuple[tuple[str, int], ...]:
    return tuple(imports(source))


def imports(source: str) -> Iterator[tuple[str, int]]:
    """(top module, line) of each import, also of `import_module("name")`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value[:1] != ".":
                yield first.value.partition(".")[0], node.lineno


def undeclared(source: str, declared: set[str]) -> dict[str, int]:
    own = {"octavo", *sys.stdlib_module_names}
    package = {**PACKAGES, **BROUGHT}
    others = [(module, line) for module, line in modules(source) if module not in own]
    return {module: line for module, line in others if normal(package.get(module, module)) not in declared}


def test_every_import_is_declared() -> None:
    declared, wrong = DECLARED.union(*EXTRAS.values()), []
    for file in sorted((ROOT / "octavo").rglob("*.py")):
        found = undeclared(file.read_text(encoding="utf-8"), declared)
        wrong += [
            f"{file.relative_to(ROOT)}:{line}: {module}" for module, line in found.items() if module not in OPTIONAL
        ]
    assert not wrong, "imported, and no dependency or extra of pyproject.toml:\n" + "\n".join(wrong)


def test_what_an_extra_brings_is_imported_where_it_is_asked_for() -> None:
    """At the top of a file it would be needed by all who import the file."""
    wrong = []
    for file in sorted((ROOT / "octavo").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        top = ast.unparse(ast.Module([n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], []))
        wrong += [
            f"{file.relative_to(ROOT)}: {module}" for module in undeclared(top, DECLARED) if module not in OPTIONAL
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os, json\nimport numpy.linalg", {}),
        ("def f():\n    from scikit_image import x", {"scikit_image": 2}),
        ("import importlib\nimportlib.import_module('nosuch.part')", {"nosuch": 2}),
        ("from PIL import Image\nfrom . import nosuch\nfrom octavo import fp8", {}),
        ("try:\n    import pandas\nexcept ImportError:\n    pandas = None", {"pandas": 2}),
    ],
)
def test_an_undeclared_import_is_found(source: str, expected: dict[str, int]) -> None:
    assert undeclared(source, DECLARED) == expected


def test_scikit_learn_is_not_needed() -> None:
    """Its 190 MB were there for 45 kB of digits."""
    files = (ROOT / "octavo").rglob("*.py")
    assert not [file for file in files for module, _ in modules(file.read_text()) if module == "sklearn"]
    assert "scikit-learn" not in DECLARED and "scipy" in DECLARED
