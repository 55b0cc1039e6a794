"""What Octavo's kernels and layers are worth on this machine: suites that time them beside everybody else's.

    octavo bench linear                     one suite
    octavo bench all --out results          all of them; JSON and a plot for each

Needs torch, transformers and matplotlib; on a GPU also triton, which comes with CUDA builds of torch. The same suites
run on small sizes on a CPU, where the figures say nothing about FP8 but the code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from octavo.bench.bench import Bench
from octavo.bench.record import Result, load, part, suites_of, table, write

__all__ = ["SUITES", "Bench", "BenchError", "Result", "folder", "keep", "load", "run", "table"]

#: suite -> what it measures
SUITES: Mapping[str, str] = {
    "cast": "casts and fused layers, as bandwidth against a copy",
    "gemm": "the three GEMMs alone, on operands that are FP8 already",
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
        suite: Callable[[Bench], None] = import_module(f"octavo.bench.suite_{name}").run
        bench.begin()
        suite(bench)
    return bench.result


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
    """Write what each suite found into ``bench_<device>_<suite>.json`` and ``.png``; other suites' files stay."""
    from octavo.bench import plot

    paths = []
    for suite in suites_of(result.rows):
        stem = into / f"bench_{'_'.join(result.device.lower().split())}_{suite}"
        paths.append(write(part(result, suite), stem.with_suffix(".json")))
        if plot.draw(result, suite, stem.with_suffix(".png")):
            paths.append(stem.with_suffix(".png"))
    return paths
