"""Linear layers that stay in high precision unless a rule names them.

=============== ================================================== ===================================================
layer           how it is recognized                               why
=============== ================================================== ===================================================
adapter         a module that PEFT adds to a layer or a model, or  FP8 pads a rank of 16 to up to 128, and fp8.apply
                any child named ``lora_*``                         before PEFT does not convert it either
output layer    ``score``, ``classifier``, ``v_head`` and similar  logits, rewards and values need precision; with few
                names; a narrow last layer (by registration) of a  outputs a tile is mostly padding
                network without ``lm_head``; any layer with fewer
                than 16 outputs and more inputs
time embedding  names that diffusion models use                    its rows are the batch, and its values are angles
router          as many outputs as experts in the same block       small errors change which experts are selected
=============== ================================================== ===================================================

PEFT is not imported: its classes are recognized by their module, their ``adapter_layer_names`` and their children.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from octavo.fp8.kernels import ALIGN
from octavo.fp8.policy.globs import matches
from octavo.fp8.policy.policy import HEAD, Policy, Rule
from octavo.fp8.policy.topology import WRAPPED, Row, unwrapped

_UNLESS = "stays in high precision unless a rule names it"
ADAPTER, OUTPUT, TIME, ROUTER = (
    f"{what} {_UNLESS}" for what in ("adapter", "output layer", "time embedding", "router")
)
ORIGINAL = f"original of a modules_to_save copy {_UNLESS}"
ADDED = "its weight is the sum of a base and PEFT's adapter (target_parameters), recomputed in each forward"

_OUTPUTS = (
    *("score", "classifier", "v_head", "value_head", "reward_head", "score_head", "classification_head", "cls_head"),
    *("qa_outputs", "reward_model_head", "regression_head", "out_head"),
)
_TIMES = (
    *("time_embed", "time_embedding", "time_embedder", "timestep_embed", "timestep_embedding", "timestep_embedder"),
    *("t_embed", "t_embedder", "time_mlp", "time_proj", "time_in", "time_text_embed"),
)
# Children of PEFT's modules that contain the stock model or layer.
_STOCK = {*WRAPPED, "base_model", "model", "transformer_backbone", "word_embeddings"}


def reasons_to_stay(rows: Sequence[Row], modules: Mapping[str, nn.Module], policy: Policy) -> dict[str, str]:
    """Return row name -> reason for each row that the table above keeps in high precision.

    ``modules``: the modules of the model by name; the model itself has the name "".
    """
    reasons: dict[str, str] = {}
    parts = {row.name: _adapter_part(row.module, modules) for row in rows}
    last = last_layer([row for row in rows if not parts[row.name]])
    output = last.name if last is not None and _is_narrow(last.shape) else None
    for row in rows:
        part = parts[row.name]
        if part:
            reason = ORIGINAL if part[0] == "original_module" else ADAPTER
        elif row.kind == "experts" and _has_adapted_parameter(row.module, modules):
            reasons[row.name] = ADDED  # despite any rule: codes would contain only the base, without the adapter
            continue
        elif row.kind != "linear" or row.component == HEAD:  # a head is decided by the recipe of its component
            continue
        else:
            part = tuple(unwrapped(row.name).split("."))[-1:]
            known = _reason_by_name(row) or (_is_router(row, modules) and ROUTER)
            few = len(rows) > 1 and row.shape[0] < min(ALIGN, row.shape[1])
            reason = known or (OUTPUT if few or row.name == output else "")
        if reason and not any(_rule_names_part(rule, row, part) for rule in policy.rules):
            reasons[row.name] = reason
    return reasons


def _adapter_part(name: str, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return the part of a module name that an adapter library added, such as ("lora_A", "default"), or ()."""
    segments = name.split(".") if name else []
    for depth, child in enumerate(segments):
        parent = modules.get(".".join(segments[:depth]))
        module = modules.get(".".join(segments[: depth + 1]))
        if parent is not None and not hasattr(module, "base_layer") and _is_adapter_child(parent, child):
            return tuple(segments[depth:])
    return ()


def _is_adapter_child(parent: nn.Module, child: str) -> bool:
    """Return True if ``child`` belongs to an adapter, and not to the layer that the adapter wraps."""
    if child == "original_module":
        return "modules_to_save" in parent._modules
    declared = getattr(parent, "adapter_layer_names", ())
    if isinstance(declared, tuple | list) and child in declared:
        return True
    if child.startswith("lora_"):
        return True
    return type(parent).__module__.partition(".")[0] == "peft" and child not in _STOCK


def _has_adapted_parameter(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return True if PEFT's ParamWrapper wraps a module of experts."""
    while name.rpartition(".")[2] == "base_layer":
        name = name.rpartition(".")[0]
        if isinstance(getattr(modules[name], "parameter_name", None), str):
            return True
    return False


def _reason_by_name(row: Row) -> str:
    segments = unwrapped(row.name).split(".")
    if any(segment in _TIMES for segment in segments):
        return TIME
    return OUTPUT if any(segment in _OUTPUTS for segment in segments[-3:]) else ""


def _is_router(row: Row, modules: Mapping[str, nn.Module]) -> bool:
    """Return True if a layer has as many outputs as its block, or the parent of its block, has experts."""
    path = unwrapped(row.name)
    for _ in range(2):
        path, _, child = path.rpartition(".")
        if "expert" in child or path not in modules:
            return False
        for name, sibling in modules[path].named_children():
            if "expert" in name and isinstance(sibling, nn.ModuleList) and len(sibling) == row.shape[0]:
                return True
        if not path:
            return False
    return False


def last_layer(rows: Sequence[Row]) -> Row | None:
    """Return the last registered linear layer, the output layer of a plain network. None if the model has a known head,
    or only one layer, which the caller wants in FP8."""
    linear = [row for row in rows if row.kind in ("linear", "subclass")]
    if len(linear) < 2 or any(HEAD in (row.kind, row.component) for row in rows):
        return None
    return linear[-1]


def _is_narrow(shape: tuple[int, int]) -> bool:
    """Return True if outputs are few: at most 1/8 of the inputs, less than a tile, or more than 1/8 padding."""
    outputs, inputs = shape
    zeros = -outputs % ALIGN
    return outputs < inputs and (8 * outputs <= inputs or outputs < ALIGN or 8 * zeros > outputs)


def _rule_names_part(rule: Rule, row: Row, part: Sequence[str]) -> bool:
    """Return True if a rule sets the recipe of a layer and names a segment of ``part``, not only by a wildcard."""
    words = [segment for segment in rule.match.split(".") if segment.strip("*?")]
    named = any(fnmatchcase(segment_name, word) for segment_name in part for word in words)
    return rule.recipe is not None and named and matches(rule.match, row.name)
