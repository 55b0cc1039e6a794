"""Trains a tiny Qwen3-VL on videos of real handwriting, in FP8 and in high precision, to name the digits of a clip.

    python benchmarks/video.py [--jobs 2] [--dir build/video]

Trains examples/digits_video.yaml twice with the same data in the same order, and evaluates both on clips of held-out
handwriting. Finished runs are read and stopped runs are resumed. Writes results/video_cpu.json (or _gpu), which
docs/data.md quotes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from octavo.bench import record
from octavo.config import load_config
from octavo.data.builtin import digit_clips
from octavo.models.tiny import tiny
from octavo.report.evidence.run_reader import read
from octavo.report.trial.judge import Run
from octavo.report.trial.parallel_runs import train_together
from octavo.report.trial.reuse import read_finished
from octavo.report.trial.runs import high_precision_config

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="runs that train at a time, one thread each")
    parser.add_argument("--dir", type=Path, default=ROOT / "build" / "video")
    args = parser.parse_args()
    here = args.dir.resolve()
    digit_clips.write(here / "clips")
    tiny.write("qwen3_vl", here / "model")
    where = [f"model.path={here}/model", f"data.train=[{{path: {here}/clips/train.json}}]"]
    where += [f"data.eval=[{{path: {here}/clips/test.json}}]", "run.resume=auto", "run.hf=false"]
    runs = []
    for name, kind in (("high precision", "reference"), ("FP8", "fp8")):
        folder = here / name.replace(" ", "-").lower()
        cfg = load_config(ROOT / "examples" / "digits_video.yaml", [*where, f"run.dir={folder}"])
        runs.append(Run(folder.name, name, kind, high_precision_config(cfg) if kind == "reference" else cfg))
    unfinished = [run for run in runs if read_finished(run) is None]
    failures = train_together(unfinished, args.jobs, Console()) if unfinished else {}
    if failures:
        raise SystemExit("\n".join(f"{name}: {why}" for name, why in failures.items()))
    records = [read(run.cfg.run.dir) for run in runs]
    machine = record.describe_machine(records[0].environment)
    rows = [
        {"run": run.label, "recipe": run.cfg.fp8.recipe, "steps": run.cfg.train.steps, "seed": run.cfg.run.seed,
         "mean_loss": run_record.mean_loss, "eval": run_record.eval}
        for run, run_record in zip(runs, records, strict=True)
    ]  # fmt: skip
    result = {"command": "python benchmarks/video.py", "example": "examples/digits_video.yaml", "runs": rows}
    record.save({**result, "machine": machine}, RESULTS / f"video_{'gpu' if machine.get('gpus') else 'cpu'}.json")
    for row in rows:
        right, questions = row["eval"]["exact_match"], row["eval"]["questions"]
        print(f"{row['run']:15} {100 * right:.1f} % of {questions} clips right, mean loss {row['mean_loss']:.4f}")


if __name__ == "__main__":
    main()
