"""Writes preference pairs from the instruction rows: the answer of a row is preferred to the answer of the next row
with the same kind of question, which is usually about another function of the same module.

    python examples/smollm2/make_pairs.py build/smollm2-data

Reads instructions.train.jsonl and instructions.eval.jsonl in that folder, writes pairs.train.jsonl and
pairs.eval.jsonl. Equal answers give no pair.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def make_pairs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return {"prompt", "chosen", "rejected"} for rows {"messages": [question, answer]}."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["messages"][0]["content"].split()[0], []).append(row)
    pairs = []
    for same in kinds.values():
        for row, other in zip(same, [*same[1:], same[0]], strict=True):
            chosen, rejected = (one["messages"][-1]["content"] for one in (row, other))
            if chosen != rejected:
                pairs.append({"prompt": row["messages"][:-1], "chosen": chosen, "rejected": rejected})
    return pairs


def main(folder: Path) -> None:
    for part in ("train", "eval"):
        source, target = folder / f"instructions.{part}.jsonl", folder / f"pairs.{part}.jsonl"
        rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
        pairs = make_pairs(rows)
        target.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
        print(f"{len(pairs)} pairs of {len(rows)} rows: {target}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("name the folder with the rows: python examples/smollm2/make_pairs.py build/smollm2-data")
    try:
        main(Path(sys.argv[1]))
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}") from error
