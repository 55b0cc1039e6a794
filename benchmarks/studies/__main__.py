"""Runs studies of questions that a single trial cannot decide; the power of the design is printed first.

    python -m benchmarks.studies pretraining [--jobs 2] [--hours 6] [--dir build/studies]
    python -m benchmarks.studies pretraining --power     print the power of the design without training
    python -m benchmarks.studies tables                  write the tables of docs/studies.md from the result files

The same command continues an interrupted study; finished units can be judged at any time. Writes
results/study_NAME.json and a plot, which docs/studies.md quotes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # as its files find each other, here and in the processes of the pool
NAMES = ("pretraining", "tower", "everything", "moe", "long_tail", "mpt", "smollm2", "wgrad", "lora", "rl")


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.studies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=(*NAMES, "tables"))
    parser.add_argument("--jobs", type=int, default=2, help="units that train at a time, a thread each (default 2)")
    parser.add_argument("--hours", type=float, default=6.0, help="processor hours after which no unit begins")
    parser.add_argument("--dir", type=Path, default=Path("build/studies"), help="where units lie")
    parser.add_argument("--power", action="store_true", help="tell what the design can decide, and train nothing")
    args = parser.parse_args()
    if args.jobs < 1 or not args.hours > 0:
        parser.error(f"--jobs {args.jobs} --hours {args.hours:g}: both are more than 0")
    if args.study == "tables":
        importlib.import_module("tables").main()
        return 0
    study = importlib.import_module(args.study).STUDY
    print(study.question, flush=True)
    estimates = [design.estimate() for design in study.designs]
    for one in estimates:
        print(told(one), flush=True)
    if args.power:
        return 0
    home = (args.dir / (study.home or args.study)).resolve()
    import units

    with units.alone(home):
        planned = study.units(home)
        done = sum(units.read(home, unit, study.archive) is not None for unit in planned)
        written = _written(home / f"power_{args.study}.json", _read_power(args.study), estimates, done)
        print(f"{len(planned)} units in {home}", flush=True)
        log = functools.partial(print, flush=True)
        outcomes = units.train_all(home, planned, args.jobs, args.hours, log, study.archive)
    _save(args.study, study, home, planned, outcomes, written)
    return 0


def told(estimate: dict[str, Any]) -> str:
    """One line of a power estimate."""
    needed = estimate["units_for_80"]
    passes = "is inside +-" if estimate.get("both_sides") else "passes below "
    return (
        f"  {estimate['design']}: {estimate['units']} units that scatter by {100 * estimate['spread']:.3g} % "
        f"({estimate['source']}) give +-{100 * estimate['half_width']:.3g} %; with no true gap it {passes}"
        f"{100 * estimate['margin']:.3g} % with a chance of {100 * estimate['chance']:.0f} %"
        + ("" if estimate["chance"] >= 0.8 or needed is None else f" ({needed} units: 80 %)")
    )


def _read_power(name: str) -> list[dict[str, Any]]:
    """The estimates in the study's result file, which a machine without its folder continues."""
    results = HERE.parent / "results" / f"study_{name}.json"
    return json.loads(results.read_text(encoding="utf-8"))["power"] if results.exists() else []


def _written(
    file: Path, saved: list[dict[str, Any]], estimates: list[dict[str, Any]], trained: int
) -> list[dict[str, Any]]:
    """The estimates as they were written, each with how many units were trained by then: the first before any was. A
    design that was changed later has another one, and the page can tell. A new folder begins with the saved ones."""
    from octavo.base import atomic_write

    entries = json.loads(file.read_text(encoding="utf-8")) if file.exists() else list(saved)
    if not entries or entries[-1]["designs"] != estimates:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        entries.append({"written": now, "trained": trained, "designs": estimates})
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write.write_text(file, json.dumps(entries, indent=1) + "\n")
    return entries


def _save(name: str, study: Any, home: Path, planned: list[Any], outcomes: dict[str, Any], written: Any) -> None:
    from octavo.base import environment
    from octavo.bench import record

    results = HERE.parent / "results"
    hours = sum(one.cpu_seconds for one in outcomes.values()) / 3600
    judged = study.judge(home, outcomes)
    whole = {
        "command": f"python -m benchmarks.studies {name}", "question": study.question, "power": written,
        "units": len(planned), "trained": len(outcomes), "cpu_hours": round(hours, 2),
        "failed": {one.name: one.failure for one in outcomes.values() if one.failure},
        **judged, "machine": record.describe_machine(environment.describe()),
    }  # fmt: skip
    record.save(whole, results / f"study_{name}.json")
    if study.draw is not None:
        study.draw(whole, results / f"study_{name}.png")
    print(f"{len(outcomes)} of {len(planned)} units, {hours:.2f} CPU hours: {results / f'study_{name}.json'}")


if __name__ == "__main__":
    raise SystemExit(main())
