"""Benchmarks Octavo's kernels, layers and training steps against high precision and other libraries.

octavo bench linear
octavo bench all --out benchmarks/results
octavo bench step --shape qwen3_vl_2b --tokens 4096
octavo bench step --layers 12 --candidate "bf16 compiled chunked" --candidate "blockwise fused compiled chunked"
octavo bench all --small --device cpu
octavo bench report benchmarks/results/gpu_nvidia_h200
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path
from typing import Any

from octavo.base.wording import did_you_mean
from octavo.cli import arguments, terminal

SUITES = ("cast", "gemm", "linear", "moe", "optimizer", "layer", "step", "decode", "memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    suites = f"all, {', '.join(SUITES)}; or report and folders of results, to compare them with the targets"
    parser.add_argument("suite", nargs="+", metavar="SUITE", help=suites)
    parser.add_argument("--device", metavar="NAME", help="cuda or cpu (default: a GPU if there is one)")
    parser.add_argument("--small", action="store_true", help="use small sizes (always on a CPU)")
    parser.add_argument("--shape", metavar="NAME", help="published model whose sizes are used (default qwen3_vl_8b)")
    parser.add_argument(
        "--tokens", type=arguments.positive, metavar="N", help="tokens per call (default: depends on the suite)"
    )
    parser.add_argument(
        "--layers", type=arguments.positive, metavar="N", help="suite step: use only the first N decoder blocks"
    )
    parser.add_argument(
        "--candidate", action="append", default=[], metavar="NAME", help="run only this candidate; may be repeated"
    )
    parser.add_argument("--cases", metavar="REGEX", default="", help="run only cases whose name contains this")
    parser.add_argument(
        "--budget", type=_seconds, metavar="SECONDS", help="time limit of a suite; no case starts after it"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder for JSON results, one file per suite")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.suite[0] == "report":
        from octavo import bench

        return bench.report(args.suite[1:])
    if unknown := [name for name in args.suite if name not in ("all", *SUITES)]:
        from octavo.config.sections.foreign_words import SUITE_WORDS

        near = did_you_mean(SUITE_WORDS.get(unknown[0].lower(), unknown[0]), ("all", *SUITES))
        known = ", ".join(("all", *SUITES))
        print(f"octavo bench: there is no suite {unknown[0]!r}; suites are: {known}.{near}", file=sys.stderr)
        return 2
    import torch

    from octavo import bench
    from octavo.base import accelerator

    here = list(dict.fromkeys((accelerator.default_device().type, "cpu")))
    name = args.device or here[0]
    if re.fullmatch(r"\w+(:[0-9]+)?", name) is None or name.partition(":")[0] not in here:
        raise bench.BenchError(f"--device {name} is not available; use {' or '.join(here)}.")
    device = torch.device(name)
    if args.shape is not None:
        from octavo import models

        models.shape_model(args.shape)  # check the name before anything is timed
    if args.out is not None:
        bench.check_folder(args.out)  # check that the folder is writable
    names = list(SUITES) if "all" in args.suite else list(dict.fromkeys(args.suite))
    small = args.small or device.type == "cpu"
    sizes = {"shape": args.shape, "tokens": args.tokens, "layers": args.layers}
    session = bench.Bench(
        device, small, args.budget, terminal.note, **sizes, candidates=args.candidate, cases=args.cases
    )
    result = bench.run(names, session)
    if args.json:
        terminal.show_json(result.to_json())
    else:
        _show(result)
    if args.out is not None:
        for path in bench.write_suites(result, args.out):
            terminal.note(f"wrote {path}")
    if not result.rows:
        terminal.note("nothing was timed; see above for skipped cases and missing candidates")
    return 0 if result.rows else 1


def _show(result: Any) -> None:
    from octavo.bench import record

    terminal.show_table(record.COLUMNS, record.table(result), right=record.NUMBERS)
    for table in (record.budget_table(result), record.kernel_table(result), record.columns_table(result)):
        if table:
            terminal.show_table(table[0], table[1:], right=range(2, len(table[0])))
    for note in record.notes(result):
        print(f"note: {note}")
    absent: dict[tuple[str, str], list[str]] = {}
    for a in result.absent:
        absent.setdefault((a.candidate, a.why), []).append(a.case)
    for (candidate, why), cases in absent.items():
        print(f"absent: {candidate} ({len(cases)} case{'s' * (len(cases) > 1)}): {why}")
    for line in result.cut:
        print(f"skipped: {line}")
    if noisy := record.noisy_rows(result):
        print(f"note: {len(noisy)} of {len(result.rows)} rows are noisy: they vary by more than 50 % between quartiles")
    if result.small:
        print("note: sizes are small, and FP8 on a CPU is emulated: the ratios do not apply to a GPU")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds of at least 0")
    return value
