"""Through how many files one call of an FP8 linear layer goes, and how often it changes file: what a reader must hold.

    python benchmarks/hot_path.py [--recipe blockwise] [--json FILE]

Counts what ``sys.setprofile`` sees of Octavo's own Python functions in one forward and one backward of a warm layer, as
it trains: a change of file is a call into, or a return to, a function of another file than the one before.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from octavo import fp8

ROOT = Path(fp8.__file__).parents[1]


def seen(call: Any) -> dict[str, Any]:
    """Files in the order of their first function, how often the file changed, and how many functions were called."""
    visited: list[str] = []
    calls = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        where = frame if event == "call" else frame.f_back
        if event not in ("call", "return") or where is None:
            return
        file = Path(where.f_code.co_filename)
        if file.is_relative_to(ROOT):
            calls += event == "call"
            visited.append(str(file.relative_to(ROOT)))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    changes = sum(a != b for a, b in zip(visited, visited[1:], strict=False))
    return {"files": list(dict.fromkeys(visited)), "changes": changes, "calls": calls}


def lines_of_forward() -> int:
    """Lines of the forward of the autograd function behind a layer, its signature included."""
    module = inspect.getmodule(fp8.Linear)
    assert module is not None
    tree = ast.parse(inspect.getsource(module))
    own = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "_ThreeGemms")
    forward = next(n for n in own.body if isinstance(n, ast.FunctionDef) and n.name == "forward")
    assert forward.end_lineno is not None
    return forward.end_lineno - forward.lineno + 1


def measure(recipe: str) -> dict[str, Any]:
    """What one forward and one backward of a warm layer pass through."""
    layer: Any = torch.nn.Sequential(torch.nn.Linear(256, 256))
    fp8.apply(layer, fp8.plan(layer, recipe))
    x = torch.randn(256, 256, requires_grad=True)
    layer(x).sum().backward()  # warm: imports, choices that are remembered, weight codes
    outputs = []
    result = {"recipe": recipe, "forward": seen(lambda: outputs.append(layer(x)))}
    dy = torch.ones_like(outputs[0])
    with torch.autograd.set_multithreading_enabled(False):
        result["backward"] = seen(lambda: outputs[0].backward(dy))
    return result | {"forward_lines": lines_of_forward()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="blockwise", choices=fp8.RECIPES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = measure(args.recipe)
    for way in ("forward", "backward"):
        found = result[way]
        print(f"{way}: {len(found['files'])} files, {found['changes']} changes of file, {found['calls']} calls")
        for file in found["files"]:
            print(f"    {file}")
    print(f"_ThreeGemms.forward: {result['forward_lines']} lines")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
