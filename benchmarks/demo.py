"""Keeps the figures of a finished demo under benchmarks/results, with the machine, the versions and the commit.

    make demo && .venv/bin/python benchmarks/demo.py demo

Writes results/demo_cpu.json (or demo_gpu.json) and the plots beside it; README quotes those.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
ARM = (
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
MACHINE = ("octavo", "python", "os", "cpu", "torch", "gpus", "driver", "packages")


def keep(demo: Path) -> Path:
    """Copy what README may quote out of ``demo/report``; raises FileNotFoundError where no demo has finished."""
    report = json.loads((demo / "report" / "report.json").read_text(encoding="utf-8"))
    arms = report["arms"]
    fp8 = next(arm for arm in arms if arm["kind"] == "fp8")
    machine = {key: fp8["environment"][key] for key in MACHINE if key in fp8["environment"]}
    device = "gpu" if machine.get("gpus") else "cpu"
    found = {
        "command": "make demo",
        "verdict": report["verdict"],
        "noise": report["noise"],
        "jobs": report["jobs"],
        "checks": report["checks"],
        "arms": [{key: arm[key] for key in ARM if key in arm} for arm in arms],
        "proof": fp8["proof"],
        "machine": machine,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"demo_{device}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for plot in ("loss", "health"):
        shutil.copyfile(demo / "report" / f"{plot}.png", RESULTS / f"demo_{device}_{plot}.png")
    return path


if __name__ == "__main__":
    print(keep(Path(sys.argv[1] if len(sys.argv) > 1 else "demo")))
