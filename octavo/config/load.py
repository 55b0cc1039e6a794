"""The three ways to a :class:`Config`: a file, text, another configuration. All take ``key=value`` overrides."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path

from octavo.config.check import to_config
from octavo.config.config import Config, of_whole_model
from octavo.config.merge import Tree, apply_override, read_file, read_string
from octavo.config.sections.names import RecipeName, one_word

_FP8 = tuple(name for name in typing.get_args(RecipeName) if name != "off")


def load_config(path: str | Path | None, overrides: Sequence[str] = (), *, whole: bool = False) -> Config:
    """Reads ``path`` (with what it extends), applies the overrides in order and validates the whole.

    ``path`` None means overrides alone. Relative paths in a file are seen from that file, those in an override from
    the current folder; ``run.dir`` and ``run.resume`` stay as written. ``whole`` asks for FP8 in every component, also
    where the file names some and no ``fp8.recipe``. Raises :class:`ConfigError` with every problem.
    """
    tree = Tree(str(path) if path is not None else "the command line")
    if path is not None:
        read_file(tree, Path(path))
    return _finish(tree, overrides, whole)


def load_config_text(
    text: str, overrides: Sequence[str] = (), *, source: str = "<text>", base: str | Path = "."
) -> Config:
    """As :func:`load_config`, from YAML text; ``base`` is the folder that its relative paths are seen from."""
    tree = Tree(source)
    read_string(tree, text, Path(base))
    return _finish(tree, overrides)


def override(config: Config, overrides: Sequence[str]) -> Config:
    """A copy of ``config`` with overrides applied; everything is checked again."""
    return _finish(Tree("the configuration", value=plain(config)), overrides)


def plain(config: Config) -> dict:
    """The configuration as mappings, lists and scalars. Beside a plan file there is no recipe: it would be ignored, and
    a recipe that somebody writes there is refused."""
    found = config.model_dump(mode="json")
    if config.fp8.plan is not None and config.fp8.recipe == type(config.fp8).model_fields["recipe"].default:
        del found["fp8"]["recipe"]
    return found


def _finish(tree: Tree, overrides: Sequence[str], whole: bool = False) -> Config:
    for text in overrides:
        apply_override(tree, text)
    _let_a_plan_win(tree)
    _let_a_length_win(tree)
    fp8 = tree.value.get("fp8")
    if whole and isinstance(fp8, dict) and fp8.get("plan") is None:
        fp8.setdefault("recipe", of_whole_model(tree.value))
    return to_config(tree)


def _let_a_plan_win(tree: Tree) -> None:
    """`fp8.plan=FILE` over a file that names a recipe takes its place, as later wins; a recipe of the command line
    stands beside the plan and is refused, and so is one in the file that names the plan."""
    fp8 = tree.value.get("fp8")
    if not isinstance(fp8, dict) or not isinstance(fp8.get("plan"), str) or one_word(fp8.get("recipe")) not in _FP8:
        return
    later, earlier = tree.place(("fp8", "plan")).source, tree.place(("fp8", "recipe")).source
    if later in tree.overrides and earlier not in tree.overrides:
        del fp8["recipe"]


def _let_a_length_win(tree: Tree) -> None:
    """`train.steps=N` over a file that says epochs takes their place, as later wins, and the other way round; both in
    one place are refused."""
    train = tree.value.get("train")
    if not isinstance(train, dict) or train.get("steps") is None or train.get("epochs") is None:
        return
    later = {key: tree.place(("train", key)).source in tree.overrides for key in ("steps", "epochs")}
    if later["steps"] != later["epochs"]:
        del train["epochs" if later["steps"] else "steps"]
