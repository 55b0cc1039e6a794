"""Arguments that several commands share, and the error for values that argparse cannot check."""

from __future__ import annotations

import argparse
import errno
import gc
import math
import os
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from octavo.base import encryption, environment, hub, target_folder
from octavo.base.encryption.key import buffer_key_file
from octavo.base.safe_read import printable
from octavo.cli.terminal import note
from octavo.config import Config, load_config
from octavo.config.sections.data import DataSection, Dataset
from octavo.config.sections.names import Format, RecipeName, canonical_name
from octavo.config.sections.text_types import absent_rows_text, is_url, python_name
from octavo.config.yaml.problems import describe_value

#: command -> arguments that name its output
TARGETS = {
    **dict.fromkeys(("export", "merge", "tiny", "digits", "text", "examples"), ("directory",)),
    **dict.fromkeys(("decrypt", "seal", "unseal"), ("target",)),
    **dict.fromkeys(("import", "compare", "bisect", "bench", "report", "compose"), ("out",)),
    "encrypt": ("target", "new_key"), "demo": ("dir",),  # convert checks itself: it accepts two spellings
}  # fmt: skip
OVERRIDES_HELP = "settings that override the file, e.g. train.lr=3e-4 data.train.0.max_samples=100"


class UsageError(ValueError):
    """The command line is wrong; exit code 2."""


def add_config(parser: argparse.ArgumentParser, *, file: str | None = None) -> None:
    """Add FILE.yaml, key=value overrides and the three FP8 flags; ``file="?"`` makes the file optional."""
    parser.add_argument(
        "file", metavar="FILE.yaml", nargs=file, help="configuration file (`octavo schema` lists its keys)"
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help=OVERRIDES_HELP)
    # Flags that users of other trainers know; each is equivalent to an override.
    group = parser.add_argument_group("FP8 for the whole model (same as fp8.recipe=, fp8.format=, fp8.param=true)")
    names = _names(RecipeName)
    group.add_argument(
        "--fp8-recipe", metavar="NAME", type=canonical_name, choices=names, help=f"FP8 recipe: {', '.join(names)}"
    )
    group.add_argument(
        "--fp8-format", metavar="NAME", choices=_names(Format), help=f"FP8 format: {', '.join(_names(Format))}"
    )
    group.add_argument("--fp8-param-gather", action="store_true", help="keep weights in FP8 and all-gather them in FP8")


def check_paths(words: Sequence[str]) -> None:
    """Raise UsageError for paths that no command can use: an existing name that is not UTF-8, which no report, index or
    table could contain, and symbolic links that form a loop."""
    for word in words:
        shown = printable(word)
        try:
            if not word.isprintable() and os.path.lexists(word):
                word.encode()
            os.stat(word)
        except UnicodeEncodeError as error:
            if not os.path.lexists(word):  # not an existing path: the command reports it
                continue
            raise UsageError(f"{shown}: its name is not UTF-8; rename it, or use a link to it") from error
        except OSError as error:  # others: most words are no paths, and the command reports a path that it cannot open
            if error.errno == errno.ELOOP:
                raise UsageError(f"{shown}: its symbolic links form a loop; name the file or folder itself") from error
        except ValueError:  # a NUL is not part of a path: the command reports it
            pass


def check_targets(command: str, args: argparse.Namespace) -> None:
    """Check the output paths of a command. Raises UsageError."""
    for name in TARGETS.get(command, ()):
        if isinstance(target := getattr(args, name, None), str | Path) and "\0" not in str(target):
            target_folder.check_target(target, UsageError)


def overrides(args: argparse.Namespace) -> list[str]:
    """Return ``key=value`` arguments and flags as one list of overrides, flags last."""
    words = list(args.overrides)
    if args.fp8_recipe:
        words.append(f"fp8.recipe={args.fp8_recipe}")
    if args.fp8_format:
        words.append(f"fp8.format={args.fp8_format}")
    if args.fp8_param_gather:
        words.append("fp8.param=true")
    return words


def config(args: argparse.Namespace) -> Config:
    """Load the configuration of a command with :func:`add_config`. Raises ConfigError or UsageError."""
    if "=" in args.file and not Path(args.file).exists():
        raise UsageError(f"the first argument is the configuration file, found {args.file!r}; put FILE.yaml before it")
    flags = args.fp8_recipe or args.fp8_format or args.fp8_param_gather  # each applies to the whole model
    return load_config(args.file, overrides(args), whole=bool(flags))


def require_files(cfg: Config, file: str | None) -> Config:
    """Replace names on the hub by local folders. Raises UsageError that lists every missing file and every missing
    package of a tracker."""
    cfg, missing = resolve_files(cfg, file)
    if (why := environment.why_no_trackers(cfg.run.trackers)) is not None:
        missing.append(why)
    if missing:
        raise UsageError("\n".join(missing))
    return cfg


def resolve_files(cfg: Config, file: str | None) -> tuple[Config, list[str]]:
    """Replace names on the hub by local folders. Returns the configuration and a message for each missing file."""
    if missing := missing_files(cfg, file):
        return cfg, missing
    try:
        cfg = hub.resolve_names(cfg, note)
    except hub.HubError as error:
        return cfg, [str(error)]
    if cfg.model.foundation is not None:
        return _compose(cfg)
    return (cfg, []) if cfg.model.fp8_twin is None else _resolve_twin(cfg)


def _compose(cfg: Config) -> tuple[Config, list[str]]:
    with importing():
        from octavo.models import ModelError
        from octavo.models.compose.from_config import compose_model

    try:
        compose_model(cfg, note)
    except (hub.HubError, ModelError) as error:
        return cfg, [str(error)]
    return cfg, []


def _resolve_twin(cfg: Config) -> tuple[Config, list[str]]:
    from octavo.models import ModelError  # imports torch
    from octavo.models.structure.fp8_twin import resolve_twin

    try:
        return resolve_twin(cfg, note), []
    except (hub.HubError, ModelError) as error:
        return cfg, [str(error)]


def missing_files(cfg: Config, file: str | None, in_memory: Collection[str] = ()) -> list[str]:
    """Return a message for each path of a configuration that does not exist, except names on the hub, URLs, and rows
    `in_memory`, which the caller has (`python:NAME`). Does not import torch."""
    model, parts = cfg.model.path, (("image_encoder", cfg.model.image_encoder), ("foundation", cfg.model.foundation))
    folders = [(f"model.{name}.path", part.path) for name, part in parts if part is not None] or [("model.path", model)]
    absent = [(key, path, "folder") for key, path in folders if not Path(path).is_dir() and not hub.is_name(path)]
    elsewhere = []
    for key, entry in _data_sets(cfg):
        if python_name(entry.path) is not None and entry.path not in in_memory:
            elsewhere.append(f"{key}.path: {absent_rows_text(entry.path)}")
        is_remote = hub.is_name(entry.path) or is_url(entry.path) or python_name(entry.path) is not None
        absent += [] if Path(entry.path).exists() or is_remote else [(f"{key}.path", entry.path, "file")]
        if entry.images is not None and not Path(entry.images).is_dir():
            absent.append((f"{key}.images", entry.images, "folder"))
    missing = [f"{key}: there is no {kind} {path}{_from_here(path, file)}" for key, path, kind in absent] + elsewhere
    if Path(model).is_dir() and not (Path(model) / "config.json").exists():
        missing.insert(0, f"model.path: {model} is not a model folder: {_why_no_model(Path(model))}")
    return missing


def _data_sets(cfg: Config) -> Iterator[tuple[str, Dataset]]:
    """Yield every data set with its key: of the run, and of the stages that have their own."""
    stages: list[tuple[str, DataSection]] = [
        (f"train.stages.{n}.data", stage.data) for n, stage in enumerate(cfg.train.stages) if stage.data is not None
    ]
    for split in ("train", "eval"):
        chosen = [(key, data) for key, data in stages if split in data.model_fields_set]
        for key, data in chosen or [("data", cfg.data)]:
            yield from ((f"{key}.{split}.{n}", one) for n, one in enumerate(getattr(data, split)))


def _why_no_model(folder: Path) -> str:
    """Return what a folder without config.json is, and which model was probably meant."""
    runs = [folder, *folder.absolute().parents[:2]]  # a run, its folder of checkpoints, one of these
    run = next((run for run in runs if (run / "config.yaml").is_file()), None)
    if (folder / "adapter_config.json").is_file():
        return "it is an adapter; set model.path to its base and lora.adapter to this folder"
    if run is None:
        return "it has no config.json"
    what = "it is a run directory" if run == folder else f"it belongs to the run {run}"
    if (run / "hf" / "config.json").is_file():
        return f"{what}, whose model is {run / 'hf'}"
    if (run / "adapter").is_dir():
        return f"{what} with LoRA; merge its adapter first: octavo merge {run} MERGED"
    return f"{what} without hf/; export its model first: octavo export {run} MODEL --format bf16"


def _from_here(path: str, file: str | None) -> str:
    """Return a hint if the path exists relative to the working directory; paths in a file are relative to its
    folder."""
    if file is None:
        return ""
    folder = Path(file).absolute().parent
    here = Path(os.path.normpath(Path.cwd() / os.path.relpath(path, folder)))
    if str(here) == path or not here.exists():
        return ""
    return f" (paths in {file} are relative to its folder; from there {here} is {os.path.relpath(here, folder)})"


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while torch and transformers are imported: their objects stay, so collections would
    find nothing and take a fifth of the time. After the first import of torch its half million objects are frozen, so
    that later collections do not visit them."""
    first = "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
        gc.enable()


def add_key(parser: argparse.ArgumentParser) -> None:
    """Add ``--key-file``, the key of encrypted files."""
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help=f"key of encrypted or sealed files (default: ${encryption.FILE} or ${encryption.VALUE})",
    )


def key_option(args: argparse.Namespace) -> str:
    """Return the ``--key-file`` of this command as the end of an advised one; "" if the key came otherwise."""
    file = getattr(args, "key_file", None)
    return "" if file is None else f" --key-file {shlex.quote(str(file))}"


def use_key(args: argparse.Namespace) -> None:
    """Store the path of the key in the environment, which ranks and workers inherit. It overrides an existing value."""
    if getattr(args, "key_file", None) is not None:
        os.environ.pop(encryption.VALUE, None)
        os.environ[encryption.FILE] = os.path.abspath(args.key_file)
    if hasattr(args, "key_file") and os.environ.get(encryption.FILE):
        buffer_key_file()


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which prints the same result as JSON."""
    parser.add_argument("--json", action="store_true", help="print only JSON on stdout")


def positive(text: str) -> int:
    """Argparse type: an integer of at least 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """Argparse type: an integer of at least 0."""
    return _whole(text, 0)


def share(text: str) -> float:
    """Argparse type: a number above 0 and below 10."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 10:
        raise argparse.ArgumentTypeError(f"expected a share above 0, such as 0.02, found {describe_value(text)}")
    return value


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < least:
        bound = "below a billion" if text.isdecimal() and len(text) > 9 else f"of at least {least}"
        raise argparse.ArgumentTypeError(f"expected a whole number {bound}, found {describe_value(text)}")
    return int(text)


def _names(literal: object) -> tuple[str, ...]:
    import typing

    return typing.get_args(literal)
