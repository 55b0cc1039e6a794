"""The part of a plan file that says which sisters run as one GEMM (see :mod:`octavo.fp8.planning.file`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from octavo.fp8.plan_sisters import families
from octavo.fp8.planning.rows import PlanGroup
from octavo.fp8.policy.globs import compile_glob, matches, nearest, template
from octavo.fp8.policy.policy import OFF, PlanError

__all__ = ["SisterLine", "asked_of", "check_sisters", "read_sisters", "sister_lines", "with_places"]

_FIELDS = ("match", "names", "fuse", "why", "ms")


class SisterLine(NamedTuple):
    """One line of ``sisters``: of which layers of which modules, whether they run as one, where it stands."""

    match: str
    names: tuple[str, ...] | None
    on: bool
    place: str

    def applies(self, layers: tuple[str, ...]) -> bool:
        parent, lasts = _split(layers)
        here = matches(self.match, parent) if self.match and parent else self.match in (parent, "**")
        return here and self.names in (None, lasts)


def with_places(given: Sequence[Any], path: Path, text: str, part: str) -> Iterator[tuple[Any, str]]:
    """The entries of a list of the file with their places; the k-th "match" of it stands in the k-th line that has
    one."""
    start = text.find(f'"{part}"')
    places = [text.count("\n", 0, m.start()) + 1 for m in re.finditer(r'"match"\s*:', text) if m.start() > start]
    with_match = 0
    for number, item in enumerate(given, 1):
        place = f"{path}, entry {number} of {part}"
        if isinstance(item, dict) and "match" in item:
            if with_match < len(places):
                place = f"{path}, line {places[with_match]}"
            with_match += 1
        yield item, place


def sister_lines(groups: Sequence[PlanGroup]) -> list[dict[str, Any]]:
    """One line for groups that differ in their numbers alone, if they share their fate; else one for each."""
    kinds: dict[tuple[str, ...], list[PlanGroup]] = {}
    for group in groups:
        kinds.setdefault(tuple(map(template, group.names)), []).append(group)
    out = []
    for found in kinds.values():
        if len({g.fused for g in found}) == 1:
            out.append(_line_of(found[0], template(_split(found[0].names)[0])))
        else:
            out += [_line_of(g, _split(g.names)[0]) for g in found]
    return out


def read_sisters(given: Sequence[Any], path: Path, text: str, model: nn.Module) -> list[SisterLine]:
    """The lines with their places. Raises PlanError for one that cannot be read or that names nothing."""
    lines = [_read(item, place) for item, place in with_places(given, path, text, "sisters")]
    here = families(model)
    for line in lines:
        if not any(line.applies(layers) for layers in here):
            close = nearest(line.match, [_split(layers)[0] for layers in here])
            hint = f"; the nearest modules that hold some are {', '.join(close)}" if close else ""
            raise PlanError(
                f"{line.place}: {line.match!r} names no module of this model that holds "
                f"{' '.join(line.names) if line.names else 'q_proj k_proj v_proj or gate_proj up_proj'}{hint}."
            )
    return lines


def asked_of(lines: Sequence[SisterLine], layers: tuple[str, ...]) -> tuple[bool, str]:
    """Whether these layers are to run as one, and the line that says so."""
    line = next((x for x in reversed(lines) if x.applies(layers)), None)
    if line is None:
        return False, "not in the plan file"
    where = line.place.rpartition("/")[2]
    return line.on, where if line.on else f"{where}: off"


def check_sisters(lines: Sequence[SisterLine], groups: Sequence[PlanGroup]) -> None:
    """Where a line asks for one GEMM, some of the layers that it decides must be able to."""
    for i, line in enumerate(lines):
        later = lines[i + 1 :]
        found = [g for g in groups if line.applies(g.names) and not any(x.applies(g.names) for x in later)]
        if line.on and found and not any(g.fused for g in found):
            raise PlanError(
                f"{line.place}: {' and '.join(found[0].names)} cannot run as one GEMM: {found[0].reason}. Set fuse to "
                "off, or change what these layers run in."
            )


def _read(item: Any, place: str) -> SisterLine:
    if not isinstance(item, dict) or "match" not in item or item.get("fuse") not in ("on", OFF):
        raise PlanError(
            f'{place}: {item!r} is no line of sisters; write {{"match": a glob over modules, "fuse": "on" or "off"}}.'
        )
    unknown = [key for key in item if key not in _FIELDS]
    if unknown:
        raise PlanError(f"{place}: unknown {', '.join(map(repr, unknown))}; a line has {', '.join(_FIELDS)}.")
    names = item.get("names")
    if not isinstance(item["match"], str) or not isinstance(names, str | None):
        raise PlanError(f"{place}: match is a glob over names of modules, names are names with spaces between them.")
    try:
        if item["match"]:
            compile_glob(item["match"])
    except ValueError as error:
        raise PlanError(f"{place}: {error}.") from None
    return SisterLine(item["match"], None if names is None else tuple(names.split()), item["fuse"] == "on", place)


def _line_of(group: PlanGroup, match: str) -> dict[str, Any]:
    line: dict[str, Any] = {
        "match": match,
        "names": " ".join(_split(group.names)[1]),
        "fuse": "on" if group.fused else OFF,
        "why": group.reason,
    }
    if group.choice is not None:
        found = group.choice
        times = {"bf16": found.high, "alone": found.alone, "apart": found.apart, "joined": found.joined}
        line["ms"] = {name: None if t is None else float(f"{1e3 * t:.4g}") for name, t in times.items()}
    return line


def _split(layers: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """(module that holds them, their names in it), an adapter's ``base_layer`` left out."""
    layers = tuple(name.removesuffix(".base_layer") for name in layers)
    return layers[0].rpartition(".")[0], tuple(name.rpartition(".")[2] for name in layers)
