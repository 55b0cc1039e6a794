"""Checks whether transformers, vLLM and SGLang load a model folder (plain or FP8) or an adapter folder correctly.

octavo verify DIR                      files, names, scales, skip lists, every value; a verdict for each loader
octavo verify DIR --against BASE       also compare every tensor with the folder it was derived from
octavo verify DIR --quick              everything except values: headers, config.json, tokenizer, template, processor

Exit code 1 if something is wrong; warnings do not change the exit code.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from octavo.base.byte_size import format_bytes
from octavo.base.safe_read import printable
from octavo.base.wording import count_noun
from octavo.cli import arguments, terminal

_SHOWN = 3  # findings of one kind, and unread files, printed without --all
_ROWS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="Hugging Face folder or PEFT adapter folder")
    parser.add_argument(
        "--against", metavar="DIR", help="folder that DIR was derived from (for an adapter: its base), plain or FP8"
    )
    parser.add_argument(
        "--quick", action="store_true", help="check only headers, settings and tokenizer, without reading values"
    )
    parser.add_argument("--all", action="store_true", help="list every finding and every compared tensor")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.quick and args.against is not None:
        raise arguments.UsageError("--quick reads no values, and --against compares them; remove one of them")
    for folder in filter(None, (args.directory, args.against)):
        if not Path(folder).is_dir():
            raise arguments.UsageError(f"{folder} is not a folder; name a Hugging Face folder or a PEFT adapter folder")

    from octavo.checkpoint.verify import verify

    with terminal.progress("verifying") as progress:
        verified = verify(args.directory, args.against, args.quick, progress)
    if args.json:
        terminal.show_json(verified.to_json())
    else:
        show(verified, everything=args.all)
    return 0 if verified.ok else 1


def show(verified: Any, everything: bool) -> None:
    """Print the findings, the largest errors, the verdicts as a table, and a summary line."""
    size = format_bytes(verified.size)
    codes = f", {verified.fp8} of them FP8 codes" if verified.fp8 else ""
    terminal.say(f"{verified.directory}: {verified.form}; {count_noun(verified.tensors, 'tensor')}{codes}, {size}")
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for finding in verified.findings:
        groups[finding.status, finding.kind].append(finding)
    for (status, kind), findings in groups.items():
        print()
        # A damaged folder can have a finding for each tensor.
        shown = findings if everything else findings[:_SHOWN]
        for finding in shown:
            print(f"{status}: {finding.text}")
        if rest := findings[len(shown) :]:
            # Which tensors have no counterpart is the answer; of other kinds the number is.
            names = f": {', '.join(printable(f.tensor) for f in rest)}" if kind == "against-names" else ""
            print(f"{status}: ... and {len(rest)} more of this kind (--all lists them){names}")
    if verified.compared:
        _show_compared(verified, everything)
    print()
    terminal.show_table(
        ("loader", "verdict", "reason", "source"),
        [(v.loader, v.verdict, v.reason, v.source) for v in verified.verdicts],
    )
    print()
    failed, warned = len(verified.failures), len(verified.warnings)
    if verified.unread:
        files = ", ".join(map(printable, verified.unread[:_SHOWN])) + (" ..." if len(verified.unread) > _SHOWN else "")
        print(f"Not read: {files}.")
    if failed:
        print(f"{failed} problem{'s' * (failed > 1)}, {_count(warned)}.")
    elif verified.scanned:
        print(f"No problems found{' in the files that were read' if verified.unread else ''}, {_count(warned)}.")
    else:
        print(f"Headers, settings and tokenizer are correct, {_count(warned)}; values were not read (--quick).")


def _count(warned: int) -> str:
    return "no warnings" if not warned else "1 warning" if warned == 1 else f"{warned} warnings"


def _show_compared(verified: Any, everything: bool) -> None:
    rows = verified.compared if everything else verified.compared[:_ROWS]
    print()
    terminal.show_table(
        ("tensor", "status", "error", "bound", "SQNR dB", "codes"),
        [
            (c.tensor, c.status, terminal.number(c.error), terminal.number(c.bound), f"{c.sqnr:.1f}", c.codes or "-")
            for c in rows
        ],
        title=f"compared with {verified.against}, worst first",
        right=(2, 3, 4),
    )
    identical = sum(c.codes == "identical" for c in verified.compared)
    exact = sum(c.error == 0 for c in verified.compared)
    codes = f", {identical} with identical codes" if identical else ""
    print(f"{count_noun(len(verified.compared), 'tensor')} compared, {exact} equal{codes}.")
