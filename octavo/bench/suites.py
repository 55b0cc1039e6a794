"""Suites are run one after the other, and what they measured is written or held against the figures to reach.

The suites are the files ``suite_*.py`` of this folder, each imported when it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from octavo.bench.bench import Bench
from octavo.bench.record import Result, part, suites_of, write

#: suite -> what it measures
SUITES: Mapping[str, str] = {
    "cast": "casts and fused layers, as bandwidth against a copy",
    "gemm": "the three GEMMs alone, on operands that are FP8 already, and forwards of few rows as in decoding",
    "linear": "a linear layer with quantization: fwd, dgrad, wgrad, sum; torchao and TransformerEngine beside it",
    "moe": "a layer of experts, forward and backward",
    "optimizer": "a step of AdamW for every format of states and master, as bandwidth against torch's fused AdamW",
    "layer": "a decoder block and a block of the vision tower",
    "step": "whole training steps of a published size",
    "memory": "bytes by kind of four decoder blocks in training, with and without each saving",
}


class BenchError(ValueError):
    """A suite that does not exist, or a setting that cannot be."""


def run(names: list[str], bench: Bench) -> Result:
    """Run suites one after the other into ``bench.result``. Raises BenchError for an unknown name."""
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise BenchError(f"there is no suite {unknown[0]!r}; there are: all, {', '.join(SUITES)}.")
    for name in names:
        suite: Callable[[Bench], None] = import_module(f"{__package__}.suite_{name}").run
        bench.begin()
        suite(bench)
    return bench.result


def report(words: list[str]) -> int:
    """Print what is in folders of figures against those to reach; the exit code. The figures to reach are the
    project's: they lie in ``benchmarks/gpu`` of a checkout. Raises BenchError where that is not at hand."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "gpu" / "report.py").is_file():
        raise BenchError("the report is made in a checkout of Octavo, whose benchmarks/gpu holds the figures to reach.")
    sys.path.insert(0, str(root))
    code: int = import_module("benchmarks.gpu.report").main(words)
    return code


def folder(path: Path) -> Path:
    """``path`` as a folder that can be written to, made if need be. Raises BenchError, before anything is timed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".octavo-bench"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BenchError(
            f"results cannot be written to {path}: {error.strerror}. Name a folder that you may use."
        ) from error
    return path


def keep(result: Result, into: Path) -> list[Path]:
    """Write what each suite found into ``bench_<device>_<suite>.json``; other suites' files stay."""
    stem = f"bench_{'_'.join(result.device.lower().split())}"
    return [write(part(result, suite), into / f"{stem}_{suite}.json") for suite in suites_of(result.rows)]
