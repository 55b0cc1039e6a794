"""Measures the cost of `fp8.batch_invariant`: a training step and a decode step with and without it, in turn.

    python benchmarks/invariant.py [--rounds 9] [--json FILE]

Small checkpoints of two families run on the CPU with one thread, in high precision and in FP8. A training step is the
forward of 8 rows of 128 tokens with their log-probabilities, and its backward; a decode step is one token for each of
16 sequences with 128 cached tokens, with the cache of transformers. The minimum over all turns counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import DynamicCache

from benchmarks.turns import take
from octavo import fp8, models
from octavo.models.tiny import tiny

FAMILIES = ("qwen3", "qwen3_moe")
RECIPES = ("off", "blockwise", "rowwise")
TRAIN, DECODE, HELD = (8, 128), 16, 128


def train_step(model: torch.nn.Module, ids: torch.Tensor) -> None:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    fp8.log_probs(logits, ids[:, 1:]).mean().backward()
    model.zero_grad()


def decode_step(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    with torch.no_grad():
        filled = model(input_ids=ids, use_cache=True).past_key_values

    @torch.no_grad()
    def step() -> None:
        logits = model(input_ids=ids[:, -1:], past_key_values=filled, use_cache=True).logits[:, -1]
        filled.crop(-1)
        fp8.log_probs(logits, logits.argmax(-1))

    assert isinstance(filled, DynamicCache)
    return step


def measure(family: str, recipe: str, folder: Path, rounds: int) -> dict[str, float | str]:
    model = models.load(tiny.write(family, folder / family))
    if recipe != "off":
        fp8.apply(model, fp8.plan(model, recipe))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 300, TRAIN, generator=generator)
    decode = decode_step(model, torch.randint(5, 300, (DECODE, HELD), generator=generator))
    row: dict[str, float | str] = {"family": family, "recipe": recipe}
    for name, work in (("train", lambda: train_step(model, ids)), ("decode", decode)):

        def inside(where: Callable, work: Callable[[], None] = work) -> Callable[[], None]:
            def run() -> None:
                with where():
                    work()

            return run

        ways = {"plain": inside(nullcontext), "invariant": inside(lambda: fp8.batch_invariant(model))}
        taken = {way: min(turns.cpu_seconds) for way, turns in take(ways, rounds, warmup=2).items()}
        row |= {f"{name}_{way}_ms": round(1e3 * seconds, 2) for way, seconds in taken.items()}
        row[f"{name}_ratio"] = round(taken["invariant"] / taken["plain"], 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        rows = [measure(f, r, Path(scratch), args.rounds) for f in FAMILIES for r in RECIPES]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if args.json is not None:
        args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
