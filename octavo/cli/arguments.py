"""Arguments that several commands share, and the error for values that argparse cannot judge."""

from __future__ import annotations

import argparse
import errno
import gc
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from octavo.base import encryption, environment, hub, target_folder
from octavo.base.encryption.key import keep_source
from octavo.base.safe_read import printable
from octavo.cli.terminal import note
from octavo.config import Config, load_config
from octavo.config.sections.names import Format, RecipeName, one_word
from octavo.config.sections.text_types import is_url
from octavo.config.yaml.problems import named

#: command -> arguments that name what it writes
TARGETS = {
    **dict.fromkeys(("export", "merge", "tiny", "digits", "text", "examples"), ("directory",)),
    **dict.fromkeys(("decrypt", "seal", "unseal"), ("target",)),
    **dict.fromkeys(("import", "compare", "bisect", "bench", "report"), ("out",)),
    "encrypt": ("target", "new_key"), "demo": ("dir",),  # convert looks itself: it has two spellings
}  # fmt: skip
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


def check_paths(words: Sequence[str]) -> None:
    """Refuse paths that no command can work with, before one begins. Raises UsageError for a name that is there and is
    not UTF-8, which no report, index or table could hold, and for links that lead in a circle."""
    for word in words:
        shown = printable(word)
        try:
            if not word.isprintable() and os.path.lexists(word):
                word.encode()
            os.stat(word)
        except UnicodeEncodeError:
            if not os.path.lexists(word):  # half a character: no path, and the command says what it is instead
                continue
            raise UsageError(f"{shown}: its name is not UTF-8; rename it, or name it by a link") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UsageError(f"{shown}: its links lead in a circle; name the file or folder itself") from None
        except ValueError:  # a NUL: no path, and the command says what it is instead
            pass


def check_targets(command: str, args: argparse.Namespace) -> None:
    """What a command is asked to write has a name that can be used. Raises UsageError."""
    for name in TARGETS.get(command, ()):
        if isinstance(target := getattr(args, name, None), str | Path) and "\0" not in str(target):
            target_folder.check_target(target, UsageError)


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


def require_files(cfg: Config, file: str | None) -> Config:
    """The configuration with folders for names of the hub. Raises UsageError with all that it names and that is not
    there: files, and trackers' packages."""
    cfg, lost = resolve_files(cfg, file)
    if (why := environment.missing_trackers(cfg.run.trackers)) is not None:
        lost.append(why)
    if lost:
        raise UsageError("\n".join(lost))
    return cfg


def resolve_files(cfg: Config, file: str | None) -> tuple[Config, list[str]]:
    """The configuration with folders for names of the hub, and what it names and is not there, a sentence each."""
    if lost := missing_files(cfg, file):
        return cfg, lost
    try:
        return hub.resolve_names(cfg, note), []
    except hub.HubError as error:
        return cfg, [str(error)]


def missing_files(cfg: Config, file: str | None) -> list[str]:
    """What a configuration names and is not there, a sentence each, but for names of the hub and URLs. No torch."""
    model = cfg.model.path
    found = [] if Path(model).is_dir() or hub.is_name(model) else [("model.path", model, "folder")]
    named_files = [
        (f"data.{of}.{n}", entry) for of in ("train", "eval") for n, entry in enumerate(getattr(cfg.data, of))
    ]
    for key, entry in named_files:
        elsewhere = hub.is_name(entry.path) or is_url(entry.path)
        found += [] if Path(entry.path).exists() or elsewhere else [(f"{key}.path", entry.path, "file")]
        if entry.images is not None and not Path(entry.images).is_dir():
            found.append((f"{key}.images", entry.images, "folder"))
    lost = [f"{key}: there is no {kind} {path}{_from_here(path, file)}" for key, path, kind in found]
    if Path(model).is_dir() and not (Path(model) / "config.json").exists():
        lost.insert(0, f"model.path: {model} is no model folder: it has no config.json")
    return lost


def _from_here(path: str, file: str | None) -> str:
    """A hint where the path would be right seen from the working directory, while a file's are seen from the file."""
    if file is None:
        return ""
    folder = Path(file).absolute().parent
    here = Path(os.path.normpath(Path.cwd() / os.path.relpath(path, folder)))
    if str(here) == path or not here.exists():
        return ""
    return f" (paths in {file} are seen from its folder; from there {here} is {os.path.relpath(here, folder)})"


@contextmanager
def importing() -> Iterator[None]:
    """Around imports of torch and transformers: what they make stays, so that looking for garbage meanwhile finds none
    and takes a fifth of the time. It is set apart for good, where a command is the first to import them: half a million
    objects, which later collections, one a step that counts memory, would go through as well."""
    first = "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
        gc.enable()


def add_key(parser: argparse.ArgumentParser) -> None:
    """``--key-file``: the key of what is encrypted."""
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help=f"key of what is encrypted or sealed (else {encryption.FILE} or {encryption.VALUE})",
    )


def use_key(args: argparse.Namespace) -> None:
    """Hand the key's file on, to ranks and workers too, as their environment does; it wins over what is set there."""
    if getattr(args, "key_file", None) is not None:
        os.environ.pop(encryption.VALUE, None)
        os.environ[encryption.FILE] = os.path.abspath(args.key_file)
    if hasattr(args, "key_file") and os.environ.get(encryption.FILE):
        keep_source()


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``: the same content for programs."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else there")


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """An argparse type: a whole number of at least 0."""
    return _whole(text, 0)


def share(text: str) -> float:
    """An argparse type: a number above 0 and below 10."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < 10:
        raise argparse.ArgumentTypeError(f"expected a share above 0, such as 0.02, found {named(text)}")
    return found


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < least:
        bound = "below a billion" if text.isdecimal() and len(text) > 9 else f"of at least {least}"
        raise argparse.ArgumentTypeError(f"expected a whole number {bound}, found {named(text)}")
    return int(text)


def _names(literal: object) -> tuple[str, ...]:
    import typing

    return typing.get_args(literal)
