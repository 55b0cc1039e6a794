"""Runs suites, writes their results, and compares results with the goals.

The suites are the files ``suite_*.py`` of this folder; each is imported when it is run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from octavo.base.wording import did_you_mean
from octavo.bench.bench import Bench, BenchError
from octavo.bench.record import Result, select_suite, suite_names, write

#: suite -> what it measures
SUITES: Mapping[str, str] = {
    "cast": "casts and fused layers, as bandwidth against a copy",
    "gemm": "only the three GEMMs, on operands that are already FP8, and forwards of few rows as in decoding",
    "linear": "a linear layer with quantization: fwd, dgrad, wgrad, sum; compared with torchao and TransformerEngine",
    "moe": "a layer of experts, forward and backward",
    "optimizer": "a step of AdamW for every format of states and master, as bandwidth against torch's fused AdamW",
    "layer": "a decoder block, a block of the vision tower, attention by kernel, and the head with its loss",
    "step": "whole training steps of a published size, and one of each by kernel",
    "decode": "a step of decoding with 64 sequences, weights and cache in BF16 and FP8, against the bandwidth",
    "memory": "bytes by kind of four decoder blocks in training, with and without each saving",
}


def run(names: list[str], bench: Bench) -> Result:
    """Run suites one after the other into ``bench.result``. Raises BenchError for an unknown name."""
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        near = did_you_mean(unknown[0], SUITES)
        raise BenchError(f"there is no suite {unknown[0]!r}; choose from all, {', '.join(SUITES)}.{near}")
    for name in names:
        suite: Callable[[Bench], None] = import_module(f"{__package__}.suite_{name}").run
        bench.start_budget()
        suite(bench)
    bench.report_unknown()
    return bench.result


def report(words: list[str]) -> int:
    """Print a comparison of the figures in folders with the goals; returns the exit code. The goals are in
    ``benchmarks/gpu`` of a checkout; raises BenchError outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "gpu" / "report.py").is_file():
        raise BenchError("the report needs a checkout of Octavo, whose benchmarks/gpu contains the goals.")
    sys.path.insert(0, str(root))
    code: int = import_module("benchmarks.gpu.report").main(words)
    return code


def check_folder(path: Path) -> Path:
    """Return ``path`` as a writable folder, created if necessary. Raises BenchError before anything is timed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".octavo-bench"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BenchError(
            f"results cannot be written to {path}: {error.strerror}. Name a folder that you have access to."
        ) from error
    return path


def write_suites(result: Result, into: Path) -> list[Path]:
    """Write the results of each suite to ``bench_<device>_<suite>.json``; files of other suites stay."""
    stem = f"bench_{'_'.join(result.device.lower().split())}"
    return [write(select_suite(result, suite), into / f"{stem}_{suite}.json") for suite in suite_names(result.rows)]
