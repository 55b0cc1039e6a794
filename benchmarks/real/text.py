"""Writes the text set of the real model, from what ships with Python. It is built, never committed (PSF licence).

    text.{train,eval}.jsonl            {"text", "source"}: topics of pydoc, licences, the docstrings of each module
    instructions.{train,eval}.jsonl    {"messages"}: questions about signatures and docstrings, with their answers
    about.json                         the version of Python, numbers of rows, the SHA-256 of every file

Held-out rows are other topics and other modules. Topics of pydoc repeat parts of each other, so a paragraph that is
held out is removed from the training text.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import platform
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.real import RealError, refuse_file

EVERY = 4  # of the topics and modules one in so many is held out
SHORTEST = 400  # characters of a document
ANSWER = (20, 400)  # characters of an answer
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "turtledemo"}
FILES = tuple(f"{kind}.{part}.jsonl" for kind in ("text", "instructions") for part in ("train", "eval"))
PURPOSE = "What does the Python function `{signature}` of the module `{module}` do?"
NAME = "Which function of Python's module `{module}` does this? {summary}"


@dataclass(frozen=True)
class Function:
    """A public function: its signature as in the source, and the first paragraph of its docstring in one line."""

    name: str
    signature: str
    summary: str


@dataclass(frozen=True)
class Module:
    """A module of the standard library: its docstrings as one document, and its public functions."""

    name: str
    text: str
    functions: tuple[Function, ...]


def write(folder: Path) -> str:
    """Write the text set, atomically, or accept an existing one of the same Python; return a sentence about it.
    Raises RealError for a folder with other content."""
    from octavo.base import atomic_write

    refuse_file(folder)
    python = platform.python_version()
    if folder.exists() and any(folder.iterdir()):
        _check(folder, python)
        return f"{folder} is complete"
    rows = _rows()
    with atomic_write.new_folder(folder, RealError, replace=False) as new_folder:
        about: dict[str, object] = {"python": python}
        for name in FILES:
            content = "".join(json.dumps(row) + "\n" for row in rows[name]).encode()
            (new_folder / name).write_bytes(content)
            about[name] = {"rows": len(rows[name]), "sha256": hashlib.sha256(content).hexdigest()}
        (new_folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
        atomic_write.sync_tree(new_folder)
    return f"wrote {folder}: " + ", ".join(f"{len(rows[name])} rows in {name}" for name in FILES)


def _check(folder: Path, python: str) -> None:
    fix = f"delete {folder} and run `make real` again"
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        digests = {name: about[name]["sha256"] for name in FILES}
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise RealError(f"{folder} exists and is not a text set of `make real`; {fix}") from cause
    if about.get("python") != python:
        raise RealError(f"{folder} was made from Python {about.get('python')}, this is Python {python}; {fix}")
    for name, digest in digests.items():
        file = folder / name
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise RealError(f"{file} is missing or was changed; {fix}")


def _rows() -> dict[str, list[dict[str, object]]]:
    topics, modules = _topics(), list(_modules())
    if len(topics) < 2 * EVERY or len(modules) < 2 * EVERY:
        raise RealError(
            f"this Python has {len(topics)} topics of pydoc and {len(modules)} modules with docstrings, which the text "
            "is made of; install Python with its standard library as files"
        )
    documents = [(f"pydoc:{name}", text) for name, text in topics.items()]
    documents += [(f"docstrings:{module.name}", module.text) for module in modules]
    # Documents of each kind are in alphabetical order, so that both parts hold both kinds.
    held_out = documents[EVERY - 1 :: EVERY]
    names = {source for source, _ in held_out}
    paragraphs = {paragraph for _, text in held_out for paragraph in _paragraphs(text)}
    training = [
        (source, "\n\n".join(part for part in text.split("\n\n") if part.strip() not in paragraphs))
        for source, text in [*documents, *_licences()]
        if source not in names
    ]
    rows: dict[str, list[dict[str, object]]] = {name: [] for name in FILES}
    for part, chosen in (("eval", held_out), ("train", training)):
        rows[f"text.{part}.jsonl"] = [
            {"text": text, "source": source} for source, text in chosen if len(text) >= SHORTEST
        ]
    seen: set[str] = set()
    for module in sorted(modules, key=lambda module: f"docstrings:{module.name}" not in names):
        part = "eval" if f"docstrings:{module.name}" in names else "train"
        for function in module.functions:
            if function.summary not in seen:  # several modules may have the same docstring
                seen.add(function.summary)
                rows[f"instructions.{part}.jsonl"] += _questions(module.name, function)
    return rows


def _paragraphs(text: str) -> Iterator[str]:
    return (part.strip() for part in text.split("\n\n") if len(part.strip()) > 60)


def _questions(module: str, function: Function) -> Iterator[dict[str, object]]:
    pairs = (
        (PURPOSE.format(signature=function.signature, module=module), function.summary),
        (NAME.format(module=module, summary=function.summary), f"{module}.{function.name}"),
    )
    for question, answer in pairs:
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as cause:  # some distributions package it separately
        raise RealError("this Python has no pydoc_data.topics, which the text is made of") from cause
    return dict(sorted(topics.items()))


def _licences() -> Iterator[tuple[str, str]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in (library / "LICENSE.txt", library.parent.parent / "LICENSE", library.parent / "LICENSE"):
        if file.is_file():
            yield f"licence:{file.name}", file.read_text(encoding="utf-8", errors="replace")
            return


def _modules() -> Iterator[Module]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        if EXCLUDED & set(parts) or any(part.startswith(("_sysconfig", "config-")) for part in parts):
            continue
        name = ".".join(part for part in parts if part != "__init__")
        if not name or any(part.startswith("_") for part in name.split(".")):
            continue
        with tokenize.open(file) as opened, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escape sequences in old modules
            tree = ast.parse(opened.read())
        documented = list(_iter_docstrings(tree))
        text = "\n\n".join([f"Module {name}", ast.get_docstring(tree) or "", *(part for part, _ in documented)])
        if len(text) >= SHORTEST:
            functions = tuple(function for _, function in documented if function is not None)
            yield Module(name, text, functions)


def _iter_docstrings(tree: ast.Module) -> Iterator[tuple[str, Function | None]]:
    """The public classes and functions with a docstring: a paragraph of text each, and a Function for functions."""
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else []
        for one in (node, *inner):
            if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or one.name.startswith("_"):
                continue
            docstring = ast.get_docstring(one)
            if not docstring:
                continue
            head = f"class {one.name}" if isinstance(one, ast.ClassDef) else f"{one.name}({ast.unparse(one.args)})"
            function = None
            summary = " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())
            if one is node and not isinstance(one, ast.ClassDef) and ANSWER[0] <= len(summary) <= ANSWER[1]:
                function = Function(one.name, head, summary)
            yield f"{head}\n{docstring}", function
