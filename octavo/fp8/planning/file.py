"""A plan as a file: saved, read by people, edited, used again.

The file is JSON: a policy, laid down layer by layer. ``layers`` is the part to edit, a list of rules; a later line wins
over an earlier one, and what no line names stays in high precision::

    {"match": "model.layers.*.mlp.up_proj", "recipe": "blockwise", "format": "e4m3", "backend": "triton", "why": "..."},
    {"match": "model.layers.0.**", "recipe": "off"}

``recipe`` is a recipe's name or "off"; ``format``, ``fwd``, ``dgrad``, ``wgrad`` are those of a rule; ``steps`` are the
first and the last step in which a line holds, absent for all; ``backend`` is a name, or one for each GEMM, or absent
for the registry's choice; ``why`` and ``ms`` are remarks.

``fuse_blocks`` is the policy's ``fuse``; ``activations`` what blocks keep for backward, bf16 or fp8, of the whole model
("") and of components that differ; ``param`` likewise whether weights are FP8 between steps; ``weight_codes`` is
keep, recast or both. ``model`` and ``machine`` say what the plan was made for; :func:`load_plan` refuses another model
and another GPU. Files of 0.4.0 have ``sisters`` as well: what ran as one GEMM is separate now, and a note says so.
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
from octavo.fp8.measuring.machine import Machine
from octavo.fp8.planning.decide import plan
from octavo.fp8.planning.file_form import FORMAT, make_lines, parse_lines, read_document
from octavo.fp8.planning.plan import Plan, Span
from octavo.fp8.policy.decisions import device_of
from octavo.fp8.policy.globs import matches, template
from octavo.fp8.policy.policy import OFF, ComponentPolicy, PlanError, Policy
from octavo.fp8.policy.topology import Row, describe_layers

HELP = (
    "Edit only layers. A line gives a recipe to the layers whose names match; a later line wins over an earlier one.",
    f"recipe: {join_words((OFF, *NAMES), 'or')}. format: {join_words(FORMATS, 'or')}. fwd, dgrad, wgrad: fp8 or "
    "bf16, or a recipe whose casts the GEMM has. backend: a name that octavo doctor lists, or leave it out. why and ms "
    "are remarks.",
    "steps: the first and the last step in which a line holds, as in [1, 100]; leave it out for all.",
    "match: a glob over dotted names; * stays within a segment, ** spans any number of them.",
    "Use it with fp8.plan: FILE in a configuration, or fp8.load_plan(FILE, model).",
)


def document(plan: Plan, now: Plan | None = None, spans: Iterable[Span] = ()) -> dict[str, Any]:
    """What a plan file holds, as JSON types; ``now``: with all that this plan says, as in a run's plan.json. ``spans``
    of a schedule become lines that hold only in their steps."""
    timed = [line for s in spans if s.plan is not plan for line in make_lines(s.plan.rows, plan.rows, s[:2])]
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
        "layers": [*make_lines(plan.rows), *timed],
    }


def _by_component(policy: Policy, setting: str) -> dict[str, Any]:
    """A setting of the whole model, under an empty name, and of the components that differ."""
    whole = getattr(policy, setting)
    parts = {name: getattr(part, setting) for name, part in policy.components.items()}
    return {"": whole, **{name: value for name, value in parts.items() if value not in (None, whole)}}


def save_plan(plan: Plan, path: str | Path, spans: Iterable[Span] = ()) -> Path:
    """Write a plan to a file, with ``spans`` of its schedule, one line for each line of layers; written aside and
    renamed."""
    path = Path(path)
    if not path.name or path.is_dir():
        raise PlanError(f"A plan cannot be saved to {str(path)!r}: that is a folder. Name a file, such as plan.json.")
    fields = document(plan, spans=spans)
    lists = {
        key: ",\n".join(f"    {json.dumps(line)}" for line in fields.pop(key)) for key in ("help", "model", "layers")
    }
    parts = {key: f"[\n{text}\n  ]" for key, text in lists.items()}
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
    """The plan of a file, for ``model``.

    Args:
        path: a file of :func:`save_plan`, or the ``plan.json`` of a run.
        model: the model that it was made for, real or on the meta device.
        components: as for :func:`octavo.fp8.planning.decide`; None: those in the file.
        other_machine: take the recipes although the GPU is another one, and choose backends again.
        backend: the backend of every FP8 GEMM where backends are chosen again; "auto": the registry's choice.

    Raises:
        PlanError: a file that is no plan; one for another GPU or another model, with the differences; a line that
            cannot be read or met, with its place.
    """
    path = Path(path)
    fields, text = read_document(path)
    then, here = Machine(**fields["machine"]), Machine.detect(device_of(model))
    elsewhere = (then.gpu, then.capability) != (here.gpu, here.capability)
    if elsewhere and not other_machine:
        raise PlanError(
            f"{path} was made for {_describe_gpu(then)}, and this is {_describe_gpu(here)}: what is fast there need "
            "not be fast here. Measure on this machine (octavo plan FILE --measure --save), or leave fp8.plan out."
        )
    if components is None and fields.get("components") is not None:
        components = {k: tuple(v) for k, v in fields["components"].items()}
    policy = _read_policy(fields, path, text, other_machine, backend)
    _check_model(path, fields["model"], describe_layers(model, components))
    try:
        planned = plan(model, policy, components, fields.get("tokens"), micro_steps=fields["micro_steps"])
    except PlanError as error:  # a line is named by its file and place already
        raise PlanError(str(error) if path.name in str(error) else f"{path}: {printable(error)}") from error
    rows = (
        replace(r, reason="not in the plan file") if r.reason == "the whole model: off" else r for r in planned.rows
    )
    changes = [*_notes_on_old_fusion(path.name, fields, planned)]
    changed = [d for d in then.differences(here) if not d.startswith(("gpu", "capability"))]
    if elsewhere:
        changes.append(
            f"{path.name} was made for {_describe_gpu(then)}: its recipes are kept, backends are chosen again"
        )
    elif changed and not here.emulated:
        changes.append(f"{path.name} was made with other versions, measure again to be sure: {'; '.join(changed)}")
    return replace(planned, rows=tuple(rows), notes=(*planned.notes, *changes), changes=tuple(changes))


def _read_policy(fields: Mapping[str, Any], path: Path, text: str, other_machine: bool, backend: str) -> Policy:
    """What a file asks for; ``other_machine``: without its backends, on ``backend``."""
    activations, param = (dict(fields.get(setting) or {}) for setting in ("activations", "param"))
    return Policy(
        recipe=OFF,
        rules=parse_lines(fields["layers"], path, text, backends=not other_machine),
        fuse="on" if fields.get("fuse_blocks") else OFF,
        weight_codes=fields.get("weight_codes") or "keep",
        backend=backend,
        activations=activations.pop("", "bf16"),
        param=param.pop("", False),
        components={
            c: ComponentPolicy(activations=activations.get(c), param=param.get(c)) for c in {**activations, **param}
        },
    )


def _notes_on_old_fusion(name: str, fields: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    """Notes on what version 0.4.0 let run as one GEMM, by what it wrote into the plan file ``name``."""
    layers = [row.name.removesuffix(".base_layer").rpartition(".") for row in plan.rows]
    ones: list[str] = []
    for match, names in [(x["match"], x.get("names")) for x in fields.get("sisters") or [] if x["fuse"] == "on"]:
        lasts = {last for holder, _, last in layers if (matches(match, holder) if match else not holder)}
        if lasts.intersection(names.split() if names else lasts):
            ones.append(f"{names or 'siblings'} of {match or 'the model'}")
        else:
            yield f"{name}: {match!r} in sisters, from version 0.4.0, names no layer of this model and is ignored"
    if ones:
        what = f"{', '.join(ones[:3])}{' and others' if ones[3:] else ''} as one GEMM"
        yield f"{name} is of version 0.4.0, which ran {what}: each layer runs its own now, on one cast of their input"


def _summarize_model(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The linear maps of a model; those that differ only in their numbers are counted together."""
    counts = Counter((template(r.name), r.kind, r.shape, r.experts) for r in rows)
    return [
        {"name": name, "kind": kind, "shape": list(shape), **({"experts": experts} if experts else {}), "layers": n}
        for (name, kind, shape, experts), n in counts.items()
    ]


def _check_model(path: Path, saved: Sequence[Any], rows: Sequence[Row]) -> None:
    def shown(lines: Sequence[Any]) -> dict[str, str]:
        out: dict[str, list[str]] = {}
        for line in lines:
            experts = f" ({line['experts']} experts)" if line.get("experts") else ""
            shape = " x ".join(map(str, line["shape"]))
            out.setdefault(printable(line["name"]), []).append(
                f"{line['layers']} {printable(line['kind'])} of {shape}{experts}"
            )
        return {name: ", ".join(sorted(kinds)) for name, kinds in out.items()}

    was, now = shown(saved), shown(_summarize_model(rows))
    differ = [n for n in dict.fromkeys([*was, *now]) if was.get(n) != now.get(n)]
    if differ:
        first = "; ".join(f"{n}: {was.get(n, 'nothing')} there, {now.get(n, 'nothing')} here" for n in differ[:5])
        rest = f"; and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise PlanError(f"{path} was made for another model: {first}{rest}. Plan this model (octavo plan FILE --save).")


def _describe_gpu(machine: Machine) -> str:
    return "a CPU" if machine.emulated else f"{machine.gpu} (compute capability {machine.capability})"
