"""Writes the prompts of grpo.yaml from the instruction rows: one question about each function with a short name.

    python examples/smollm2/make_prompts.py build/smollm2-data

Reads instructions.train.jsonl and instructions.eval.jsonl in that folder, writes prompts.train.jsonl and
prompts.eval.jsonl, in an order that does not depend on the module: a step's prompts are about different modules.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

_QUESTION = re.compile(r"What does the Python function `(\w+)\(.*\)` of the module `([\w.]+)` do\?", re.DOTALL)
_LONGEST = 20  # characters of a name, so that an answer of a dozen tokens has room for more than the name


def make_prompts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return {"prompt", "answer", "name"} for rows {"messages": [question, answer]} about a function."""
    prompts = {}
    for row in rows:
        question, answer = (turn["content"] for turn in row["messages"])
        if match := _QUESTION.fullmatch(question):
            name = f"{match[2]}.{match[1]}"
            turns = [("system", "You write a glossary."), ("user", f"What does `{name}` do?")]
            if len(name) <= _LONGEST:
                prompt = [{"role": role, "content": content} for role, content in turns]
                prompts[name] = {"prompt": prompt, "answer": f"`{name}`: {answer}", "name": name}
    return [prompts[name] for name in sorted(prompts, key=lambda name: hashlib.sha256(name.encode()).digest())]


def main(folder: Path) -> None:
    for part in ("train", "eval"):
        source, target = folder / f"instructions.{part}.jsonl", folder / f"prompts.{part}.jsonl"
        rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
        prompts = make_prompts(rows)
        target.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
        print(f"{len(prompts)} prompts of {len(rows)} rows: {target}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("name the folder with the rows: python examples/smollm2/make_prompts.py build/smollm2-data")
    try:
        main(Path(sys.argv[1]))
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}") from error
