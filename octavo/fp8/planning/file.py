"""Plan files: save, load and edit plans.

The file is JSON with the policy of each layer. ``layers``, the part to edit, is a list of rules: later lines override
earlier ones, and layers that no line matches stay in high precision::

    {"match": "model.layers.*.mlp.up_proj", "recipe": "blockwise", "format": "e4m3", "backend": "triton", "why": "..."},
    {"match": "model.layers.0.**", "recipe": "off"}

``recipe`` is the name of a recipe or "off"; ``format``, ``fwd``, ``dgrad``, ``wgrad`` are as in a rule; ``steps`` are
the first and the last step of a line, or absent for all steps; ``backend`` is a name, a name for each GEMM, or absent
to let the registry choose; ``why`` and ``ms`` are remarks.

``casts`` has the casts of every recipe when the plan was made (:class:`~octavo.fp8.arithmetic.recipe.CastTable`), and
the words of the lines, edited or not, have these casts: a later version, in which a recipe has other casts, loads the
same plan and notes the difference. In files up to 0.5.0, which have no ``casts``, words have the casts of 0.5.0.

``fuse_blocks`` is ``fuse`` of the policy. ``activations`` (bf16 or fp8) and ``param`` (true or false) have the setting
of the whole model under "" and the settings of components that differ. ``weight_codes`` is keep, recast or both.
``model`` and ``machine`` describe the model and the machine of the plan; :func:`load_plan` rejects other models and
GPUs. Files of 0.4.0 also have ``sisters``, layers that ran as one GEMM; they run separately now, and a note reports
that.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from octavo.base import atomic_write
from octavo.base.recipe_specs import FORMATS, NAMES, join_words
from octavo.base.safe_read import printable
from octavo.fp8.arithmetic.recipe import GEMMS, CastTable, Recipe
from octavo.fp8.measuring.machine import Machine
from octavo.fp8.planning.decide import plan
from octavo.fp8.planning.file_form import FORMAT, Line, make_lines, parse_casts, parse_lines, read_document
from octavo.fp8.planning.plan import Plan, Schedule, Span
from octavo.fp8.policy.decisions import device_of
from octavo.fp8.policy.globs import matches, template
from octavo.fp8.policy.policy import OFF, ComponentPolicy, PlanError, Policy
from octavo.fp8.policy.topology import Row, describe_layers

Document = Mapping[str, Any]
"""The contents of a plan file."""

HELP = (
    "Edit only layers. A line sets the recipe of the layers whose names match; later lines override earlier ones.",
    f"recipe: {join_words((OFF, *NAMES), 'or')}. format: {join_words(FORMATS, 'or')}. fwd, dgrad, wgrad: fp8 or "
    "bf16, or a recipe whose casts the GEMM uses. backend: a name that octavo doctor lists; omit it to choose "
    "automatically. why and ms are remarks.",
    "steps: the first and the last step of a line, as in [1, 100]; omit it for all steps.",
    "match: a glob over dotted names; * matches within a segment, ** matches any number of segments.",
    "casts are the casts of each recipe when this file was saved, and the lines use them, also in later versions.",
    "Use the file with fp8.plan: FILE in a configuration, or with fp8.load_plan(FILE, model).",
)


def document(plan: Plan, now: Plan | None = None, spans: Iterable[Span] = ()) -> dict[str, Any]:
    """Return the contents of a plan file as JSON types. ``now``: also include this plan's own JSON, as in plan.json of
    a run. ``spans`` of a schedule become lines with ``steps``."""
    casts = plan.policy.casts
    timed = [line for s in spans if s.plan is not plan for line in make_lines(s.plan.rows, casts, plan.rows, s[:2])]
    return {
        **({} if now is None else now.to_json()),
        "octavo_plan": FORMAT,
        "help": list(HELP),
        "machine": plan.machine.to_json(),
        "model": _summarize_model(r.row for r in plan.rows),
        "components": None if plan.components is None else {k: list(v) for k, v in plan.components.items()},
        "tokens": None if plan.tokens is None else dict(plan.tokens),
        "micro_steps": plan.micro_steps,
        "fuse_blocks": any(block.fused for block in plan.blocks),
        "activations": _by_component(plan.policy, "activations"),
        "param": _by_component(plan.policy, "param"),
        "weight_codes": plan.policy.weight_codes,
        "casts": casts.to_json(),
        "layers": [*make_lines(plan.rows, casts), *timed],
    }


def _by_component(policy: Policy, setting: str) -> dict[str, Any]:
    """Return a setting of the whole model under the key "", and of the components that differ."""
    default = getattr(policy, setting)
    parts = {name: getattr(part, setting) for name, part in policy.components.items()}
    return {"": default, **{name: value for name, value in parts.items() if value not in (None, default)}}


def save_plan(plan: Plan, path: str | Path, spans: Iterable[Span] = ()) -> Path:
    """Write a plan, with the ``spans`` of its schedule, to a file and return the path. The write is atomic."""
    path = Path(path)
    if not path.name or path.is_dir():
        raise PlanError(
            f"A plan cannot be saved to {str(path)!r}, which is a folder. Give a file name, such as plan.json."
        )
    fields = document(plan, spans=spans)
    lists = {
        key: ",\n".join(f"    {json.dumps(line)}" for line in fields.pop(key)) for key in ("help", "model", "layers")
    }
    parts = {key: f"[\n{text}\n  ]" for key, text in lists.items()}
    entries = ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in fields.pop("casts").items())
    parts["casts"] = f"{{\n{entries}\n  }}"
    parts["layers"] = parts.pop("layers")  # last: the part to edit
    parts = {"help": parts.pop("help"), **{key: json.dumps(value) for key, value in fields.items()}, **parts}
    text = "{\n" + ",\n".join(f'  "{key}": {value}' for key, value in parts.items()) + "\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write.write_text(path, text)
    return path


def load_plan(
    path: str | Path,
    model: nn.Module,
    components: Mapping[str, tuple[str, ...]] | None = None,
    *,
    other_machine: bool = False,
    backend: str = "auto",
) -> Plan:
    """Load a plan for ``model``.

    Args:
        path: a file written by :func:`save_plan`, or the ``plan.json`` of a run.
        model: the model that the plan was made for; it may be on the meta device.
        components: as for :func:`octavo.fp8.plan`. Default: the components in the file.
        other_machine: use the recipes even if the GPU differs, and choose backends again.
        backend: backend of all FP8 GEMMs if backends are chosen again; "auto" lets the registry choose.

    Raises:
        PlanError: the file is not a plan; it was made for a different GPU or model; or a line is invalid or cannot be
            met. The message has the differences, or the line.
    """
    path = Path(path)
    fields, text = read_document(path)
    saved, current = Machine(**fields["machine"]), Machine.detect(device_of(model))
    is_other_gpu = (saved.gpu, saved.capability) != (current.gpu, current.capability)
    if is_other_gpu and not other_machine:
        raise PlanError(
            f"{path} was made for {_describe_gpu(saved)}, but this is {_describe_gpu(current)}, where other recipes "
            "may be faster. Measure on this machine (octavo plan FILE --measure --save), or leave fp8.plan out."
        )
    if components is None and fields.get("components") is not None:
        components = {k: tuple(v) for k, v in fields["components"].items()}
    policy = _read_policy(fields, path, text, other_machine, backend)
    _check_model(path, fields["model"], describe_layers(model, components))
    try:
        planned = plan(model, policy, components, fields.get("tokens"), micro_steps=fields["micro_steps"])
    except PlanError as error:  # errors of lines already contain the path
        raise PlanError(str(error) if path.name in str(error) else f"{path}: {printable(error)}") from error
    rows = [
        replace(r, reason="not in the plan file") if r.reason == "the whole model: off" else r for r in planned.rows
    ]
    changes = [*_notes_on_old_fusion(path.name, fields, planned)]
    words = [policy.casts.words(r.recipe) for r in rows if r.recipe is not None]
    if other_casts := policy.casts.describe_changes(CastTable(), words):
        changes.append(f"{path.name} keeps the casts that it was saved with: {'; '.join(other_casts)}")
    changed = [d for d in saved.differences(current) if not d.startswith(("gpu", "capability"))]
    if is_other_gpu:
        changes.append(
            f"{path.name} was made for {_describe_gpu(saved)}: recipes are kept, and backends are chosen again"
        )
    elif changed and not current.emulated:
        changes.append(
            f"{path.name} was made with different versions; measure again to update it: {'; '.join(changed)}"
        )
    return replace(planned, rows=tuple(rows), notes=(*planned.notes, *changes), changes=tuple(changes))


def changed_casts(saved: Document, path: Path, schedule: Schedule) -> list[str]:
    """Return a phrase for each recipe that a schedule uses with other casts than a saved plan does: a
    :func:`document`, of the file ``path``. Raises PlanError if its casts are damaged."""
    names = {line["recipe"] for line in saved.get("layers", ())}
    recipes = [row.recipe for planned in schedule.plans for row in planned.rows if row.recipe is not None]
    before, now = parse_casts(saved.get("casts"), path), schedule.main.policy.casts
    return before.describe_changes(now, [now.words(r) for r in recipes if r.name in names])


def saved_recipes(saved: object, path: Path) -> list[tuple[Line, Recipe]]:
    """Return the lines in FP8 of a saved plan, as :func:`changed_casts` takes it, with the casts that they have in it.
    Raises PlanError if lines or casts are damaged."""
    if not isinstance(saved, dict) or not isinstance(saved.get("layers", []), list):
        raise PlanError(f"{path} is not a plan. Restore it.")
    table = parse_casts(saved.get("casts"), path)
    pairs = []
    for line in parse_lines(saved.get("layers", []), path, "", backends=False):
        if line.recipe not in (None, OFF):
            fwd, dgrad, wgrad = (getattr(line, gemm) or "fp8" for gemm in GEMMS)
            pairs.append((line, table.recipe(str(line.recipe), line.format, fwd, dgrad, wgrad)))
    return pairs


def read_casts(path: str | Path) -> CastTable:
    """Return the casts of recipe names in a plan file. Raises PlanError if it is not one."""
    fields, _ = read_document(Path(path))
    return parse_casts(fields.get("casts"), Path(path))


def outdated_casts(saved: object, path: Path, now: CastTable | None = None) -> list[str]:
    """Return a phrase for each of :func:`saved_recipes` that has other casts in the table ``now``, by default of this
    version."""
    recipes = [recipe for _, recipe in saved_recipes(saved, path)]
    before = parse_casts(saved.get("casts") if isinstance(saved, dict) else None, path)
    return before.describe_changes(now or CastTable(), map(before.words, recipes))


def _read_policy(fields: Document, path: Path, text: str, other_machine: bool, backend: str) -> Policy:
    """Return the policy of a file; with ``other_machine`` its backends are replaced by ``backend``."""
    activations, param = (dict(fields.get(setting) or {}) for setting in ("activations", "param"))
    return Policy(
        recipe=OFF,
        rules=parse_lines(fields["layers"], path, text, backends=not other_machine),
        fuse="on" if fields.get("fuse_blocks") else OFF,
        weight_codes=fields.get("weight_codes") or "keep",
        backend=backend,
        casts=parse_casts(fields.get("casts"), path),
        activations=activations.pop("", "bf16"),
        param=param.pop("", False),
        components={
            c: ComponentPolicy(activations=activations.get(c), param=param.get(c)) for c in {**activations, **param}
        },
    )


def _notes_on_old_fusion(name: str, fields: Document, plan: Plan) -> Iterator[str]:
    """Yield notes on layers of the plan file ``name`` that version 0.4.0 ran as one GEMM."""
    layers = [row.name.removesuffix(".base_layer").rpartition(".") for row in plan.rows]
    fused: list[str] = []
    for match, names in [(x["match"], x.get("names")) for x in fields.get("sisters") or [] if x["fuse"] == "on"]:
        lasts = {last for holder, _, last in layers if (matches(match, holder) if match else not holder)}
        if lasts.intersection(names.split() if names else lasts):
            fused.append(f"{names or 'siblings'} of {match or 'the model'}")
        else:
            yield f"{name}: {match!r} in sisters, from version 0.4.0, matches no layer of this model and is ignored"
    if fused:
        layers_text = f"{', '.join(fused[:3])}{' and others' if fused[3:] else ''} as one GEMM"
        now = "now each layer runs a separate GEMM on a shared cast"
        yield f"{name} is from version 0.4.0, which ran {layers_text}; {now}"


def _summarize_model(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the linear maps of a model, with one entry per group of repeated layers."""
    counts = Counter((template(r.name), r.kind, r.shape, r.experts) for r in rows)
    return [
        {"name": name, "kind": kind, "shape": list(shape), **({"experts": experts} if experts else {}), "layers": n}
        for (name, kind, shape, experts), n in counts.items()
    ]


def _check_model(path: Path, saved: Sequence[Any], rows: Sequence[Row]) -> None:
    """Raise PlanError if the rows differ from the saved ones."""

    def describe(lines: Sequence[Any]) -> dict[str, str]:
        out: dict[str, list[str]] = {}
        for line in lines:
            experts = f" ({line['experts']} experts)" if line.get("experts") else ""
            shape = " x ".join(map(str, line["shape"]))
            out.setdefault(printable(line["name"]), []).append(
                f"{line['layers']} {printable(line['kind'])} of {shape}{experts}"
            )
        return {name: ", ".join(sorted(kinds)) for name, kinds in out.items()}

    expected, present = describe(saved), describe(_summarize_model(rows))
    differ = [n for n in dict.fromkeys([*expected, *present]) if expected.get(n) != present.get(n)]
    if differ:
        first = "; ".join(
            f"{n}: {expected.get(n, 'nothing')} in the file, {present.get(n, 'nothing')} in the model"
            for n in differ[:5]
        )
        rest = f"; and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise PlanError(
            f"{path} was made for a different model: {first}{rest}. Make a plan for this model (octavo plan FILE "
            "--save)."
        )


def _describe_gpu(machine: Machine) -> str:
    return "a CPU" if machine.emulated else f"{machine.gpu} (compute capability {machine.capability})"
