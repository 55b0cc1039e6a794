"""The ways to load a :class:`Config`: a file, a mapping of Python, text, another configuration; all with ``key=value``
overrides."""

from __future__ import annotations

import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

from octavo.config import stages
from octavo.config.check import to_config
from octavo.config.config import PRESETS, Config, missing_settings, whole_model_recipe, with_recipes
from octavo.config.merge import Tree, apply_override, display_path, read_file, read_mapping, read_string
from octavo.config.sections.names import RecipeName, canonical_name
from octavo.config.yaml.problems import ConfigError, Place, Problem, describe_value, dotted

_FP8 = tuple(name for name in typing.get_args(RecipeName) if name != "off")


def load_config(
    source: str | Path | Mapping[str, object] | None, overrides: Sequence[str] = (), *, whole: bool = False
) -> Config:
    """Read ``source``, a file (with the files that it extends) or a mapping with the same keys, apply the overrides in
    order, and validate the result.

    ``source`` None: only overrides. Relative paths in a file are relative to that file; those in a mapping or an
    override to the working directory; ``run.dir`` and ``run.resume`` stay as written. A mapping is copied, and may hold
    paths (`pathlib.Path`), scalars of numpy, and ``extends``. ``whole`` requests FP8 in every component, even if the
    configuration names some and no ``fp8.recipe``. Raises :class:`ConfigError` with every problem.
    """
    return load_tree(read_tree(source), overrides, whole)


def read_tree(source: str | Path | Mapping[str, object] | None) -> Tree:
    """Return the merged values of a file or a mapping, with every problem of reading them. Raises ConfigError if
    ``source`` is neither."""
    if source is None:
        return Tree("the command line")
    if isinstance(source, Mapping):
        tree = Tree("the configuration")
        read_mapping(tree, source)
        return tree
    if not isinstance(source, str | os.PathLike):
        reason = f"expected a path or a mapping, found {describe_value(source)} ({type(source).__name__})"
        raise ConfigError([Problem(Place("the configuration"), "", reason, "pass a dict, or the path of a YAML file")])
    tree = Tree(str(source))
    read_file(tree, Path(source))
    return tree


def load_config_text(
    text: str, overrides: Sequence[str] = (), *, source: str = "<text>", base: str | Path = "."
) -> Config:
    """Like :func:`load_config`, from YAML text; ``base`` is the folder of its relative paths."""
    tree = Tree(source)
    read_string(tree, text, Path(base))
    return load_tree(tree, overrides)


def override(config: Config, overrides: Sequence[str]) -> Config:
    """Return a copy of ``config`` with overrides applied; everything is checked again."""
    return load_tree(Tree("the configuration", value=plain(config)), overrides)


def plain(config: Config) -> dict:
    """Return the configuration as mappings, lists and scalars. With a plan file the default recipe is omitted: an
    explicit recipe with a plan is refused."""
    values = config.model_dump(mode="json")
    if config.fp8.plan is not None and config.fp8.recipe == type(config.fp8).model_fields["recipe"].default:
        del values["fp8"]["recipe"]
    return values


def load_tree(tree: Tree, overrides: Sequence[str] = (), whole: bool = False) -> Config:
    """Apply the overrides to a tree, and validate it. Raises ConfigError with every problem of the tree as well."""
    for text in overrides:
        apply_override(tree, text)
    _resolve_plan_override(tree)
    _resolve_length_override(tree)
    _refuse_override_of_stages(tree)
    fp8 = tree.value.get("fp8")
    if whole and isinstance(fp8, dict) and fp8.get("plan") is None:
        fp8.setdefault("recipe", whole_model_recipe(tree.value))
    _place_preset(tree)
    return to_config(tree)


def _place_preset(tree: Tree) -> None:
    """Let problems of settings that a preset adds name the preset; an override that adds nothing is a problem, as with
    the config.yaml of a run, which sets every key."""
    place, settings = tree.place(("preset",)), missing_settings(with_recipes(tree.value))
    name = tree.value.get("preset")
    if isinstance(name, str) and name in PRESETS and not settings and place.source in tree.overrides:
        keys = ", ".join(f"{section}.{key}" for section, key in PRESETS[name])
        reason = "it changes nothing, because explicit keys win and all of its keys are set"
        tree.problem(place, "preset", reason, f"set them one by one ({keys}), or remove them from the file")
    tree.places |= dict.fromkeys(settings, place)


def _resolve_plan_override(tree: Tree) -> None:
    """Let an override `fp8.plan=FILE` replace a recipe in the file, because later settings win. A recipe on the
    command line, or in the file that names the plan, conflicts with the plan and is refused."""
    fp8 = tree.value.get("fp8")
    if (
        not isinstance(fp8, dict)
        or not isinstance(fp8.get("plan"), str)
        or canonical_name(fp8.get("recipe")) not in _FP8
    ):
        return
    later, earlier = tree.place(("fp8", "plan")).source, tree.place(("fp8", "recipe")).source
    if later in tree.overrides and earlier not in tree.overrides:
        del fp8["recipe"]


def _resolve_length_override(tree: Tree) -> None:
    """Let an override `train.steps=N` replace epochs in the file, because later settings win, and vice versa; both
    in one place are refused."""
    train = tree.value.get("train")
    if not isinstance(train, dict) or train.get("steps") is None or train.get("epochs") is None:
        return
    later = {key: tree.place(("train", key)).source in tree.overrides for key in ("steps", "epochs")}
    if later["steps"] != later["epochs"]:
        del train["epochs" if later["steps"] else "steps"]


def _refuse_override_of_stages(tree: Tree) -> None:
    """Report common settings that were written after the stages and change nothing, because each stage has another
    value: overrides, and keys of a file that extends the one with the stages."""
    train = tree.value.get("train")
    if not isinstance(train, dict) or not train.get("stages"):
        return
    order = [display_path(Path(tree.source)), *tree.overrides]  # every other source is a file that is extended
    of_stages = tree.place(("train", "stages")).source
    earlier = order[: order.index(of_stages) + 1] if of_stages in order else []
    for path in stages.ineffective_settings(tree.value):
        place = tree.place(path)
        if place.source in order and place.source not in earlier:
            key = "freeze" if path[0] == "model" else dotted(path if path[0] == "data" else path[1:])
            reason = "it has no effect, because each stage of train.stages has its own"
            tree.problem(place, dotted(path), reason, f"set train.stages.0.{key}, and so on")
