"""Messages for errors in keys and values: the value found, the nearest name, the fix.

Messages for errors in YAML are in :mod:`octavo.config.yaml.document`, for combinations of settings in the rules.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from octavo.base.recipe_specs import DEFAULT_RECIPE, join_words
from octavo.base.wording import nearest
from octavo.config.config import Config
from octavo.config.sections import foreign_words
from octavo.config.sections.model import AttentionSection, Kernel
from octavo.config.sections.names import FROZEN, RECIPES
from octavo.config.yaml.document import Path, scalar
from octavo.config.yaml.problems import describe_value, dotted


def describe_error(detail: ErrorDetails, path: Path) -> tuple[str, str]:
    """Return (reason, fix) for one of pydantic's errors at ``path``."""
    kind, value, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key", _unknown_key_fix(path)
    if kind == "missing" and not isinstance(value, (list, tuple)):
        return _missing(path)
    if kind == "literal_error":
        options = [str(o) for o in _options(path)]
        if value is False and "off" in options:
            return f"found {describe_value(value)}", "write `off`"
        return f"found {describe_value(value)}", f"{_meant_value(path, value, options)}one of {', '.join(options)}"
    if kind in ("half_character", "string_unicode"):
        return "contains a lone surrogate (U+D800 to U+DFFF)", "replace it by a complete character"
    words = path in (("train", "recompute"), ("model", "load_in_fp8"), ("model", "attention"))
    mapping = "a word or a mapping" if words else "a mapping"
    expected = {
        "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
        "bool_type": "true or false", "string_type": "text", "tuple_type": "a list", "model_type": mapping,
        "dict_type": "a mapping", "finite_number": "a finite number",
    }.get(kind)  # fmt: skip
    if expected == "a whole number" and (instead := _options(path)):
        expected = f"{', '.join(map(str, instead))} or {expected}"
    if expected:
        return f"expected {expected}, found {describe_value(value)}", _type_fix(kind, value, path)
    limits = {"greater_than": ("gt", "above"), "greater_than_equal": ("ge", "at least"),
              "less_than": ("lt", "below"), "less_than_equal": ("le", "at most")}  # fmt: skip
    if kind in limits:
        name, word = limits[kind]
        return f"must be {word} {_limit(context[name])}, found {describe_value(value)}", ""
    if kind in ("too_short", "string_too_short") and isinstance(path[-1], int):  # an item of a list of texts
        return "must not be empty", "write a text, or remove the entry"
    if kind in ("too_short", "string_too_short"):
        return "must not be empty", f"set {path[-1]} ({_field_help(path).rstrip('.')})"
    if kind in ("too_long", "missing"):
        return (
            f"expected {len(_default(path))} values, found {describe_value(value)}",
            f"e.g. {_to_yaml_list(_default(path))}",
        )
    return str(detail["msg"]), ""


def _missing(path: Path) -> tuple[str, str]:
    section = _section(path)
    if section is not None and _is_list(path):
        entry = f"{{{_first_necessary_key(section)}: ...}}"
        return "required, but absent", f"add `{path[-1]}: [{entry}]` under `{dotted(path[:-1])}`"
    if section is not None:
        needed = [name for name, field in section.model_fields.items() if field.is_required()]
        return (
            "required, but absent",
            f"add `{path[-1]}:` with at least {', '.join(needed) or 'steps or epochs'} under it",
        )
    inside = f" under `{dotted(path[:-1])}`" if len(path) > 1 else ""
    return "required, but absent", f"add `{path[-1]}:`{inside} ({_field_help(path).rstrip('.')})"


def _limit(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else str(bound)


def _type_fix(kind: str, value: Any, path: Path) -> str:
    if value is None:
        section = _section(path)
        if section and _is_list(path):
            return f"list its entries under it, each as {{{_first_necessary_key(section)}: ...}}"
        if section and any(field.is_required() for field in section.model_fields.values()):
            return "indent its keys under it"
        if kind == "model_type":
            return "remove the line for the defaults, or indent its keys under it"
        return "remove the line for the default, or write a value"
    quoted = isinstance(value, str) and not isinstance(scalar(value), str)
    if quoted and kind in ("int_type", "float_type", "bool_type"):
        return f"write {value} without quotes"
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind == "bool_type" and str(value).lower() in ("yes", "on", "no", "off", "1", "0"):
        return f"write {'true' if str(value).lower() in ('yes', 'on', '1') else 'false'}"
    if kind == "string_type" and not isinstance(value, (list, dict)):
        return f'put it in quotes: "{str(value).lower() if isinstance(value, bool) else value}"'
    if kind == "tuple_type":
        fixed = _default(path)
        return "write `- ` before it" if isinstance(value, dict) else f"write {_to_yaml_list(fixed or [value])}"
    if kind == "model_type" and isinstance(value, (str, int)):
        return _short_form(path, "off" if value is False else str(value))
    return ""


def _short_form(path: Path, value: str) -> str:
    """Return the fix for a single word where a section is expected, e.g. `foundation: rowwise`."""
    section = _section(path)
    first = next(iter(section.model_fields)) if section else ""
    if section is AttentionSection:
        kernel = nearest(value, get_args(Kernel))
        suggestion = f"did you mean {kernel}? " if kernel else ""
        return f"{suggestion}use one of {', '.join(get_args(Kernel))}, or a mapping such as {{foundation: flash}}"
    close, kind = nearest(value, ("none", "selective", "full")), nearest(value, FROZEN)
    return {
        "foundation": (f"did you mean {kind}? " if kind else "")
        + f"use {join_words(FROZEN, 'or')}, or a mapping such as {{foundation: {DEFAULT_RECIPE}}}",
        "recipe": f"write {{recipe: {value if value in (*RECIPES, 'auto') else DEFAULT_RECIPE}}}",
        "path": f"write {{path: {value}}}",
        "every": "use true, false, or a mapping such as {every: 25}",
        "match": f'write {{match: "{value}", recipe: off}}',
        "image_encoder": (f"did you mean {close}? " if close else "")
        + "use none, selective or full, or a mapping such as {foundation: full}",
    }.get(first, "write `key: value` pairs under it")


def _unknown_key_fix(path: Path) -> str:
    """Return the fix for an unknown key: the name that was probably meant."""
    section, name = _section(path[:-1]), str(path[-1])
    if section is None:
        return ""
    valid = _valid_keys(section)
    inside = _named_section(path)
    if (translated := foreign_words.key_of(inside, name, valid)) is not None:
        return foreign_words.suggest(f"`{translated[0]}`", translated[1])
    if explanation := foreign_words.without_counterpart(name):
        return explanation
    near = foreign_words.near_key(inside, name, valid)
    if near is not None and near[0] in valid:
        return foreign_words.suggest(f"`{near[0]}`", "")
    same_key = [f"`{top}.{name}`" for top in Config.model_fields if name in _fields((top,)) and (top,) != path[:-1]]
    if same_key and (not inside or name not in foreign_words.SEVERAL_MEANINGS):
        return foreign_words.suggest(join_words(tuple(same_key), "or"), "")
    if near is not None:
        return foreign_words.suggest(f"`{near[0]}`", near[1])
    return "valid here: " + ", ".join(valid)


def meant_key(path: Path) -> str | None:
    """Return the key of Octavo, dotted, that an unknown key at ``path`` has in another trainer, or None."""
    section = _section(path[:-1])
    if section is None:
        return None
    translated = foreign_words.key_of(_named_section(path), str(path[-1]), _valid_keys(section))
    return translated[0].partition(":")[0] if translated is not None else None


def is_written_elsewhere(path: Path, meant: Collection[str]) -> bool:
    """Return whether an absent key is among ``meant`` (dotted keys), or, for a section at the top, some of its keys
    are, and all that it requires."""
    if len(path) > 1:
        return dotted(path) in meant
    needed = {f"{path[0]}.{name}" for name, field in _fields(path).items() if field.is_required()}
    return needed <= set(meant) and any(key.startswith(f"{path[0]}.") for key in meant)


def _valid_keys(section: type[BaseModel]) -> list[str]:
    return [*section.model_fields, *(["extends"] if section is Config else [])]


def _named_section(path: Path) -> str:
    return next((str(part) for part in path[:-1]), "")


def _meant_value(path: Path, value: object, options: Sequence[str]) -> str:
    """Return the question whether another value was meant, or nothing."""
    names = tuple(part for part in path if isinstance(part, str))
    meant = foreign_words.value_of(names, value)
    if meant is None and isinstance(value, str):
        meant = foreign_words.near_value(names, value, options)
    # A recipe may exist, and not for this key; a word with a dot is another key.
    return f"{foreign_words.suggest(*meant)} " if meant and (meant[0] in options or "." in meant[0]) else ""


def _fields(path: Path) -> dict[str, Any]:
    section = _section(path)
    return dict(section.model_fields) if section else {}


def _section(path: Path) -> type[BaseModel] | None:
    """Return the type of the section at ``path``, or None if there is none."""
    here: Any = Config
    for part in path:
        if isinstance(part, int):
            continue
        if not (isinstance(here, type) and issubclass(here, BaseModel)) or part not in here.model_fields:
            return None
        here = _inner(here.model_fields[part].annotation)
    return here if isinstance(here, type) and issubclass(here, BaseModel) else None


def _inner(annotation: Any) -> Any:
    """``Component | None`` -> Component; ``tuple[Dataset, ...]`` -> Dataset; Annotated is unwrapped."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _inner(typing.get_args(annotation)[0])
    if origin in (types.UnionType, typing.Union, tuple):
        return _inner(next(a for a in typing.get_args(annotation) if a not in (type(None), ...)))
    return annotation


def _options(path: Path) -> tuple[Any, ...]:
    names = [part for part in path if isinstance(part, str)]
    field = _fields(tuple(names[:-1])).get(names[-1])
    return typing.get_args(_inner(field.annotation)) if field else ()


def _is_list(path: Path) -> bool:
    field = _fields(path[:-1]).get(str(path[-1]))
    return field is not None and typing.get_origin(_without_annotation(field.annotation)) is tuple


def _first_necessary_key(section: type[BaseModel]) -> str:
    """Return the first required key; without one, such as in a stage, the first key."""
    fields = section.model_fields
    return next((name for name, field in fields.items() if field.is_required()), next(iter(fields)))


def _without_annotation(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def _default(path: Path) -> list[Any]:
    """Return the default of a list field; empty if it has none."""
    field = _fields(path[:-1]).get(str(path[-1]))
    return list(field.default) if field and isinstance(field.default, tuple) else []


def _to_yaml_list(values: list[Any]) -> str:
    """Format a list in YAML's flow style."""
    return f"[{', '.join(str(value) for value in values)}]"


def _field_help(path: Path) -> str:
    field = _fields(path[:-1]).get(str(path[-1]))
    return str(field.description or "") if field else ""
