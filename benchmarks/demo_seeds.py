"""Runs the demo with several seeds, named beforehand, and writes its results: what `octavo demo --power` computes with.

    python benchmarks/demo_seeds.py 100-105 --out octavo/report/demo/seeds.json    # by which the margin was fixed
    python benchmarks/demo_seeds.py 0-9 --out FILE                                       # with that margin

Every seed is a whole `octavo demo` in its own folder; the same command continues an interrupted list. Each result is
written, whatever it is: a demo that ends with an error has its message as status.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from octavo.bench import record
from octavo.report.demo import demo
from octavo.report.evidence.run_reader import ReportError
from octavo.report.evidence.trial_claims import ACCURACY


def train_demo(folder: Path, seed: int) -> dict[str, float | str]:
    """Train the demo with a seed, and return its row."""
    verdict = demo.run(folder, seed=seed, console=Console(stderr=True))
    claim = next(check for check in verdict.claims if check.name == ACCURACY)
    shares = {run["kind"]: float(run["eval"]["exact_match"]) for run in verdict.data["arms"]}
    if claim.low is None or claim.high is None:
        return {"seed": seed, "status": f"{verdict.status}: {claim.sentence}"}
    row = {"fp8": shares["fp8"], "high": shares["reference"], "lower": claim.low, "upper": claim.high}
    return {"seed": seed, "status": verdict.status, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", help="FIRST-LAST")
    parser.add_argument("--out", type=Path, required=True, help="the file of results")
    parser.add_argument("--dir", type=Path, default=Path("build/demo_seeds"), help="where the demos are")
    args = parser.parse_args()
    first, _, last = args.seeds.partition("-")
    machine, rows = record.describe_machine(), []
    for seed in range(int(first), int(last or first) + 1):
        try:
            rows.append(train_demo(args.dir / str(seed), seed))
        except ReportError as error:
            rows.append({"seed": seed, "status": str(error)})
        print(json.dumps(rows[-1]), flush=True)
        head = {"command": f"python benchmarks/demo_seeds.py {args.seeds}", "machine": machine}
        args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
