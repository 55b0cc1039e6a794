"""What do the tests catch? Plants one fault of ``faults/`` at a time in a copy of the tree and runs the tests that
cover it, until one fails.

    python tests/mutants/run.py --check                     # is every fragment where the list says?
    python tests/mutants/run.py --out tests/mutants/before.json
    python tests/mutants/run.py --caught-in tests/mutants/after.json   # is what was caught caught?
    python tests/mutants/run.py --only adamw-no-first-correction --tree ../other/checkout

A fault that no test notices has survived. ``--out`` keeps what was found, and names that it has already are left out,
so that an interrupted run goes on where it stopped; give a new file to judge another revision.

A fragment is looked for with any white space between its words. Where its file is gone, or no longer has it, the one
file of ``octavo/`` that has it is taken, and a test file that moved within its folder of ``tests/`` is found by its
name. A fragment found nowhere or in two places is an error, said before anything runs: mend the list, keeping the
fault's name and what it breaks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"
import torch

if not torch.cuda.is_available():  # before triton is imported: tests/conftest.py
    os.environ["TRITON_INTERPRET"] = "1"

# What no fault touches is imported once, which takes longer than most of these tests do.
import hypothesis  # noqa: F401
import pytest
import torch._dynamo
import torch.distributed.fsdp
import transformers.modeling_utils  # noqa: F401
import triton  # noqa: F401
from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".git", ".venv", "__pycache__", "demo", "runs", "build", ".*_cache")
SECONDS = 900  # after which a fault counts as caught: the program hangs


class Lost(Exception):
    """A fault that cannot be planted as the list has it."""


def spots(fault: Fault, text: str) -> list[tuple[int, int]]:
    """Where the fragment stands in ``text``, whatever white space is between its words."""
    pattern = r"\s+".join(map(re.escape, fault.old.split()))
    pattern = (r"\b" if fault.old[0].isalnum() else "") + pattern + (r"\b" if fault.old[-1].isalnum() else "")
    return [match.span() for match in re.finditer(pattern, text)]


def place(fault: Fault, tree: Path) -> tuple[Path, tuple[int, int]]:
    """The file of the fragment and its span in it.

    Raises:
        Lost: no file has it, or it stands in more than one place.
    """
    named = tree / fault.file
    if named.is_file() and (found := spots(fault, named.read_text(encoding="utf-8"))):
        if len(found) == 1:
            return named, found[0]
        raise Lost(f"{fault.name}: {fault.old!r} stands {len(found)} times in {fault.file}")
    everywhere = [
        (path, span)
        for path in sorted((tree / "octavo").rglob("*.py"))
        for span in spots(fault, path.read_text(encoding="utf-8"))
    ]
    if len(everywhere) == 1:
        return everywhere[0]
    where = ", ".join(str(path.relative_to(tree)) for path, _ in everywhere)
    raise Lost(f"{fault.name}: {fault.old!r} is not in {fault.file}, and found {f'in {where}' if where else 'nowhere'}")


def covering(fault: Fault, tree: Path) -> list[str]:
    """The arguments of pytest, with test files where they are now.

    Raises:
        Lost: a test file is gone and there is not one of its name.
    """
    words = []
    for word in (word for tests in fault.tests for word in shlex.split(tests)):
        if word.startswith("tests/") and not (tree / word.partition("::")[0]).exists():
            file, colons, test = word.partition("::")
            moved = list((tree / Path(*Path(file).parts[:2])).rglob(Path(file).name))
            if len(moved) != 1:
                raise Lost(f"{fault.name}: {file}, which covers it, is gone, and {len(moved)} beside it have its name")
            word = f"{moved[0].relative_to(tree)}{colons}{test}"
        words.append(word)
    return words


class Planted(NamedTuple):
    """A fault in a tree, and the process that runs its tests there."""

    fault: Fault
    tree: Path
    path: Path
    text: str  # of the file without the fault
    arguments: list[str]
    output: IO[str]


def plant(fault: Fault, tree: Path) -> tuple[int, Planted]:
    """(the process, what it judges)."""
    path, (start, end) = place(fault, tree)
    text = path.read_text(encoding="utf-8")
    output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by harvest)
    planted = Planted(fault, tree, path, text, covering(fault, tree), output)
    _write(path, text[:start] + fault.new + text[end:])
    process = os.fork()
    if not process:
        _run(planted)
    return process, planted


def _run(planted: Planted) -> None:
    """The tests, in the forked process."""
    os.setsid()
    signal.alarm(SECONDS)
    for stream in (1, 2):
        os.dup2(planted.output.fileno(), stream)
    os.chdir(planted.tree)
    os.environ |= {"PYTHONPATH": str(planted.tree), "COLUMNS": "500"}
    sys.path[0], sys.argv = str(planted.tree), ["pytest"]
    del sys.modules["__main__"].__file__  # what is spawned from here must not run this file
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", *planted.arguments], [LongLast()])
    sys.stdout.flush()
    os._exit(int(code))


class LongLast:
    """A plugin of pytest: quick tests come first."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.get_closest_marker("long") is not None)


def harvest(planted: Planted, code: int, seconds: float) -> dict[str, Any]:
    """Take the fault out again. ``caught`` is the first test that failed.

    Raises:
        Lost: the tests did not run.
    """
    _write(planted.path, planted.text)
    fault = planted.fault
    with planted.output:
        planted.output.seek(0)
        output = planted.output.read()
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
    found: dict[str, Any] = {"area": fault.area, "cpu_seconds": round(seconds, 1)}
    if code == 0:
        return {**found, "survived": list(fault.tests)}
    if code < 0 or failed:
        return {**found, "caught": failed[0] if failed else f"stopped by signal {-code}"}
    said = f"pytest {shlex.join(planted.arguments)} ended with {code}, and no test failed"
    raise Lost(f"{fault.name}: {said}:\n{output[-2000:]}")


def _write(path: Path, text: str) -> None:
    """Also without its bytecode, which is trusted by size and second alone."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults alone")
    parser.add_argument("--caught-in", type=Path, metavar="FILE.json", help="those alone that were caught there")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="keep what is found here; skip what it has")
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="DIR", help="the checkout to judge (this one)")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in a copy of its own")
    parser.add_argument("--check", action="store_true", help="look for the fragments and run nothing")
    asked = parser.parse_args()
    by_name = {fault.name: fault for fault in FAULTS}
    if len(by_name) != len(FAULTS):
        sys.exit("two faults have one name")
    if unknown := set(asked.only or ()) - set(by_name):
        sys.exit(f"there is no fault {', '.join(sorted(unknown))}")
    chosen = [by_name[name] for name in asked.only] if asked.only else list(FAULTS)
    if asked.caught_in:
        before = json.loads(asked.caught_in.read_text(encoding="utf-8"))
        chosen = [fault for fault in chosen if "caught" in before.get(fault.name, {})]
    lost = []
    for fault in chosen:
        try:
            place(fault, asked.tree.resolve())
            covering(fault, asked.tree.resolve())
        except Lost as error:
            lost.append(fault)
            print(f"LOST {error}", file=sys.stderr)
    print(f"{len(chosen) - len(lost)} of {len(chosen)} faults can be planted")
    if asked.check:
        return 2 if lost else 0
    known = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out and asked.out.exists() else {}
    left = [fault for fault in chosen if fault not in lost and fault.name not in known]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="octavo-mutants-", ignore_cleanup_errors=True) as made:
        ignore = shutil.ignore_patterns(*LEFT_OUT)
        trees = [Path(made) / str(job) for job in range(asked.jobs)]
        for tree in trees:
            shutil.copytree(asked.tree.resolve(), tree, ignore=ignore, symlinks=True)
        under_way: dict[int, Planted] = {}
        while left or under_way:
            while left and trees:
                process, planted = plant(left.pop(0), trees.pop())
                under_way[process] = planted
            process, status, usage = os.wait4(-1, 0)
            planted = under_way.pop(process)
            trees.append(planted.tree)
            try:
                found = harvest(planted, os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)
            except Lost as error:
                lost.append(planted.fault)
                print(f"LOST {error}", file=sys.stderr, flush=True)
                continue
            known[planted.fault.name] = found
            if asked.out:
                ordered = {name: known[name] for name in by_name if name in known}
                asked.out.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
            print(f"{found['cpu_seconds']:6.1f} s  {planted.fault.name}: {found.get('caught', 'SURVIVED')}", flush=True)
    survivors = [fault.name for fault in chosen if "survived" in known.get(fault.name, {})]
    caught = sum("caught" in known.get(fault.name, {}) for fault in chosen)
    print(f"{caught} caught, {len(survivors)} survived{': ' + ', '.join(survivors) if survivors else ''}")
    return 2 if lost else int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
