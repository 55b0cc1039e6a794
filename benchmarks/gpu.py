"""Everything that wants a GPU, in one command with a budget of nine minutes: the GPU tests, then all benchmark suites.

    make gpu                    results under benchmarks/results
    make gpu GPU_PYTHON=python  with another Python: torch, triton, transformers, pytest, hypothesis, matplotlib

Writes results/bench_<device>_<suite>.json and .png for cast, gemm, linear, moe, optimizer, layer, step and memory (that
one: bytes by kind, in the JSON and in the table), and results/gpu_tests_<device>.txt. Exit code 1 where a test failed;
the benchmarks run all the same, since what they show may tell why.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

NEEDED = ("torch", "transformers", "pytest", "hypothesis", "matplotlib")  # triton comes with CUDA builds of torch
#: seconds after which the tests are stopped, and after which a suite begins no new case: a budget of under nine minutes
TESTS = 185
SUITES = {"cast": 20, "gemm": 40, "linear": 45, "moe": 20, "optimizer": 20, "layer": 50, "step": 55, "memory": 55}


def main() -> int:
    sys.path.insert(0, str(ROOT))
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"make gpu: {sys.executable} lacks {', '.join(missing)}; name another Python: make gpu GPU_PYTHON=...")
        return 2
    import torch

    if not torch.cuda.is_available():
        print("make gpu needs an NVIDIA GPU; on this machine `make test` and `octavo bench all` run what can be run.")
        return 2
    from octavo import bench

    device = torch.device("cuda", torch.cuda.current_device())
    stem = "_".join(torch.cuda.get_device_name(device).lower().split())
    RESULTS.mkdir(exist_ok=True)
    failed = _tests(RESULTS / f"gpu_tests_{stem}.txt")
    session = bench.Bench(device, say=lambda text: print(f"{time.strftime('%X')} {text}", flush=True))
    for suite, seconds in SUITES.items():
        session.budget = seconds
        try:
            bench.run([suite], session)
        except Exception as error:  # one broken suite must not cost the others their figures; it fails the command
            print(f"{suite} FAILED: {type(error).__name__}: {error}", flush=True)
            session.result.cut.append(f"{suite} failed: {type(error).__name__}: {error}")
            failed = True
        bench.keep(session.result, RESULTS)  # after each: a machine that is taken away leaves what was measured
    for line in bench.table(session.result):
        print("  ".join(line))
    for absent in session.result.absent:
        print(f"absent: {absent.suite} {absent.case} {absent.candidate}: {absent.why}")
    return int(failed)


def _tests(report: Path) -> bool:
    """Run tests/gpu, keep what pytest prints; whether anything failed or did not finish."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    began = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS)
        text, failed = done.stdout + done.stderr, done.returncode != 0
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
        text = (out if isinstance(out, str) else out.decode(errors="replace")) + f"\nstopped after {TESTS} s"
        failed = True
    report.write_text(text, encoding="utf-8")
    print(text[-6000:])
    print(f"GPU tests: {'FAILED' if failed else 'passed'} in {time.perf_counter() - began:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
