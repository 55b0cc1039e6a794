"""Translates a configuration of another framework, and says what became of every key.

octavo import llama3_lora_sft.yaml -o run.yaml                LLaMA-Factory, axolotl, LLM-Foundry, MindSpeed-MM
octavo import qwen3_vl.yaml pretrain.sh -o run.yaml           LoongForge: the model's YAML, and the launch script
octavo import sft_qwen_fp8.sh -o run.yaml --world 8           VILA, COAT, ms-swift: a launch script, read and never run

Writes OUT.yaml, each line with where it came from, and beside it OUT.report.md: keys that were translated, that Octavo
does anyway, that have no equivalent here (and why), that did nothing there, and that are unknown. An MPT that the file
describes by numbers becomes a model's folder, OUT_model.

Exit codes: 0 done; 1 Octavo refuses the file as it stands, and the report says what to change; 2 nothing was written; 4
keys that decide numbers of the training have no translation, and the last line counts them (--allow-lost accepts that).
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
#: lost keys that the last line names
_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="YAML, JSON, a launch script (.sh) or flags (.txt)")
    parser.add_argument("flags", metavar="FLAGS-FILE", nargs="?", help="the launch script or flags it is started with")
    parser.add_argument("-o", "--out", metavar="OUT.yaml", required=True, help="the file to write")
    parser.add_argument(
        "--from", dest="framework", metavar="NAME", help="whose file it is; absent: recognised by its keys"
    )
    parser.add_argument(
        "--world", type=arguments.positive, metavar="N", help="processes that trained there; absent: as the launch says"
    )
    parser.add_argument(
        "--rows", type=arguments.positive, metavar="N", help="rows of the training data, which make shares into steps"
    )
    parser.add_argument(
        "--root", metavar="DIR", default=".", help="what their relative paths are seen from; absent: this folder"
    )
    parser.add_argument("--set", dest="variables", metavar="NAME=VALUE", action="append", default=[],
                        help="a variable that the script leaves open; may be repeated")  # fmt: skip
    names = [name for name in (*RECIPES, "auto") if name != "off"]
    parser.add_argument(
        "--fp8-recipe", metavar="NAME", choices=names, help=f"train in FP8 though they did not: {', '.join(names)}"
    )
    parser.add_argument(
        "--allow-lost", action="store_true", help="exit with 0 though keys that decide numbers have no translation"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files of an earlier translation")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from octavo import importers
    from octavo.base import atomic_write

    out = Path(args.out)
    for option, word in (("-o", args.out), ("--root", args.root), *(("--set", word) for word in args.variables)):
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # what the shell gave were other bytes
            raise UsageError(f"{option} {word}: it is no UTF-8 text, and the file would hold it. Choose another name.")
    if out.suffix not in (".yaml", ".yml"):
        raise UsageError(f"-o {args.out}: a configuration is a .yaml file")
    if not Path(args.root).is_dir():
        raise UsageError(f"--root {args.root}: there is no such folder")
    try:
        made = _translated(args, out)
    except importers.TranslateError as error:
        raise UsageError(str(error)) from error
    contents = {**made.extra, made.report: importers.markdown(made), made.out: made.content}
    there = [str(path) for path in contents if path.exists()]
    if there and not args.force:
        raise UsageError(f"{' and '.join(there)} would be overwritten; name another file, or give --force")
    for path, text in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write.write_text(path, text)
    if args.json:
        terminal.show_json(importers.plain(made))
    else:
        _show(made, out)
    return REFUSED if made.refused else LOST if made.lost_keys and not args.allow_lost else DONE


def _translated(args: argparse.Namespace, out: Path) -> Translation:
    from octavo import importers

    return importers.translate(
        [args.file, *([args.flags] if args.flags else [])],
        out,
        framework=args.framework,
        root=args.root,
        world=args.world,
        rows=args.rows,
        variables=_variables(args.variables),
        fp8=args.fp8_recipe,
    )


def _variables(words: list[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--set {word}: expected NAME=VALUE, with the name of a variable of the script")
        found[name] = value
    return found


def _show(made: Translation, out: Path) -> None:
    from octavo import importers
    from octavo.config.yaml.problems import brief

    print(f"{made.sources} ({made.framework}) -> {out}, {made.report.name}")
    for kind, heading in importers.HEADINGS.items():
        rows = [row for row in made.rows if row.kind == kind]
        if rows:
            print(f"\n{heading}: {len(rows)}")
            shown = rows if kind in ("dead", "unknown") else []
            for row in shown:
                print(f"  {row.given.place}: {brief(row.given.key, 60)}: {brief(row.why, 240)}")
    for note in made.notes:
        print(f"\nnote: {brief(note, 400)}")
    for problem in made.refused:
        print(f"\nOctavo refuses {out.name} as it stands: {problem}")
    if line := importers.lost_line(made):
        listed = ", ".join(brief(key, 60) for key in made.lost_keys[:_SHOWN])
        unlisted = len(made.lost_keys) - _SHOWN
        print(f"\n{line}: {listed}" + (f" and {unlisted} more" if unlisted > 0 else ""))
