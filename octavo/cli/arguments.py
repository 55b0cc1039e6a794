"""Arguments that several commands share, and the error for values that argparse cannot judge."""

from __future__ import annotations

import argparse
from pathlib import Path

from octavo.config import Config, load_config
from octavo.config.problems import named
from octavo.config.sections import Format, RecipeName, one_word

OVERRIDES_HELP = "settings that win over the file, e.g. train.lr=3e-4 data.train.0.max_samples=100"


class UsageError(ValueError):
    """The command line asks for something that cannot be; exit code 2."""


def add_config(parser: argparse.ArgumentParser, *, file: str | None = None) -> None:
    """FILE.yaml, key=value overrides and the three FP8 flags; ``file`` "?" makes the file optional."""
    parser.add_argument(
        "file", metavar="FILE.yaml", nargs=file, help="the configuration (octavo schema lists its keys)"
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help=OVERRIDES_HELP)
    # flags known from elsewhere; each is another name of an override
    group = parser.add_argument_group("FP8 of the whole model (as fp8.recipe=, fp8.format=, fp8.param=true)")
    names = _names(RecipeName)
    group.add_argument("--fp8-recipe", metavar="NAME", type=one_word, choices=names, help=", ".join(names))
    group.add_argument("--fp8-format", metavar="NAME", choices=_names(Format), help=", ".join(_names(Format)))
    group.add_argument("--fp8-param-gather", action="store_true", help="keep FP8 weights and gather them in FP8")


def overrides(args: argparse.Namespace) -> list[str]:
    """``key=value`` arguments and flags as one list of overrides, flags last."""
    found = list(args.overrides)
    if args.fp8_recipe:
        found.append(f"fp8.recipe={args.fp8_recipe}")
    if args.fp8_format:
        found.append(f"fp8.format={args.fp8_format}")
    if args.fp8_param_gather:
        found.append("fp8.param=true")
    return found


def config(args: argparse.Namespace) -> Config:
    """The checked configuration of a command with :func:`add_config`. Raises ConfigError or UsageError."""
    if "=" in args.file and not Path(args.file).exists():
        raise UsageError(f"the first argument is the configuration file, found {args.file!r}; put FILE.yaml before it")
    flags = args.fp8_recipe or args.fp8_format or args.fp8_param_gather  # each means the whole model
    return load_config(args.file, overrides(args), whole=bool(flags))


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``: the same content for programs."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else there")


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """An argparse type: a whole number of at least 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < least:
        bound = "below a billion" if text.isdecimal() and len(text) > 9 else f"of at least {least}"
        raise argparse.ArgumentTypeError(f"expected a whole number {bound}, found {named(text)}")
    return int(text)


def _names(literal: object) -> tuple[str, ...]:
    import typing

    return typing.get_args(literal)
