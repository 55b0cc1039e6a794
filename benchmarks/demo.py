"""Copies the figures of a finished trial to benchmarks/results, with the machine, the versions and the commit.

    make demo && .venv/bin/python benchmarks/demo.py demo
    octavo compare examples/digits_everything.yaml --savings --forks 3 --jobs 2
    python benchmarks/demo.py runs/digits_everything-compare savings      # for lora, see benchmarks/lora_base.py

Writes results/NAME_cpu.json (or NAME_gpu.json), where NAME is demo, savings, lora, rl, rl_lora or dpo, and the plots
that README shows.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from octavo.bench import record

RESULTS = Path(__file__).resolve().parent / "results"
FIGURES = (
    "label",
    "recipe",
    "seed",
    "steps",
    "mean_loss",
    "last_loss",
    "gap",
    "eval",
    "tokens_per_s",
    "speed_ratio",
    "memory",
)

COMMANDS = {
    "demo": "make demo",
    "savings": "octavo compare examples/digits_everything.yaml --savings --forks 3 --jobs 2",
    "lora": "octavo compare examples/digits_lora.yaml --savings --forks 3 --jobs 2",
    "rl": "octavo compare examples/digits_rl.yaml --seeds 3 --jobs 2",
    "rl_lora": "octavo compare examples/digits_rl_lora.yaml --seeds 3 --jobs 2",
    "dpo": "octavo compare examples/digits_dpo.yaml --seeds 3",
}
# of the others: loss and health
PLOTS = {"savings": ("loss", "memory"), **dict.fromkeys(("rl", "rl_lora", "dpo"), ("learning",))}


def keep(trial: Path, name: str = "demo") -> Path:
    """Copy what README may quote out of ``trial/report``; raises FileNotFoundError where no trial has finished."""
    report = json.loads((trial / "report" / "report.json").read_text(encoding="utf-8"))
    runs = report["arms"]
    fp8 = next(run for run in runs if run["kind"] == "fp8")
    machine = record.describe_machine(fp8["environment"])
    device = "gpu" if machine.get("gpus") else "cpu"
    result = {
        "command": COMMANDS[name],
        "verdict": report["verdict"],
        "noise": report["noise"],
        "jobs": report["jobs"],
        "checks": report["checks"],
        "arms": [{key: run[key] for key in FIGURES if key in run} for run in runs],
        "proof": fp8["proof"],
        **({"savings": report["savings"]} if report.get("savings") else {}),
        "machine": machine,
    }
    path = record.save(result, RESULTS / f"{name}_{device}.json")
    for plot in PLOTS.get(name, ("loss", "health")):
        shutil.copyfile(trial / "report" / f"{plot}.png", RESULTS / f"{name}_{device}_{plot}.png")
    return path


if __name__ == "__main__":
    folder, *named = sys.argv[1:] or ["demo"]
    print(keep(Path(folder), *named))
