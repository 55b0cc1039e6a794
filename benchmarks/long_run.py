"""Runs a longer trial: text and images, several seeds, high precision compared with FP8 with every memory saving.

    python benchmarks/long_run.py [--steps 3000] [--seeds 3] [--jobs 2] [--dir build/long]

Trains a tiny Qwen3-VL on pictures of handwritten digits and on digits drawn in characters, each seed once in high
precision and once with FP8 activations, FP8 weights, FP8 optimizer states and stochastically rounded BF16 weights.
Finished runs are read and stopped runs are resumed. Writes results/long_run_cpu.json (or _gpu) and a plot, which
docs/lab/studies.md quotes. Weights are updated after the backward: updating during the backward gives the same bits and
takes a second pass.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib
import numpy as np
from rich.console import Console

from octavo.bench import record
from octavo.config import Config, load_config_text
from octavo.data.builtin import digits
from octavo.models.tiny import tiny
from octavo.report.evidence.run_reader import RunRecord, read
from octavo.report.run import plots
from octavo.report.trial.judge import Run
from octavo.report.trial.parallel_runs import train_together
from octavo.report.trial.reuse import read_finished
from octavo.report.trial.runs import high_precision_config

RESULTS = Path(__file__).resolve().parent / "results"
GREYS = ("base", "noise", "kind-5")
CONFIG = """
model: {{path: {here}/model}}
fp8: {{recipe: blockwise, activations: fp8, param: true}}
data:
  train: [{{path: {here}/digits/train.json, images: {here}/digits}}, {{path: {here}/digits/train_text.json}}]
  eval:
    - {{path: {here}/digits/test.json, images: {here}/digits, max_samples: 250}}
    - {{path: {here}/digits/test_text.json, max_samples: 250}}
train: {{steps: {steps}, seq_length: 256, micro_batch: 4, global_batch: 4, lr: 1e-3, schedule: onecycle}}
optimizer: {{states: fp8, master: bf16+sr, betas: [0.9, 0.98], weight_decay: 0.5}}
run: {{health_every: 500, save_every: 500, threads: 1, tensorboard: false, hf: false}}
"""


def runs_of(cfg: Config, seeds: int, directory: Path) -> list[Run]:
    """Each seed in high precision and in FP8, with the same data in the same order."""
    runs = []
    for seed in range(seeds):
        for kind, label, chosen in (("reference", "high precision", high_precision_config(cfg)), ("fp8", "FP8", cfg)):
            name = f"{label.replace(' ', '-').lower()}-{seed}"
            folder = str(directory / "arms" / name)
            run_settings = chosen.run.model_copy(update={"dir": folder, "resume": "auto", "seed": seed})
            runs.append(Run(name, f"{label}, seed {seed}", kind, chosen.model_copy(update={"run": run_settings})))
    return runs


def figures_of(runs: list[Run], records: list[RunRecord]) -> dict:
    """Each run's figures; the gap of each seed's pair, and how far apart two seeds of one arm are."""
    rows = [
        {
            "arm": run.label,
            "kind": run.kind,
            "seed": run.cfg.run.seed,
            "mean_loss": run_record.mean_loss,
            "last_tenth": float(np.nanmean(run_record.losses[-max(1, len(run_record.losses) // 10) :])),
            "right": (run_record.eval or {}).get("exact_match"),
            "held_out_loss": (run_record.eval or {}).get("loss"),
            "skipped": len(run_record.skipped),
            "zeroed_v": run_record.zeroed,
            "bytes": {kind: size for kind, size in run_record.memory.items() if not kind.startswith("peak")},
        }
        for run, run_record in zip(runs, records, strict=True)
    ]
    plain = {row["seed"]: row for row in rows if row["kind"] == "reference"}
    gaps = [row["mean_loss"] / plain[row["seed"]]["mean_loss"] - 1 for row in rows if row["kind"] == "fp8"]
    means = [row["mean_loss"] for row in plain.values()]
    return {
        "arms": rows,
        "gap_by_seed": gaps,
        "gap": statistics.fmean(gaps),
        "seeds_apart": (max(means) - min(means)) / statistics.fmean(means) if len(means) > 1 else None,
    }


def draw(runs: list[Run], records: list[RunRecord], path: Path) -> None:
    """The loss curves of all runs: high precision in greys, FP8 in colours."""
    curves = [
        plots.Curve(
            run.label,
            "noise" if run.kind == "reference" else "fp8",
            GREYS[run.cfg.run.seed % 3] if run.kind == "reference" else f"fp8-{run.cfg.run.seed % 5}",
            run_record.steps,
            run_record.losses,
        )
        for run, run_record in zip(runs, records, strict=True)
    ]  # fmt: skip
    with matplotlib.rc_context(plots.STYLE):
        plots.save(plots.loss_figure(curves), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs that train at a time, one thread each")
    parser.add_argument("--dir", type=Path, default=Path("build/long"))
    args = parser.parse_args()
    here = args.dir.resolve()
    if not (here / "digits").exists():
        digits.write(here / "digits")
    if not (here / "model").exists():
        tiny.write("qwen3_vl", here / "model")
    cfg = load_config_text(CONFIG.format(here=here, steps=args.steps), ())
    runs = runs_of(cfg, args.seeds, here)
    unfinished = [run for run in runs if read_finished(run) is None]
    failures = train_together(unfinished, args.jobs, Console()) if unfinished else {}
    if failures:
        raise SystemExit("\n".join(f"{name}: {why}" for name, why in failures.items()))
    records = [read(run.cfg.run.dir) for run in runs]
    machine = record.describe_machine(records[0].environment)
    result = {
        "command": f"python benchmarks/long_run.py --steps {args.steps} --seeds {args.seeds}",
        "steps": args.steps,
    }
    result |= {**figures_of(runs, records), "machine": machine}
    name = f"long_run_{'gpu' if machine.get('gpus') else 'cpu'}"
    record.save(result, RESULTS / f"{name}.json")
    draw(runs, records, RESULTS / f"{name}.png")
    for row in result["arms"]:
        right = "" if row["right"] is None else f", {100 * row['right']:.1f} % right"
        print(f"{row['arm']:28} mean loss {row['mean_loss']:.4f}, last tenth {row['last_tenth']:.4f}{right}")
    apart = result["seeds_apart"]
    print(f"gap {100 * result['gap']:+.2f} %" + ("" if apart is None else f"; two seeds {100 * apart:.2f} % apart"))


if __name__ == "__main__":
    main()
