"""Runs the demo with several seeds, named beforehand, and writes its results: what `octavo demo --power` computes with.

    python benchmarks/demo_seeds.py 100-105 --out octavo/report/demo/seeds.json    # by which the margin was fixed
    python benchmarks/demo_seeds.py 0-9 --out benchmarks/results/demo_seeds.json   # with that margin
    python benchmarks/demo_seeds.py 100-102 --real --out octavo/report/demo/real_seeds.json  # octavo demo --real
    python benchmarks/demo_seeds.py --table benchmarks/results/demo_seeds.json     # for docs/lab/demo.md

Every seed is a whole `octavo demo` in its own folder; the same command continues an interrupted list. Each result is
written, whatever it is: a demo that ends with an error has its message as status.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from octavo.bench import record
from octavo.report.demo import demo, pretrained
from octavo.report.demo.handwriting import HANDWRITING
from octavo.report.demo.power import Measure
from octavo.report.demo.pretrained import PRETRAINED
from octavo.report.demo.task import DemoTask
from octavo.report.evidence.run_reader import ReportError
from octavo.report.evidence.trial_claims import HELD_OUT_LOSS


def train_demo(folder: Path, seed: int, task: DemoTask) -> dict[str, float | str]:
    """Train the demo of ``task`` with a seed, and return its row."""
    verdict = demo.run(folder, task.steps, seed=seed, console=Console(stderr=True), task=task)
    claim = next(check for check in verdict.claims if check.name == task.claim)
    if claim.low is None or claim.high is None:
        return {"seed": seed, "status": f"{verdict.status}: {claim.sentence}"}
    key = "loss" if task.claim == HELD_OUT_LOSS else "exact_match"
    figures = {run["kind"]: float(run["eval"][key]) for run in verdict.data["arms"]}
    row = {"fp8": figures["fp8"], "high": figures["reference"], "lower": claim.low, "upper": claim.high}
    return {"seed": seed, "status": verdict.status, **row}


def format_table(document: Mapping[str, object]) -> str:
    """Return the results in a file as a table in Markdown; a seed without figures has its message."""
    measure = task_of(document).power().measure
    lines = ["| seed | verdict | FP8 | high precision | difference, 95 % interval |", "|---|---|---|---|---|"]
    rows = document["rows"]
    assert isinstance(rows, list)
    for row in rows:
        if "fp8" not in row:
            lines.append(f"| {row['seed']} | {row['status']} | | | |")
            continue
        lines.append(f"| {row['seed']} | {row['status']} | {_format_figures(row, measure)} |")
    return "\n".join(lines)


def _format_figures(row: Mapping[str, float], measure: Measure) -> str:
    figures = [f"{row[side]:.4f}" if measure.relative else f"{100 * row[side]:.2f} %" for side in ("fp8", "high")]
    ends = " to ".join(f"{100 * row[end]:+.2f}" for end in ("lower", "upper"))
    difference = 100 * measure.difference(row["fp8"], row["high"])
    return f"{figures[0]} | {figures[1]} | {difference:+.2f} ({ends}) {measure.unit}"


def task_of(document: Mapping[str, object]) -> DemoTask:
    """Return the task of a file of results; only `--real` has inputs that depend on the machine."""
    return PRETRAINED if "inputs" in document else HANDWRITING


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="?", help="FIRST-LAST")
    parser.add_argument("--real", action="store_true", help="octavo demo --real")
    parser.add_argument("--out", type=Path, help="the file of results")
    parser.add_argument("--dir", type=Path, help="where the demos are (default: build/demo_seeds, build/real_seeds)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the table of a file of results")
    args = parser.parse_args()
    if args.table is not None:
        print(format_table(json.loads(args.table.read_text(encoding="utf-8"))))
        return
    if args.seeds is None or args.out is None:
        parser.error("name the seeds and --out, or a file with --table")
    task = PRETRAINED if args.real else HANDWRITING
    directory = args.dir or Path("build/real_seeds" if args.real else "build/demo_seeds")
    first, _, last = args.seeds.partition("-")
    head = {
        "command": f"python benchmarks/demo_seeds.py {args.seeds}{' --real' if args.real else ''}",
        "machine": record.describe_machine(),
        **({"inputs": pretrained.identify_inputs()} if args.real else {}),
    }
    # The file is written after each seed, so that an interrupted list leaves its results.
    rows = []
    for seed in range(int(first), int(last or first) + 1):
        try:
            rows.append(train_demo(directory / str(seed), seed, task))
        except ReportError as error:
            rows.append({"seed": seed, "status": str(error)})
        print(json.dumps(rows[-1]), flush=True)
        args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
