"""Validation of plan files: the value of each key, and the lines of ``layers``, which are rules with backends.

Users edit the lines. All other keys are checked too, so that a damaged file is rejected with the name of the key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.base import safe_read
from octavo.base.wording import did_you_mean
from octavo.fp8.arithmetic.errors import short_repr
from octavo.fp8.arithmetic.recipe import GEMMS, RECIPES, CastTable, RecipeError, recipe
from octavo.fp8.planning.rows import PlanRow
from octavo.fp8.policy.globs import matches, template
from octavo.fp8.policy.policy import ACTIVATIONS, AUTO, OFF, WEIGHT_CODES, PlanError, Rule

FORMAT = 1
#: each line is matched with each layer; the largest models have about 1,000 lines, with one line per layer
MAX_LINES = 4096
_RULE = ("match", "recipe", "format", *GEMMS)
_FIELDS = (*_RULE, "steps", "backend", "why", "ms")


def read_document(path: Path) -> tuple[dict[str, Any], str]:
    """Return (contents, text) of a plan file. Raises PlanError if it cannot be read or is not a plan."""
    text = safe_read.read_text(path, PlanError)
    try:
        document = safe_read.parse_json(text, path, PlanError, wanted=None)
    except PlanError as error:
        if not isinstance(error.__cause__, json.JSONDecodeError):
            raise
        cause = error.__cause__
        raise PlanError(
            f"{path}, line {cause.lineno}, column {cause.colno}: {cause.msg}. JSON needs double quotes, commas between "
            "entries, and no comma after the last entry."
        ) from cause
    if not isinstance(document, dict) or "octavo_plan" not in document:
        old = isinstance(document, dict) and {"rows", "policy"} <= document.keys()
        what = "is the plan.json of an older run, which cannot be loaded" if old else "is not a plan"
        raise PlanError(f"{path} {what} (the key octavo_plan is missing). Write one with octavo plan FILE --save.")
    if document["octavo_plan"] != FORMAT or isinstance(document["octavo_plan"], bool):
        raise PlanError(
            f"{path} is not a plan of this version of Octavo: octavo_plan is {short_repr(document['octavo_plan'])}, "
            f"and this version reads {FORMAT}. Write a new plan with octavo plan FILE --save."
        )
    for key, (is_valid, expected) in _KEYS.items():
        if not is_valid(document.get(key)):
            state = f"found {short_repr(document[key])}" if key in document else "it is missing"
            raise PlanError(f"{path}: {key!r} must be {expected}, {state}. Edit only layers, or save the plan again.")
    # Each line is matched with each layer. Without a limit a malicious file could take hours.
    if len(document["layers"]) > MAX_LINES:
        raise PlanError(f"{path} has {len(document['layers']):,} lines in layers; at most {MAX_LINES:,} are allowed.")
    if not document["layers"]:
        raise PlanError(f"{path} has no lines in layers, so nothing would run in FP8. Use fp8.recipe: off instead.")
    return document, text


Check = Callable[[Any], bool]


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _dict_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _mapping_of(needed: Sequence[str], kinds: Mapping[str, Check]) -> Check:
    """Return a check for mappings: keys and their checks are ``kinds``, and ``needed`` keys are required."""

    def is_valid(value: Any) -> bool:
        known = isinstance(value, dict) and set(needed) <= value.keys() <= kinds.keys()
        return known and all(kinds[key](entry) for key, entry in value.items())

    return is_valid


_MACHINE = _mapping_of(
    ["gpu"],
    {
        "gpu": lambda v: _is_text(v) and bool(v),
        "capability": _optional(lambda v: _is_text(v) and re.fullmatch(r"\d+\.\d+", v) is not None),
        "driver": _optional(_is_text),
        "torch": _is_text,
        "cuda": _optional(_is_text),
        "backends": _dict_of(_is_text),
    },
)
_LAYER = _mapping_of(
    ["name", "kind", "shape", "layers"],
    {
        "name": _is_text,
        "kind": _is_text,
        "shape": lambda v: _list_of(_is_count)(v) and len(v) == 2,
        "layers": lambda v: _is_count(v, 1),
        "experts": _optional(lambda v: _is_count(v, 1)),
    },
)
_SISTERS = {  # from version 0.4.0; an empty match is the model itself
    "match": lambda v: v == "" or _is_text(v) and all(s == "**" or s and "**" not in s for s in v.split(".")),
    "fuse": lambda v: v in ("on", OFF),
    "names": _optional(_is_text),
    **dict.fromkeys(("why", "ms"), lambda v: True),
}

#: key -> (check of the value, which is None if the key is absent; description of valid values)
_KEYS: dict[str, tuple[Check, str]] = {
    "machine": (
        lambda v: _MACHINE(v) and not (v["gpu"] == "cpu" and v.get("capability") is not None),
        "a GPU with its capability, such as 9.0 (none for cpu), and versions",
    ),
    "model": (_list_of(_LAYER), "a list of layers with name, kind, shape, layers"),
    "components": (
        _optional(_dict_of(_list_of(lambda v: _is_text(v) and bool(v)))),
        "a list of globs for each component, or null",
    ),
    "tokens": (_optional(_dict_of(_is_count)), "a whole number for each component, or null"),
    "micro_steps": (lambda v: _is_count(v, 1), "a whole number of at least 1"),
    "activations": (
        _optional(_dict_of(lambda v: v in ACTIVATIONS)),
        "bf16 or fp8 by component (an empty name: the model)",
    ),
    "param": (
        _optional(_dict_of(lambda v: isinstance(v, bool))),
        "true or false by component (an empty name: the model)",
    ),
    "weight_codes": (_optional(lambda v: v in WEIGHT_CODES), "keep, recast or both"),
    "fuse_blocks": (_optional(lambda v: isinstance(v, bool)), "true or false"),
    "sisters": (
        _optional(_list_of(_mapping_of(["match", "fuse"], _SISTERS))),
        "a list of lines with match, names and fuse",
    ),
    "layers": (lambda v: isinstance(v, list), "a list of lines"),
}


@dataclass(frozen=True)
class Line(Rule):
    """A rule of a plan file. ``place``: the file and the line or entry; ``why``: remark; ``backends``: of its GEMMs."""

    place: str = ""
    why: str = ""
    backends: tuple[tuple[str, str], ...] = ()

    @property
    def source(self) -> str:
        return self.place.rpartition("/")[2]

    @property
    def title(self) -> str:
        return f"{self.place}: {self.match!r}"


def parse_lines(entries: Sequence[Any], path: Path, text: str, backends: bool) -> tuple[Line, ...]:
    """Return the lines with their line numbers: where the text has their "match" keys. ``backends``: whether
    to use the backends of the lines. Raises PlanError for an invalid line."""
    start = text.find('"layers"')
    places = [text.count("\n", 0, m.start()) + 1 for m in re.finditer(r'"match"\s*:', text) if m.start() > start]
    lines, with_match = [], 0
    for number, item in enumerate(entries, 1):
        place = f"{path}, entry {number} of layers"
        if isinstance(item, dict) and "match" in item:
            if with_match < len(places):
                place = f"{path}, line {places[with_match]}"
            with_match += 1
        try:
            lines.append(_parse_line(item, place, backends))
        except (PlanError, ValueError) as error:
            raise PlanError(f"{place}: {error}") from None
    return tuple(lines)


def _parse_line(item: Any, place: str, backends: bool) -> Line:
    if not isinstance(item, dict) or "match" not in item or "recipe" not in item:
        raise PlanError(f'{item!r} is not a line of a plan; use {{"match": GLOB, "recipe": NAME}}.')
    unknown = [key for key in item if key not in _FIELDS]
    if unknown:
        raise PlanError(f"unknown keys {', '.join(map(repr, unknown))}; valid keys are {', '.join(_FIELDS)}.")
    name, why = item["recipe"], item.get("why") or ""
    if name == AUTO:
        raise PlanError("recipe 'auto' is not allowed in a plan; name a recipe")
    if name not in (OFF, *RECIPES):
        known = (OFF, *RECIPES)
        raise PlanError(f"recipe {name!r} does not exist.{did_you_mean(name, known)} Use one of {', '.join(known)}.")
    if not isinstance(why, str):
        raise PlanError(f"why must be text, got {why!r}.")
    if (inner := re.fullmatch(r"[^()]*, (?:line|entry) \d+[^()]*\((.*)\)", why)) is not None:
        why = inner[1]  # the remark of a plan that was itself loaded from a file
    backend = item.get("backend", AUTO)
    named = dict.fromkeys(GEMMS, backend) if isinstance(backend, str) else backend
    if not isinstance(named, dict) or any(g not in GEMMS or not isinstance(b, str) for g, b in named.items()):
        raise PlanError(f"backend must be a name, or a name for each of {', '.join(GEMMS)}, got {backend!r}.")
    chosen = tuple((gemm, b) for gemm, b in named.items() if backends and b != AUTO)
    steps = item.get("steps")
    if steps is not None and not (isinstance(steps, list) and len(steps) == 2 and all(map(_is_count, steps))):
        raise PlanError(f"steps must be the first and the last step, as in [1, 100], got {steps!r}.")
    settings = {key: item[key] for key in _RULE if key in item}
    line = Line(
        **settings, steps=None if steps is None else (steps[0], steps[1]), place=place, why=why, backends=chosen
    )
    unused = [key for key in ("format", *GEMMS) if name == OFF and getattr(line, key) is not None]
    if unused:
        raise PlanError(f"{', '.join(unused)} has no effect if the recipe is off; remove it or set a recipe")
    if name != OFF:
        recipe(name, line.format, *(getattr(line, g) or "fp8" for g in GEMMS))
    return line


#: Files up to version 0.5.0 have no casts. Every recipe of that version still has the same casts, except this one.
_CASTS_OF_0_5_0 = {
    f"blockwise {form}": {
        "fwd": "e4m3 1x128 pow2 @ e4m3 128x128 pow2",
        "dgrad": f"{dy} 1x128 pow2 @ e4m3 128x128 pow2",
        "wgrad": f"{dy} 128x1 pow2 @ e4m3 128x1 pow2",
    }
    for form, dy in (("e4m3", "e4m3"), ("hybrid", "e5m2"))
}


def parse_casts(table: object, path: Path) -> CastTable:
    """Return the casts of recipe names in a file, ``path``; without a table, the casts of version 0.5.0. Raises
    PlanError for a damaged table."""
    try:
        return CastTable.from_json(_CASTS_OF_0_5_0 if table is None else table)
    except RecipeError as error:
        raise PlanError(
            f"{path}: 'casts' {safe_read.printable(error).removesuffix('.')}. Restore it; without 'casts' recipes have "
            "the casts of version 0.5.0."
        ) from None


def make_lines(
    rows: Sequence[PlanRow], casts: CastTable, main_rows: Sequence[PlanRow] = (), steps: tuple[int, int] | None = None
) -> list[dict[str, Any]]:
    """Return the lines of rows: one for repeated layers if a glob matches exactly these, else one per layer. With
    ``main_rows`` only layers that differ from these rows, as lines for ``steps``. ``casts`` defines the words."""
    listed = [r for r in rows if r.fp8 or r.automatic or r.kind in ("linear", "experts")]
    if main_rows:
        main = {r.name: r for r in main_rows}
        listed = [r for r in rows if (r.recipe, r.selections) != (main[r.name].recipe, main[r.name].selections)]
    span: dict[str, Any] = {} if steps is None else {"steps": list(steps)}
    names = [r.name for r in rows]
    groups: dict[str, dict[str, list[PlanRow]]] = {}
    for row in listed:
        alike = json.dumps({k: v for k, v in _line_fields(row, casts).items() if k not in ("why", "ms")})
        groups.setdefault(template(row.name), {}).setdefault(alike, []).append(row)
    out: list[dict[str, Any]] = []
    for glob, kinds in groups.items():
        members = [row for alike in kinds.values() for row in alike]
        if len(kinds) == 1 and sum(matches(glob, n) for n in names) == len(members):
            out.append({"match": glob, **span, **_line_fields(members[0], casts)})
        else:
            out += [{"match": row.name, **span, **_line_fields(row, casts)} for row in members]
    return out


def _line_fields(row: PlanRow, casts: CastTable) -> dict[str, Any]:
    line: dict[str, Any] = {"recipe": OFF}
    if row.recipe is not None:
        line = {"recipe": row.recipe.name, "format": row.recipe.format}
        line |= {gemm: word for gemm, word in casts.gemm_precisions(row.recipe).items() if word != "fp8"}
        used = {g: s.backend.name for g, s in row.selections.items()}
        line["backend"] = next(iter(used.values())) if len(set(used.values())) == 1 else used
    line["why"] = row.reason
    if row.times is not None:
        line["ms"] = {"bf16": _ms(row.times.high), "fp8": None if row.times.fp8 is None else _ms(row.times.fp8)}
    return line


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")
