"""A plan as a file: saved, read by people, edited, used again.

The file is JSON. ``layers`` is the part to edit: a list of lines, each a glob over layer names (``match``) and what
these layers run in; a later line wins over an earlier one, and what no line names stays in high precision::

    {"match": "model.layers.*.mlp.up_proj", "recipe": "blockwise", "format": "e4m3", "backend": "triton", "why": "..."},
    {"match": "model.layers.0.**", "recipe": "off"}

``recipe`` is a recipe's name or "off"; ``format``, ``fwd``, ``dgrad``, ``wgrad`` are those of a rule; ``backend`` is a
name, or one for each GEMM, or absent for the registry's choice; ``why`` and ``ms`` are remarks.

``activations`` holds what blocks keep for backward, bf16 or fp8, of the whole model ("") and of components that differ;
``param`` likewise whether weights are FP8 between steps; ``weight_codes`` is keep or recast. ``model`` and ``machine``
say what the plan was made for; :func:`load_plan` refuses another model and another GPU. Files of version 0.4.0 have
``sisters`` as well, which says what ran as one GEMM: those layers are separate now, and a note of the plan says so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from octavo import atomic
from octavo.fp8.arithmetic.recipe import GEMMS, RECIPES, recipe
from octavo.fp8.dense.gemms import backends_for
from octavo.fp8.kernels.registry import BackendError
from octavo.fp8.measuring.machine import Machine
from octavo.fp8.planning.decide import plan
from octavo.fp8.planning.file_schema import FORMAT, read
from octavo.fp8.planning.modules import blocks_of, saving_of, sentences
from octavo.fp8.planning.plan import Plan
from octavo.fp8.planning.rows import PlanRow
from octavo.fp8.policy.decisions import applies, decisions, device_of
from octavo.fp8.policy.globs import matches, nearest, template
from octavo.fp8.policy.policy import AUTO, OFF, ComponentPolicy, PlanError, Policy, Rule
from octavo.fp8.policy.topology import Row

__all__ = ["document", "load_plan", "save_plan"]

_FIELDS = ("match", "recipe", "format", *GEMMS, "backend", "why", "ms")
HELP = (
    "Edit layers alone. A line says what the layers whose names match run in; a later line wins over an earlier one.",
    "recipe: off, tensorwise, rowwise, blockwise, mxfp8 or delayed. format: e4m3 or hybrid. fwd, dgrad, wgrad: fp8 or "
    "bf16. backend: a name that octavo doctor lists, or leave it out. why and ms are remarks.",
    "match: a glob over dotted names; * stays within a segment, ** spans any number of them.",
    "Use it with fp8.plan: FILE in a configuration, or fp8.load_plan(FILE, model).",
)


def document(plan: Plan) -> dict[str, Any]:
    """What a plan file holds, as JSON types."""
    return {
        "octavo_plan": FORMAT,
        "help": list(HELP),
        "machine": plan.machine.to_json(),
        "model": _summary(r.row for r in plan.rows),
        "components": None if plan.components is None else {k: list(v) for k, v in plan.components.items()},
        "tokens": None if plan.tokens is None else dict(plan.tokens),
        "micro_steps": plan.micro_steps,
        "fuse_blocks": any(block.fused for block in plan.blocks),
        "activations": _by_component(plan.policy, "activations"),
        "param": _by_component(plan.policy, "param"),
        "weight_codes": plan.policy.weight_codes,
        "layers": _lines(plan),
    }


def _by_component(policy: Policy, setting: str) -> dict[str, Any]:
    """A setting of the whole model, under an empty name, and of the components that differ."""
    whole = getattr(policy, setting)
    own = {name: getattr(part, setting) for name, part in policy.components.items()}
    return {"": whole, **{name: value for name, value in own.items() if value not in (None, whole)}}


def save_plan(plan: Plan, path: str | Path) -> Path:
    """Write a plan to a file, one line for each line of layers; written aside and renamed."""
    path, found = Path(path), document(plan)
    layers, model = found.pop("layers"), found.pop("model")
    head = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in found.items() if key != "help"]
    helps = ",\n".join(f"    {json.dumps(line)}" for line in found["help"])
    shapes = ",\n".join(f"    {json.dumps(line)}" for line in model)
    lines = ",\n".join(f"    {json.dumps(line)}" for line in layers)
    text = "\n".join(
        [
            "{",
            f'  "help": [\n{helps}\n  ],',
            *head,
            f'  "model": [\n{shapes}\n  ],',
            f'  "layers": [\n{lines}\n  ]',
            "}",
        ]
    )
    if not path.name or path.is_dir():
        raise PlanError(f"A plan cannot be saved to {str(path)!r}: that is a folder. Name a file, such as plan.json.")
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, text + "\n")
    return path


def load_plan(
    path: str | Path,
    model: nn.Module,
    components: Mapping[str, tuple[str, ...]] | None = None,
    *,
    other_machine: bool = False,
) -> Plan:
    """The plan of a file, for ``model``.

    Args:
        path: a file of :func:`save_plan`, or the ``plan.json`` of a run.
        model: the model that it was made for, real or on the meta device.
        components: as for :func:`octavo.fp8.planning.decide`; None: those in the file.
        other_machine: take the recipes though the GPU is another one, and let the registry choose backends anew.

    Raises:
        PlanError: a file that is no plan; one for another GPU or another model, with the differences; a line that
            cannot be read or met, with its place.
    """
    path = Path(path)
    found, text = read(path)
    made, here = Machine(**found["machine"]), Machine.here(device_of(model))
    if (made.gpu, made.capability) != (here.gpu, here.capability) and not other_machine:
        raise PlanError(
            f"{path} was made for {_gpu(made)}, and this is {_gpu(here)}: what is fast there need not be fast here. "
            "Measure on this machine (octavo plan FILE --measure --save), or leave fp8.plan out."
        )
    if components is None and found.get("components") is not None:
        components = {k: tuple(v) for k, v in found["components"].items()}
    lines = _parsed(found["layers"], path, text)
    off = Policy(recipe=OFF)
    _check_model(path, found["model"], [row for row, _, _ in decisions(model, off, components)])
    kept, param = (dict(found.get(setting) or {}) for setting in ("activations", "param"))
    whole = {"activations": kept.pop("", "bf16"), "param": param.pop("", False)}
    policy = Policy(
        recipe=OFF,
        rules=tuple(line.rule for line in lines),
        fuse=OFF,
        weight_codes=found.get("weight_codes") or "keep",
        components={c: ComponentPolicy(activations=kept.get(c), param=param.get(c)) for c in {**kept, **param}},
        **whole,
    )
    _check_lines(lines, model, components)
    made_plan = plan(model, policy, components, found.get("tokens"), micro_steps=found["micro_steps"])
    rows = tuple(_with_backend(row, lines, model, other_machine) for row in made_plan.rows)
    blocks = blocks_of(model, rows, bool(found.get("fuse_blocks")), saving_of(policy, components), components)
    elsewhere = (made.gpu, made.capability) != (here.gpu, here.capability)
    told = [note for note in made_plan.notes if note not in sentences(made_plan.blocks)]
    notes = [*told, *sentences(blocks), *_separate(path, found.get("sisters") or [])]
    changed = [d for d in made.differences(here) if not d.startswith(("gpu", "capability"))]
    if elsewhere:
        notes.append(f"{path.name} was made for {_gpu(made)}: its recipes are kept, backends are chosen anew")
    elif changed and not here.emulated:
        notes.append(f"{path.name} was made with other versions, measure again to be sure: {'; '.join(changed)}")
    return replace(made_plan, rows=rows, notes=tuple(notes), blocks=blocks)


def _separate(path: Path, sisters: Sequence[Any]) -> Iterator[str]:
    """What version 0.4.0 let run as one GEMM."""
    ones = [x for x in sisters if isinstance(x, dict) and x.get("fuse") == "on"]
    if ones:
        what = ", ".join(f"{x.get('names') or 'siblings'} of {x.get('match') or 'the model'}" for x in ones[:3])
        yield (
            f"{path.name} is of version 0.4.0, which ran {what}{' and others' if len(ones) > 3 else ''} as one GEMM: "
            "each layer runs its own now, on one cast of their input"
        )


@dataclass(frozen=True)
class _Line:
    """One line of ``layers``: its rule, its backends by GEMM ("auto": the registry's choice), where it stands."""

    rule: Rule
    backends: Mapping[str, str]
    place: str
    why: str = ""

    def reason(self, word: str = "") -> str:
        """Where the line stands, and its remark."""
        return self.place.rpartition("/")[2] + word + (f" ({self.why})" if self.why else "")


def _parsed(given: Sequence[Any], path: Path, text: str) -> list[_Line]:
    """The lines with their places; the k-th "match" of them stands in the k-th line that has one."""
    start = text.find('"layers"')
    places = [text.count("\n", 0, m.start()) + 1 for m in re.finditer(r'"match"\s*:', text) if m.start() > start]
    lines, with_match = [], 0
    for number, item in enumerate(given, 1):
        place = f"{path}, entry {number} of layers"
        if isinstance(item, dict) and "match" in item:
            if with_match < len(places):
                place = f"{path}, line {places[with_match]}"
            with_match += 1
        lines.append(_line(item, place))
    return lines


def _line(item: Any, place: str) -> _Line:
    if not isinstance(item, dict) or "match" not in item or "recipe" not in item:
        raise PlanError(f'{place}: {item!r} is no line of a plan; write {{"match": a glob, "recipe": a name}}.')
    unknown = [key for key in item if key not in _FIELDS]
    if unknown:
        raise PlanError(f"{place}: unknown {', '.join(map(repr, unknown))}; a line has {', '.join(_FIELDS)}.")
    words = {key: item[key] for key in ("match", "recipe", "format", *GEMMS) if key in item}
    if words["recipe"] not in (OFF, AUTO, *RECIPES):
        close = get_close_matches(str(words["recipe"]), (OFF, *RECIPES), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ";"
        there = ", ".join((OFF, *RECIPES))
        raise PlanError(f"{place}: recipe {words['recipe']!r} does not exist{hint} a plan names one of {there}.")
    try:
        rule = Rule(**words)
        Policy(recipe=OFF, rules=(rule,))
        if rule.recipe == AUTO:
            raise PlanError("a plan names recipes; 'auto' is what makes one")
        idle = [key for key in ("format", *GEMMS) if rule.recipe == OFF and getattr(rule, key) is not None]
        if idle:
            raise PlanError(f"{', '.join(idle)} has no effect where the recipe is off; remove it or set a recipe")
        if rule.recipe != OFF:
            recipe(str(rule.recipe), rule.format, *(getattr(rule, g) or "fp8" for g in GEMMS))
    except (PlanError, ValueError) as error:
        raise PlanError(f"{place}: {error}") from None
    backend = item.get("backend", "auto")
    named = dict.fromkeys(GEMMS, backend) if isinstance(backend, str) else backend
    if not isinstance(named, dict) or any(g not in GEMMS or not isinstance(b, str) for g, b in named.items()):
        raise PlanError(f"{place}: backend is a name, or a name for each of {', '.join(GEMMS)}; found {backend!r}.")
    why = item.get("why") or ""
    if not isinstance(why, str):
        raise PlanError(f"{place}: why is a remark in words; found {why!r}.")
    if (inner := re.fullmatch(r"[^()]*, (?:line|entry) \d+[^()]*\((.*)\)", why)) is not None:
        why = inner[1]  # the remark of a plan that came from a file itself
    return _Line(rule, named, place, why)


def _check_lines(lines: Iterable[_Line], model: nn.Module, components: Mapping[str, tuple[str, ...]] | None) -> None:
    """Every line names something, and where it asks for FP8, something that can run in it."""
    asked = decisions(model, Policy(recipe=OFF), components)
    for line in lines:
        found = [(row, obstacle) for row, _, obstacle in asked if applies(line.rule, row)]
        if not found:
            close = nearest(line.rule.match, [row.name for row, _, _ in asked])
            hint = f"; the nearest names are {', '.join(close)}" if close else ""
            raise PlanError(f"{line.place}: {line.rule.match!r} matches no linear layer of this model{hint}.")
        if line.rule.recipe != OFF:
            for row, obstacle in found:
                if obstacle is not None and (len(found) == 1 or all(o is not None for _, o in found)):
                    raise PlanError(
                        f"{line.place}: {line.rule.recipe} was asked for {row.name}, which cannot run in FP8: "
                        f"{obstacle}. Take the line out, or set its recipe to off."
                    )


def _with_backend(row: PlanRow, lines: Sequence[_Line], model: nn.Module, other_machine: bool) -> PlanRow:
    """The row with the backends of its line, and its line as the reason."""
    line = next((x for x in reversed(lines) if applies(x.rule, row.row)), None)
    if line is None:
        stays = row.reason if row.reason != "the whole model: off" else "not in the plan file"
        return replace(row, reason=stays)
    if row.recipe is None:
        return replace(row, reason=line.reason(": off") if row.reason.startswith("rule ") else row.reason)
    picked = dict(row.selections)
    if not other_machine:
        for gemm in picked:
            name = line.backends.get(gemm, "auto")
            if name == "auto":
                continue
            try:
                shape = (None, *row.shape)
                picked |= backends_for(row.recipe, device_of(model), shape, name, row.kind, (gemm,))
            except BackendError as error:
                raise PlanError(f"{line.place}: {error}") from error
    return replace(row, reason=line.reason(), selections=picked)


def _lines(plan: Plan) -> list[dict[str, Any]]:
    """One line for layers that differ in their numbers alone, if a glob names exactly them; else one for each."""
    able = [r for r in plan.rows if r.fp8 or r.decided or r.kind in ("linear", "experts")]
    names = [r.name for r in plan.rows]
    groups: dict[str, dict[str, list[PlanRow]]] = {}
    for row in able:
        said = json.dumps({k: v for k, v in _line_of(row).items() if k not in ("why", "ms")})
        groups.setdefault(template(row.name), {}).setdefault(said, []).append(row)
    out: list[dict[str, Any]] = []
    for glob, fates in groups.items():
        rows = [r for found in fates.values() for r in found]
        if len(fates) == 1 and sum(matches(glob, n) for n in names) == len(rows):
            out.append({"match": glob, **_line_of(rows[0])})
        else:
            out += [{"match": r.name, **_line_of(r)} for r in rows]
    return out


def _line_of(row: PlanRow) -> dict[str, Any]:
    line: dict[str, Any] = {"recipe": OFF}
    if row.recipe is not None:
        line = {"recipe": row.recipe.name, "format": row.recipe.format}
        line |= {g: "bf16" for g in GEMMS if row.recipe.gemm(g) is None}
        used = {g: s.backend.name for g, s in row.selections.items()}
        line["backend"] = next(iter(used.values())) if len(set(used.values())) == 1 else used
    line["why"] = row.reason
    if row.times is not None:
        line["ms"] = {"bf16": _ms(row.times.high), "fp8": None if row.times.fp8 is None else _ms(row.times.fp8)}
    return line


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")


def _summary(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The linear maps of a model, those that differ in numbers alone counted together."""
    counts = Counter((template(r.name), r.kind, r.shape, r.experts) for r in rows)
    return [
        {"name": name, "kind": kind, "shape": list(shape), **({"experts": experts} if experts else {}), "layers": n}
        for (name, kind, shape, experts), n in counts.items()
    ]


def _check_model(path: Path, saved: Sequence[Any], rows: Sequence[Row]) -> None:
    def told(lines: Sequence[Any]) -> dict[str, str]:
        out: dict[str, list[str]] = {}
        for line in lines:
            experts = f" ({line['experts']} experts)" if line.get("experts") else ""
            shape = " x ".join(map(str, line["shape"]))
            out.setdefault(line["name"], []).append(f"{line['layers']} {line['kind']} of {shape}{experts}")
        return {name: ", ".join(sorted(found)) for name, found in out.items()}

    was, now = told(saved), told(_summary(rows))
    differ = [n for n in dict.fromkeys([*was, *now]) if was.get(n) != now.get(n)]
    if differ:
        shown = "; ".join(f"{n}: {was.get(n, 'nothing')} there, {now.get(n, 'nothing')} here" for n in differ[:5])
        more = f"; and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise PlanError(f"{path} was made for another model: {shown}{more}. Plan this model (octavo plan FILE --save).")


def _gpu(machine: Machine) -> str:
    return "a CPU" if machine.emulated else f"{machine.gpu} (compute capability {machine.capability})"
