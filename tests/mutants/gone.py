"""Which tests of version 0.4.0 are no more, and is each named in ``deleted.md``? Prints those that are not.

    python tests/mutants/gone.py

A test is there by its name, in whatever file: where fewer files have that name than did, as many are to be named. Names
in ``deleted.md`` are ``FILE::test_name`` below ``tests/``, of 0.4.0 or of today; one that neither has is printed too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLD = "88759987f705d741761139a229ebc41afa05e35b"  # version 0.4.0
FILE = ROOT / "tests/mutants/deleted.md"


def functions(text: str, file: str) -> list[tuple[str, str]]:
    found = [n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    return [(file.removeprefix("tests/"), name) for name in found if name.startswith("test_")]


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> int:
    files = [f for f in git("ls-tree", "-r", "--name-only", OLD, "tests").split() if f.endswith(".py")]
    before = [test for f in files for test in functions(git("show", f"{OLD}:{f}"), f)]
    paths = sorted((ROOT / "tests").rglob("*.py"))
    now = [test for p in paths for test in functions(p.read_text(encoding="utf-8"), str(p.relative_to(ROOT)))]
    named = set(re.findall(r"([\w/.]+\.py)::(test_\w+)", FILE.read_text(encoding="utf-8")))
    less = Counter(name for _, name in before) - Counter(name for _, name in now)
    wrong = []
    for name, count in less.items():
        without = [test for test in before if test[1] == name and test not in named]
        if len(without) > sum(test[1] == name for test in before) - count:
            wrong += [f"gone, and not in {FILE.name}: {'::'.join(test)}" for test in without]
    wrong += [f"{FILE.name} names what never was: {'::'.join(test)}" for test in sorted(named - {*before, *now})]
    print("\n".join(wrong) or f"{len(before)} tests then, {len(now)} now; all {less.total()} that are gone are named")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
