"""Runs everything that needs a GPU: the tests of tests/gpu and all suites of `octavo bench`, each in its own process.

    make gpu PART=1         the most informative third, in 8 minutes: cuBLAS, casts, GEMMs, linear layers
    make gpu PART=2         the other tests, experts, the optimizer
    make gpu PART=3         blocks, steps, memory
    make gpu PART=speed     where the time of a step goes and what FP8 gains, in 7 minutes; see benchmarks/gpu/jobs.py
    make gpu                parts 1 to 3 in 8 minutes, each cut short
    make gpu ONLY=cast,test_gemms BUDGET=120 OUT=DIR GPU_PYTHON=python SMALL=1

Only needs torch, triton, transformers, pytest, hypothesis and numpy. Writes tests.json and suites.json into DIR after
each case, with the results of all parts; `python -m octavo.bench report DIR` reads them. If a case crashes or hangs,
only that case is lost, and the summary lists it with its last output. If the device is lost, the call ends with what it
has. Exit code 0: nothing was lost, and no test failed. The last line says what is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import PARTS, ROOT, SPEED_BUDGET, Job, chosen
from benchmarks.gpu.process import Process
from benchmarks.gpu.runner import WORKER, Runner
from benchmarks.gpu.store import FILES, Store, collect

NEEDED = ("torch", "transformers", "pytest", "hypothesis", "numpy")  # triton comes with CUDA builds of torch
END = 15.0  # seconds kept for the report
LANES = 16  # test files at a time, a core each: what they do most is to compile


def main(argv: Sequence[str] | None = None) -> int:
    until = time.monotonic()
    args = _arguments(argv)
    until += args.budget
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        log(f"make gpu: {sys.executable} lacks {', '.join(missing)}; name another Python: make gpu GPU_PYTHON=...")
        return 2
    try:
        jobs = chosen(args.part, [name for word in args.only for name in word.split(",") if name])
        if args.collect:
            return _collect(args)
        where = _where()
        cuda = where["device"] != "cpu"
        if not cuda and not args.small:
            log("make gpu needs an NVIDIA GPU; on this machine `make gpu SMALL=1` shows that its suites run, and times")
            log("nothing that counts; `make test` runs what can be tested.")
            return 2
        stem = "_".join(where["device"].lower().split())
        folder = args.out or ROOT / ("benchmarks/results" if cuda and not args.small else "build") / f"gpu_{stem}"
        store = Store(folder, log)
    except (ValueError, RuntimeError, OSError) as error:
        log(f"make gpu: {error}")
        return 2
    call = datetime.now(UTC).isoformat(timespec="milliseconds")
    what = {"part": args.part, "only": args.only, "budget": args.budget, "small": args.small, **where}
    for kind in {job.kind for job in jobs}:
        store.apply(kind, "", {"call": call, "what": what})
    device = "cuda" if cuda else "cpu"
    lanes = min(LANES, os.cpu_count() or 1)
    runner = Runner(store, log, call, device, args.small, lanes)
    log(f"{len(jobs)} jobs on {where['device']}, {args.budget:.0f} s, into {folder}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, runner.stop)
    runner.run(jobs, until - END)
    code = summary(jobs, store, call, runner.stopped, runner.gone)
    lines = list_missing(jobs, store, call)
    store.close()
    if not runner.stopped:
        _report(folder, until)
    if lines:
        log(f"MISSING: {'; '.join(lines)}")
    elif not code:
        log("nothing is missing")
    # A CPU has no graphs, and some attention kernels do not run on it: named, but no fault of a small run.
    faults = lines if cuda else list_missing(jobs, store, call, absent=False)
    return int(bool(code or any(job.part == "speed" for job in jobs) and faults))


def list_missing(jobs: Sequence[Job], store: Store, call: str, absent: bool = True) -> list[str]:
    """What a call should have measured and has not, job by job; ``absent``: with candidates that could not run."""
    lines = []
    for job in jobs:
        entry = store.files[job.kind]["jobs"].get(job.name, {})
        if entry.get("call") != call or entry["state"] == "not begun":
            lines.append(f"{job.name} (not begun)")
            continue
        whats = [
            f"{', '.join(lost['candidates']) or lost['case'] or 'a part'} ({lost['why']})" for lost in entry["lost"]
        ]
        if job.has_names and absent:
            whats += [f"{line['candidate']} ({line['why']})" for line in entry.get("absent", ())]
        whats += entry["cut"] if job.part == "speed" else ()
        if entry["state"] == "cut off" and not whats:
            whats.append("cut off")
        if whats:
            lines.append(f"{job.name}: {', '.join(whats)}")
    return lines


def summary(jobs: Sequence[Job], store: Store, call: str, stopped: str = "", gone: str = "") -> int:
    """Say what was lost, what failed and what was left out; the exit code."""
    entries = {job: store.files[job.kind]["jobs"].get(job.name, {}) for job in jobs}
    ran = {job: e for job, e in entries.items() if e.get("call") == call and e["state"] != "not begun"}
    lost = [(job, what) for job, entry in ran.items() for what in entry["lost"]]
    tests = [(node, t) for entry in ran.values() for node, t in entry.get("tests", {}).items()]
    failed = [(node, t) for node, t in tests if t["outcome"] == "failed"]
    log("")
    if tests:
        outcomes = Counter(t["outcome"] for _, t in tests)
        log(f"tests: {', '.join(f'{count} {name}' for name, count in sorted(outcomes.items()))}")
        reasons = Counter(t["why"] for _, t in tests if t["outcome"] == "skipped")
        for why, count in reasons.most_common():
            log(f"  skipped {count}: {why}")
    for node, test in failed:
        log(f"FAILED {node}\n{_indented(test.get('why', '').splitlines()[-6:])}")
    for job, what in lost:
        case = f" in {what['case']}" if what["case"] else ""
        with_whom = f" with {', '.join(what['candidates'])}" if what["candidates"] else ""
        log(f"LOST {job.name}{case}{with_whom}: {what['why']}\n{_indented(what['last lines'])}")
    for job, entry in ran.items():
        missing = entry.get("collected", 0) - len(entry.get("tests", {})) - len(entry["lost"])
        if missing > 0:
            log(f"LEFT OUT {job.name}: {missing} of {entry['collected']} tests")
        for line in entry.get("cut", ()):
            log(f"left out: {line}")
    absent = Counter((a["candidate"], a["why"]) for entry in ran.values() for a in entry.get("absent", ()))
    for (candidate, why), count in absent.items():
        log(f"absent: {candidate} ({count} case{'s' * (count > 1)}): {why}")
    if idle := [job.name for job in jobs if job not in ran]:
        log(f"NOT BEGUN: {', '.join(idle)}")
    if stopped:
        log(f"STOPPED by {stopped}")
    if gone:
        log(f"LOST THE DEVICE: {gone}")
    if store.trouble:
        log(f"NOT SAVED: {store.trouble}")
    unfinished = [job.name for job, entry in ran.items() if entry["state"] == "cut off"]
    bad = bool(failed or lost or idle or stopped or gone or store.trouble or unfinished)
    log(f"{len(ran)} of {len(jobs)} jobs ran, {len(lost)} cases lost, {len(failed)} tests failed; in {store.folder}")
    return int(bad)


def log(text: str) -> None:
    """Print a line with the time of day; the work continues if nothing reads it."""
    with suppress(OSError, ValueError):
        print(text if text.startswith("{") or not text else f"{time.strftime('%X')} {text}", flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "make gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", type=_part, choices=(*PARTS, "speed"), help="a third of it, or speed; default: 1 to 3"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAMES", help="jobs by name, with commas")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: benchmarks/results/gpu_<device>")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help=f"of the whole call (480; speed: {SPEED_BUDGET:g})"
    )
    parser.add_argument("--small", action="store_true", help="small sizes, also on a CPU: shows that all runs")
    parser.add_argument("--collect", type=Path, metavar="LOG", help="write the results that a call printed into --out")
    args = parser.parse_args(argv)
    args.budget = args.budget or (SPEED_BUDGET if args.part == "speed" else 480.0)
    if args.budget <= END:
        parser.error(f"--budget {args.budget:g}: the end of a call takes {END:g} s; give more")
    if args.collect and not args.out:
        parser.error("--collect needs --out, a folder to write to")
    return args


def _part(word: str) -> int | str:
    return int(word) if word.isdigit() else word


def _where() -> dict[str, Any]:
    """Device, machine and versions, asked by a process of its own: this one needs no torch, and no GPU's memory."""
    process, until, reported = Process(WORKER, {"kind": "where"}, ROOT), time.monotonic() + 90, dict[str, Any]()
    while not process.ended:
        if time.monotonic() > until:
            process.force("no answer within 90 s")
        for event in process.events():
            reported |= event
        time.sleep(0.05)
    for event in process.close():
        reported |= event
    if "device" not in reported:
        raise RuntimeError("\n".join([f"torch cannot be asked for a GPU: {process.how}", *process.tail()]))
    return {"device": reported["device"], "machine": reported["machine"]}


def _collect(args: argparse.Namespace) -> int:
    store = Store(args.out, log)
    with args.collect.open(encoding="utf-8", errors="replace") as lines:
        count = collect(lines, store)
    store.close()
    log(f"{count} lines of {args.collect} are in {', '.join(FILES.values())} of {args.out}")
    return int(not count or bool(store.trouble))


def _report(folder: Path, until: float) -> None:
    command = [sys.executable, "-m", "octavo.bench", "report", str(folder)]
    try:
        subprocess.run(command, cwd=ROOT, timeout=max(END, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        log(f"the report took too long; {' '.join(command[1:])}")


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
