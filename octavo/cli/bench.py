"""Times Octavo's kernels, layers and training steps beside high precision and other libraries.

octavo bench linear
octavo bench all --out benchmarks/results
octavo bench step --shape qwen3_vl_2b --tokens 4096
octavo bench all --small --device cpu
"""

from __future__ import annotations

import argparse
from pathlib import Path

from octavo.cli import terminal

SUITES = ("cast", "gemm", "linear", "moe", "layer", "step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", nargs="+", choices=("all", *SUITES), metavar="SUITE", help=f"all, {', '.join(SUITES)}")
    parser.add_argument("--device", metavar="NAME", help="cuda or cpu; default: the GPU if there is one")
    parser.add_argument("--small", action="store_true", help="small sizes (always so on a CPU)")
    parser.add_argument("--shape", metavar="NAME", help="the published size of layer and step (default qwen3_vl_8b)")
    parser.add_argument("--tokens", type=_positive, metavar="N", help="tokens of a call, instead of each suite's own")
    parser.add_argument("--layers", type=_positive, metavar="N", help="step: only the first N decoder blocks")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="let a suite begin no case after so many seconds"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write bench_<device>.json and a PNG a suite there")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else there")


def run(args: argparse.Namespace) -> int:
    import torch

    from octavo import bench

    here = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    name = args.device or here[0]
    if name.partition(":")[0] not in here:
        raise bench.BenchError(f"--device {name} is not here; use {' or '.join(here)}.")
    device = torch.device(name)
    if args.shape is not None:
        from octavo import models

        models.shape_model(args.shape)  # an unknown name is told before anything is timed
    names = list(SUITES) if "all" in args.suite else list(dict.fromkeys(args.suite))
    small = args.small or device.type == "cpu"
    session = bench.Bench(
        device, small, args.budget, terminal.note, shape=args.shape, tokens=args.tokens, layers=args.layers
    )
    result = bench.run(names, session)
    if args.json:
        terminal.show_json(result.to_json())
    else:
        _show(result)
    if args.out is not None:
        _keep(result, args.out)
    return 0


def _show(result: object) -> None:
    from octavo.bench import record

    terminal.show_table(record.COLUMNS, record.table(result), right=record.NUMBERS)  # type: ignore[arg-type]
    absent = {}
    for a in result.absent:  # type: ignore[attr-defined]
        absent.setdefault((a.candidate, a.why), []).append(a.case)
    for (candidate, why), cases in absent.items():
        print(f"absent: {candidate} ({len(cases)} case{'s' * (len(cases) > 1)}): {why}")
    for line in result.cut:  # type: ignore[attr-defined]
        print(f"left out: {line}")
    if result.small:  # type: ignore[attr-defined]
        print("note: small sizes; FP8 on a CPU is emulated, so these ratios say nothing about a GPU")


def _keep(result: object, folder: Path) -> None:
    from octavo.bench import picture, record

    stem = f"bench_{'_'.join(result.device.lower().split())}"  # type: ignore[attr-defined]
    paths = [record.write(result, folder / f"{stem}.json"), *picture.draw(result, folder, stem)]  # type: ignore[arg-type]
    for path in paths:
        terminal.note(f"wrote {path}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value
