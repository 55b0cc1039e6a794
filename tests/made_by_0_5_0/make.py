"""Makes the files of this folder, in a copy of it: `python make.py`, with Octavo 0.5.0 and its repository importable.

Not run by tests, and not again: the files stay as the release wrote them. Set OMP_NUM_THREADS=1; no GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from benchmarks.losses import platform
from octavo import train
from octavo.cli.main import main
from octavo.config import Config, load_config

HERE = "/proc/self/cwd"  # the working folder of any process: the runs resume in any copy of their folder (on Linux)
DELAYED = 'fp8.rules=[{match: "**.q_proj", recipe: delayed}]'
LORA = 'lora={rank: 2, targets: ["**.up_proj"]}'


class Stop(train.Callback):
    """Stops the run as a cluster does, by SIGTERM in the fourth step, which is saved."""

    def after_step(self, run: train.Run, step: train.Step) -> None:
        if step.number == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def configured(name: str, *words: str) -> Config:
    paths = [f"model.path={HERE}/model", f"data.train.0.path={HERE}/sums.json", f"data.eval.0.path={HERE}/sums.json"]
    return load_config("run.yaml", [*paths, f"run.dir=runs/{name}", *words])


def hexadecimal(losses: dict[int, float]) -> dict[str, str]:
    return {str(step): loss.hex() for step, loss in losses.items()}


def make() -> None:
    results: dict[str, object] = {"platform": platform()}
    words = [DELAYED, "optimizer.states=fp8", "data.packing=true", "train.micro_batch=1", "train.global_batch=2"]
    assert train.run(configured("stopped", *words), callbacks=[Stop()]).status == "stopped"
    shutil.copytree("runs/stopped", "copies/stopped")
    resumed = configured("stopped", *words, "run.dir=copies/stopped", "run.resume=auto")
    results["stopped"] = hexadecimal(train.run(resumed).losses())
    shutil.rmtree("copies")
    lora = configured("lora", "model.load_in_fp8=blockwise", LORA, "run.save_every=4", "run.hf=true")
    results["lora"] = hexadecimal(train.run(lora).losses())
    results["lora_eval"] = train.evaluate_run("runs/lora")
    assert main(["export", "runs/stopped", "export", "--format", "fp8-dynamic"]) == 0
    for leftover in [*Path("runs").rglob("environment.json"), *Path("runs").rglob("*.lock")]:
        leftover.unlink()
    Path("results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(make())
