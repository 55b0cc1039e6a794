"""``octavo.run``: train from Python, on a configuration, rows and reward functions of a program."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from datasets import Dataset

    from octavo.config import Config
    from octavo.config.merge import Tree
    from octavo.config.yaml.problems import Problem
    from octavo.train import Callback, RunResult

    Rows: TypeAlias = Sequence[Mapping[str, object]] | Dataset

_LISTS = {"train_data": "train", "eval_data": "eval"}  # argument -> its list in the section `data`


def run(
    config: Config | Mapping[str, object] | str | Path,
    *,
    train_data: Rows | None = None,
    eval_data: Rows | None = None,
    rewards: Sequence[Callable[..., Sequence[float]]] | None = None,
    callbacks: Iterable[Callback] = (),
) -> RunResult:
    """Train, as ``octavo train FILE`` does, and return the result; prints progress, and writes the run directory.

    Rows and functions are not copied to files. In the configuration they have names, which are added where it has none:
    ``data.train: [{path: "python:train_data"}]``, ``data.eval: [{path: "python:eval_data"}]`` and ``rl.rewards:
    ["python:NAME"]``. Write such an entry to give further keys (``format``, ``columns``, ``weight``), or to train on
    files as well. A run that is resumed, or has finished, needs the same rows, by their SHA-256, and
    functions with the same source.

    Under torchrun every rank calls this, with the same arguments.

    Args:
        config: a dict with the keys of the YAML file, the path of a file, or a checked `octavo.config.Config`. Relative
            paths in a dict are relative to the working directory. It is not changed.
        train_data: the rows to train on: a list of rows in any layout that a file may have, or a `datasets.Dataset`.
            Images are PIL images, bytes of files, or paths relative to the working directory.
        eval_data: the held-out rows.
        rewards: functions of phase rl, called as functions of a file are: with ``completions`` and the columns of the
            rows by name, N values each, for N numbers. They run in this process, without ``rl.reward_timeout``. On
            several ranks they must be functions of a module that can be imported.
        callbacks: see `octavo.train.Callback`.

    Returns:
        The directory, status (finished; stopped by SIGTERM, SIGHUP or a callback), steps, final metrics and held-out
        figures of the run.

    Raises ConfigError with all problems of the arguments at once; DataError for rows, whose message names a row by its
    index (``train_data[17]``); RewardError, TrainError and the errors of other packages as ``octavo train`` reports
    them; KeyboardInterrupt after Ctrl-C, when the step is finished and saved.
    """
    # Imported here, so that `import octavo` needs no torch.
    from octavo.config.yaml.problems import ConfigError

    rows_by_name = {
        name: rows for name, rows in (("train_data", train_data), ("eval_data", eval_data)) if rows is not None
    }
    callbacks = callbacks if isinstance(callbacks, str) or not isinstance(callbacks, Iterable) else (*callbacks,)
    cfg = _load(config, rows_by_name, rewards, callbacks)
    if problems := _missing_files(cfg, config, rows_by_name):
        raise ConfigError(problems)

    from octavo import checkpoint, rl
    from octavo.cli import terminal
    from octavo.cli.train import plan_printer, print_result, print_written
    from octavo.config.sections.text_types import python_path
    from octavo.data.storage import python_rows
    from octavo.report.run.live_page import Page
    from octavo.rl.rewards import python_functions

    page, console = Page(), terminal.console(stderr=False)
    is_main = os.environ.get("RANK", "0") == "0"  # under torchrun only rank 0 prints
    names = [python_path(name) for name in rows_by_name]
    with ExitStack() as held:
        held.enter_context(python_rows.hold([*map(python_rows.make_rows, rows_by_name.values(), names)]))
        held.enter_context(python_functions.hold(rewards or ()))
        for path in names:
            python_rows.digest_of(path, console.print if is_main else python_rows.no_log)
        # A run seeds the generators: a caller that draws after each of several runs would get the same numbers.
        held.enter_context(checkpoint.rng.preserve())
        result = rl.run(
            cfg,
            console=console,
            describe_plan=plan_printer(False, page.expect),
            watchers=[page],
            callbacks=callbacks,
        )
    if is_main:
        print_result(result, cfg.train.phase)
        print_written(result)
    if result.signal == signal.SIGINT:  # else Ctrl-C would only end the first of several runs of a program
        raise KeyboardInterrupt
    return result


def _load(
    config: Config | Mapping[str, object] | str | Path,
    rows: Mapping[str, object],
    rewards: object,
    callbacks: object,
) -> Config:
    """Return the checked configuration, with the names of rows and functions. Raises ConfigError with all problems."""
    from octavo.config import Config
    from octavo.config.load import load_tree, plain, read_tree
    from octavo.config.merge import Tree
    from octavo.config.yaml.problems import ConfigError, Place, Problem

    if config is None:  # the command line reads this as a configuration that has only overrides
        reason = "expected a dict or the path of a YAML file, found None"
        raise ConfigError([Problem(Place("the configuration"), "", reason, "pass at least model and data")])
    if isinstance(config, Config):
        tree = Tree("the configuration", value=plain(config))
    else:
        tree = read_tree(config)
    if not tree.broken:  # of an unreadable file nothing is known
        for argument, key in _LISTS.items():
            _name_rows(tree, argument, key, rows.get(argument))
        _name_rewards(tree, rewards)
        _check_callbacks(tree, callbacks)
    return load_tree(tree)


def _name_rows(tree: Tree, argument: str, key: str, rows: object) -> None:
    """Add the name of rows to their list in the tree, or a problem."""
    from octavo.config.sections.text_types import python_path
    from octavo.config.yaml.problems import Place

    section, path = tree.value.get("data"), python_path(argument)
    entries = section.get(key) if isinstance(section, dict) else None
    paths = [entry.get("path") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    place = tree.place(("data", key))
    if rows is None:
        if path in paths:
            tree.problem(place, f"data.{key}", f"names {path}, and {argument} is absent", f"pass {argument}=[...]")
        return

    from octavo.data.storage import python_rows

    if (why := python_rows.check_rows(rows, argument)) is not None:
        tree.problem(Place(argument), "", why)
    train = tree.value.get("train")  # the rows would not be read by a stage with data
    for number, stage in enumerate(train.get("stages") or () if isinstance(train, dict) else ()):
        if isinstance(stage, dict) and isinstance(stage.get("data"), dict) and key in stage["data"]:
            named = f"train.stages.{number}.data.{key}"
            reason = f"names other data, and {argument} is given"
            tree.problem(tree.place(("train", "stages", number)), named, reason, "remove one of them")
    if path in paths:
        return
    if entries:
        reason = f"names other data, and {argument} is given"
        tree.problem(place, f"data.{key}", reason, f'remove one of them, or add {{path: "{path}"}} to the list')
    elif section is None or isinstance(section, dict):
        tree.value["data"] = {**(section or {}), key: [{"path": path}]}
        tree.places["data", key] = Place(argument)


def _name_rewards(tree: Tree, rewards: object) -> None:
    """Add the names of reward functions to `rl.rewards` in the tree, or problems."""
    from octavo.config.sections.text_types import python_name, python_path
    from octavo.config.yaml.problems import Place

    # The tree is not validated yet: its sections may have any type, which is reported later.
    section, train = tree.value.get("rl"), tree.value.get("train")
    entries = section.get("rewards") if isinstance(section, dict) else None
    words = [entry.get("reward") if isinstance(entry, dict) else entry for entry in entries or ()]
    place, named = (
        tree.place(("rl", "rewards")),
        [w for w in words if isinstance(w, str) and python_name(w) is not None],
    )
    paths: list[str] = []
    if rewards is not None:
        from octavo.rl.rewards import python_functions

        for why in python_functions.check_functions(rewards):
            tree.problem(Place("rewards"), "", why)
        functions = filter(callable, rewards if isinstance(rewards, list | tuple) else [rewards])
        # Rewards that cannot be used get a name, too: otherwise rl.rewards would also be reported as absent.
        paths = [python_path(python_functions.name_of(function)) for function in functions] or [python_path("rewards")]
        phase = train.get("phase", "sft") if isinstance(train, dict) else "sft"
        if phase != "rl":
            reason = f"functions as rewards are for phase rl, and train.phase is {phase}"
            tree.problem(Place("rewards"), "", reason, "remove them, or set train.phase to rl")
            return
    for word in named:
        if word not in paths:
            passed = f"rewards has {', '.join(paths)}" if paths else "rewards is absent"
            tree.problem(place, "rl.rewards", f"names {word}, and {passed}", "pass the function as rewards=[...]")
    if words:
        for path in paths:
            if path not in named:
                reason = f"names other rewards, and not {path}, which is in rewards"
                tree.problem(place, "rl.rewards", reason, f'add "{path}" to the list, or remove one of the two')
    elif paths and (section is None or isinstance(section, dict)):
        tree.value["rl"] = {**(section or {}), "rewards": paths}
        tree.places["rl", "rewards"] = Place("rewards")


def _check_callbacks(tree: Tree, callbacks: object) -> None:
    from octavo.config.yaml.problems import Place

    if callbacks == ():  # so that a wrong call is answered without torch
        return
    from octavo.train.callbacks.callback import check_callbacks

    for reason, remedy in check_callbacks(callbacks):
        tree.problem(Place("callbacks"), "", reason, remedy)


def _missing_files(cfg: Config, config: object, rows: Iterable[str]) -> list[Problem]:
    """Return a problem for each path of the configuration that does not exist, and for a tracker that is missing."""
    from octavo.base import environment
    from octavo.cli.arguments import missing_files
    from octavo.config.sections.text_types import python_path
    from octavo.config.yaml.problems import Place, Problem

    file = os.fspath(config) if isinstance(config, str | os.PathLike) else None
    missing = missing_files(cfg, file, [python_path(name) for name in rows])
    if (why := environment.why_no_trackers(cfg.run.trackers)) is not None:
        missing.append(why)
    return [Problem(Place(file or "the configuration"), "", text) for text in missing]
