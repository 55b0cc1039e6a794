"""Measures the difference of log-probabilities between rollout and trainer, |d log p| in nats, by recipe and cache.

    octavo train examples/digits_rl_base.yaml
    python benchmarks/rollout_gap.py --json benchmarks/results/rollout_gap.json

Each case trains a few steps of examples/digits_rl.yaml from the same model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from octavo import rl
from octavo.base.recipe_specs import RANKED
from octavo.config import load_config
from octavo.train.run_dir.run_dir import read_rows

LORA = ("lora={rank: 16}", "model.load_in_fp8=blockwise")
CASES: dict[str, tuple[str, ...]] = {
    "high precision": ("fp8.recipe=off",),
    **{name: (f"fp8.recipe={name}",) for name in RANKED},
    "blockwise, kv in FP8": ("rl.kv=fp8",),
    "LoRA on FP8, BF16 elsewhere": LORA,
    "blockwise, invariant": ("rl.invariant=true",),
    "LoRA on FP8, BF16 elsewhere, invariant": (*LORA, "rl.invariant=true"),
}
FIGURES = ("logp_gap_mean", "logp_gap_max", "logp_gap_k3", "sampling/importance_sampling_ratio/max")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/digits_rl.yaml")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = Table("", *FIGURES)
    cases = {}
    for name, over in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            short = (f"train.steps={args.steps}", "train.warmup=1", "data.eval=[]", "run.eval_every=0", "run.hf=false")
            rl.run(load_config(args.config, [*short, *over, f"run.dir={folder}/run", "run.tensorboard=false"]))
            rows = read_rows(Path(folder) / "run" / "metrics.jsonl")
        worst = {key: max(row[key] for row in rows) for key in FIGURES}
        cases[name] = {**worst, "logp_gap_mean": sum(row["logp_gap_mean"] for row in rows) / len(rows)}
        table.add_row(name, *(f"{cases[name][key]:.3g}" for key in FIGURES))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"steps": args.steps, "cases": cases}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
