"""Shows for every linear layer which recipe and kernel it would run in, and why. Reads no weights.

octavo plan run.yaml
octavo plan run.yaml fp8.recipe=rowwise --all
octavo plan --shape qwen3_vl_8b fp8.image_projector.recipe=rowwise
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from octavo.cli import arguments, terminal
from octavo.config import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_config(parser, file="?")
    parser.add_argument("--shape", metavar="NAME", help="instead of a file: a published model by its dimensions")
    parser.add_argument("--all", action="store_true", help="list repeated layers one by one")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.shape is not None:
        plan, family, notes = _of_shape(args)
    elif args.file is None:
        raise arguments.UsageError("name a configuration file, or a published model: octavo plan --shape qwen3_vl_8b")
    else:
        cfg = arguments.config(args)

        from octavo.train import planning

        plan, family, notes = planning.plan_for(cfg)
    if args.json:
        terminal.show_json({"family": family.name, **plan.to_json(), "notes": list(notes)})
    else:
        show(plan, notes, everything=args.all)
    return 0


def _of_shape(args: argparse.Namespace) -> tuple[Any, Any, Sequence[str]]:
    """The plan of a published model: `model.path`, data and steps do not matter, all other settings do."""
    if args.file is not None:  # without a file the first setting stands in its place
        if "=" not in args.file:
            raise arguments.UsageError(f"--shape takes the place of the file; leave out {args.file} or --shape")
        args.overrides.insert(0, args.file)
    settings = [f"model.path={args.shape}", "data.train=[{path: none}]", "train.steps=1"]
    cfg = load_config(None, [*settings, *arguments.overrides(args)])

    from octavo import models
    from octavo.models import shapes
    from octavo.train import planning

    model, family = shapes.shape_model(args.shape)
    models.freeze(model, family, cfg.model.freeze)
    return planning.plan_model(cfg, model, family)


def show(plan: Any, notes: Sequence[str], everything: bool) -> None:
    """The table, what it adds up to, and what else a reader should know."""
    from octavo.fp8 import plan_table

    rows = [_line(row) for row in plan.rows] if everything else plan_table.lines(plan)
    terminal.show_table(plan_table.HEAD, rows, right=(3,))
    print()
    for sentence in [*plan_table.totals(plan), *(f"note: {note}" for note in notes)]:
        print(sentence)


def _line(row: Any) -> tuple[str, ...]:
    recipe = row.recipe.short() if row.fp8 else "-"
    backend = row.backend.backend.name if row.backend else "-"
    return row.component, row.name, f"{row.shape[0]} x {row.shape[1]}", "1", recipe, backend, row.reason
