"""Translates a configuration of another framework, and reports on every key.

octavo import llama3_lora_sft.yaml -o run.yaml                LLaMA-Factory, axolotl, LLM-Foundry, MindSpeed-MM
octavo import qwen3_vl.yaml pretrain.sh -o run.yaml           LoongForge: the model's YAML and the launch script
octavo import sft_qwen_fp8.sh -o run.yaml --world 8           VILA, COAT, ms-swift: a launch script (it is not executed)

Writes OUT.yaml, with the origin of each line, and OUT.report.md, which lists the keys that were translated, are the
default in Octavo, have no equivalent (with the reason), had no effect, or are unknown. An MPT model that the file
defines by its sizes is written to a model folder, OUT_model.

Exit codes: 0 success; 1 the result is not valid in Octavo, and the report lists the problems; 2 nothing was written;
4 keys that affect training results could not be translated; they are listed last (--allow-lost exits with 0).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli import arguments, terminal
from octavo.cli.arguments import UsageError
from octavo.config.sections.names import RECIPES

if TYPE_CHECKING:
    from octavo.importers import Translation

#: exit codes, as in octavo/cli/main.py
DONE, REFUSED, LOST = 0, 1, 4
#: number of lost keys in the last line
_MAX_LISTED = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="configuration: YAML, JSON, a launch script (.sh) or flags (.txt)")
    parser.add_argument("flags", metavar="FLAGS-FILE", nargs="?", help="launch script or flags that belong to FILE")
    parser.add_argument("-o", "--out", metavar="OUT.yaml", required=True, help="output file")
    parser.add_argument(
        "--from", dest="framework", metavar="NAME", help="framework of FILE (default: detected from its keys)"
    )
    # Launch scripts often leave out the number of processes and rows, on which steps and batch sizes depend.
    parser.add_argument(
        "--world",
        type=arguments.positive,
        metavar="N",
        help="number of processes of the original run (default: from the launch script)",
    )
    parser.add_argument(
        "--rows",
        type=arguments.positive,
        metavar="N",
        help="number of training rows, to convert epochs and fractions into steps",
    )
    parser.add_argument(
        "--root",
        metavar="DIR",
        default=".",
        help="folder that relative paths in FILE refer to (default: the working directory)",
    )
    parser.add_argument("--set", dest="variables", metavar="NAME=VALUE", action="append", default=[],
                        help="shell variable that the script does not set; may be repeated")  # fmt: skip
    names = [name for name in (*RECIPES, "auto") if name != "off"]
    parser.add_argument(
        "--fp8-recipe",
        metavar="NAME",
        choices=names,
        help=f"FP8 recipe, if FILE does not train in FP8: {', '.join(names)}",
    )
    parser.add_argument(
        "--allow-lost",
        action="store_true",
        help="exit with 0 even if keys that affect training results could not be translated",
    )
    parser.add_argument("--force", action="store_true", help="overwrite existing output files")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from octavo import importers
    from octavo.base import atomic_write

    out = Path(args.out)
    for option, word in (("-o", args.out), ("--root", args.root), *(("--set", word) for word in args.variables)):
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # bytes that are not UTF-8
            raise UsageError(
                f"{option} {word}: the value is not UTF-8, and the output would contain it. Choose another name."
            )
    if out.suffix not in (".yaml", ".yml"):
        raise UsageError(f"-o {args.out}: the file must end with .yaml")
    if not Path(args.root).is_dir():
        raise UsageError(f"--root {args.root}: the folder does not exist")
    try:
        translation = _translate(args, out)
    except importers.TranslateError as error:
        raise UsageError(str(error)) from error
    contents = {
        **translation.extra,
        translation.report: importers.markdown(translation),
        translation.out: translation.content,
    }
    existing = [str(path) for path in contents if path.exists()]
    if existing and not args.force:
        raise UsageError(f"{' and '.join(existing)} would be overwritten; name another file, or use --force")
    for path, text in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write.write_text(path, text)
    if args.json:
        terminal.show_json(importers.to_json(translation))
    else:
        _show(translation, out)
    return REFUSED if translation.problems else LOST if translation.lost_keys and not args.allow_lost else DONE


def _translate(args: argparse.Namespace, out: Path) -> Translation:
    from octavo import importers

    return importers.translate(
        [args.file, *([args.flags] if args.flags else [])],
        out,
        framework=args.framework,
        root=args.root,
        world=args.world,
        rows=args.rows,
        variables=_parse_variables(args.variables),
        fp8=args.fp8_recipe,
    )


def _parse_variables(words: list[str]) -> dict[str, str]:
    variables = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--set {word}: expected NAME=VALUE, where NAME is a variable of the script")
        variables[name] = value
    return variables


def _show(translation: Translation, out: Path) -> None:
    from octavo import importers
    from octavo.config.yaml.problems import brief

    print(f"{translation.sources} ({translation.framework}) -> {out}, {translation.report.name}")
    for kind, heading in importers.HEADINGS.items():
        rows = [row for row in translation.rows if row.kind == kind]
        if rows:
            print(f"\n{heading}: {len(rows)}")
            for row in rows if kind in ("dead", "unknown") else []:
                print(f"  {row.source_key.place}: {brief(row.source_key.key, 60)}: {brief(row.why, 240)}")
    for note in translation.notes:
        print(f"\nnote: {brief(note, 400)}")
    for problem in translation.problems:
        print(f"\nOctavo refuses {out.name}: {problem}")
    if line := importers.lost_line(translation):
        listed = ", ".join(brief(key, 60) for key in translation.lost_keys[:_MAX_LISTED])
        unlisted = len(translation.lost_keys) - _MAX_LISTED
        print(f"\n{line}: {listed}" + (f" and {unlisted} more" if unlisted > 0 else ""))
