"""Reading a plan file as far as its form goes: what is JSON, and holds what a plan holds.

People edit ``layers``, whose lines are read in :mod:`octavo.fp8.planning.file`; all else is checked here, so that a
file that was damaged or cut together is told as such, with the key, and not by whatever stumbles over it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.fp8.policy.policy import ACTIVATIONS, WEIGHT_CODES, PlanError

__all__ = ["FORMAT", "read"]

FORMAT = 1


def read(path: Path) -> tuple[dict[str, Any], str]:
    """(what the file holds, its text). Raises PlanError for a file that cannot be read or is no plan."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"The plan {path} cannot be read: {error.strerror}. Name a file that octavo plan --save wrote."
        ) from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is no text ({error}). Name a file that octavo plan --save wrote.") from error
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{path}, line {error.lineno}, column {error.colno}: {error.msg}. JSON wants a comma between two entries, "
            "none after the last one, and double quotes."
        ) from error
    except (RecursionError, ValueError) as error:  # brackets without end, numbers of thousands of digits
        raise PlanError(f"{path} is no plan ({error}). Name a file that octavo plan --save wrote.") from None
    if not isinstance(found, dict) or "octavo_plan" not in found:
        old = isinstance(found, dict) and {"rows", "policy"} <= found.keys()
        what = "is the plan.json of an older run, which only tells its plan" if old else "is no plan"
        raise PlanError(f"{path} {what} (octavo_plan is missing). Write one with octavo plan FILE --save.")
    if found["octavo_plan"] != FORMAT or isinstance(found["octavo_plan"], bool):
        raise PlanError(
            f"{path} is no plan of this version of Octavo (octavo_plan is {_short(found['octavo_plan'])}, this one "
            f"reads {FORMAT}). Write one with octavo plan FILE --save."
        )
    for key, (fits, wanted) in _KEYS.items():
        if not fits(found.get(key)):
            there = f"it is {_short(found[key])}" if key in found else "it is missing"
            raise PlanError(
                f"{path} has no usable {key!r}: {there}, where {wanted} belongs. Edit layers alone, or save the plan "
                "again."
            )
    if not found["layers"]:
        raise PlanError(f"{path} has no line in layers, so nothing would run in FP8. Use fp8.recipe: off for that.")
    return found, text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) and v for v in value)


def _optional_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _machine(value: Any) -> bool:
    kinds: dict[str, Callable[[Any], bool]] = {
        "gpu": lambda v: isinstance(v, str) and bool(v),
        "capability": lambda v: v is None or (isinstance(v, str) and re.fullmatch(r"\d+\.\d+", v) is not None),
        "driver": _optional_text,
        "torch": lambda v: isinstance(v, str),
        "cuda": _optional_text,
        "backends": lambda v: isinstance(v, dict) and all(isinstance(version, str) for version in v.values()),
    }
    return (
        isinstance(value, dict)
        and "gpu" in value
        and value.keys() <= kinds.keys()
        and all(kinds[key](entry) for key, entry in value.items())
        and not (value["gpu"] == "cpu" and value.get("capability") is not None)
    )


def _layer(value: Any) -> bool:
    kinds: dict[str, Callable[[Any], bool]] = {
        "name": lambda v: isinstance(v, str),
        "kind": lambda v: isinstance(v, str),
        "shape": lambda v: isinstance(v, list) and len(v) == 2 and all(map(_count, v)),
        "layers": lambda v: _count(v, 1),
        "experts": lambda v: v is None or _count(v, 1),
    }
    needed = kinds.keys() - {"experts"}
    return (
        isinstance(value, dict)
        and needed <= value.keys() <= kinds.keys()
        and all(kinds[key](entry) for key, entry in value.items())
    )


#: key -> (whether a value, None for an absent one, fits; what belongs there)
_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "machine": (_machine, "a GPU with its capability such as 9.0 (none for cpu) and versions"),
    "model": (lambda v: isinstance(v, list) and all(map(_layer, v)), "a list of layers with name, kind, shape, layers"),
    "components": (
        lambda v: v is None or (isinstance(v, dict) and all(map(_texts, v.values()))),
        "a list of globs for each component, or null",
    ),
    "tokens": (
        lambda v: v is None or (isinstance(v, dict) and all(map(_count, v.values()))),
        "a whole number for each component, or null",
    ),
    "micro_steps": (lambda v: _count(v, 1), "a whole number of at least 1"),
    "activations": (
        lambda v: v is None or (isinstance(v, dict) and all(word in ACTIVATIONS for word in v.values())),
        "bf16 or fp8 for the whole model (an empty name) and for components",
    ),
    "param": (
        lambda v: v is None or (isinstance(v, dict) and all(isinstance(on, bool) for on in v.values())),
        "true or false for the whole model (an empty name) and for components",
    ),
    "weight_codes": (lambda v: v is None or v in WEIGHT_CODES, "keep or recast"),
    "fuse_blocks": (lambda v: v is None or isinstance(v, bool), "true or false"),
    "sisters": (lambda v: v is None or isinstance(v, list), "a list of lines"),
    "layers": (lambda v: isinstance(v, list), "a list of lines"),
}
