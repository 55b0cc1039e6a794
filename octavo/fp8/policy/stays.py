"""Linear layers that a recipe for the whole model leaves in high precision until a rule names them.

=============== ================================================== ===================================================
layer           how it is recognised                               why
=============== ================================================== ===================================================
adapter         a part that PEFT (or another library, by the name  a rank of 16 is filled up to 16 or 128 in FP8, and
                ``lora_*``) adds to a layer or a model             ``fp8.apply`` before PEFT does not touch it either
output layer    ``score``, ``classifier``, ``v_head`` and the      logits, rewards and values are read as numbers; few
                like; the last layer by registration of a network  outputs are mostly zeros that fill up a tile
                without ``lm_head`` if it is narrow; any layer
                from more inputs to fewer than 16 outputs
time embedding  by the names that diffusion models use             its rows are the batch, and its values are angles
router          as many outputs as experts in the same block       its order of experts is a decision, not a value
=============== ================================================== ===================================================

Nothing is imported to recognise a layer: PEFT's classes are known by their module, their ``adapter_layer_names`` and
the children that they have.
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
ADDED = (
    "its weight is the sum of a base and PEFT's adapter (target_parameters), made in each forward: no codes of it last"
)

_OUTPUTS = (
    *("score", "classifier", "v_head", "value_head", "reward_head", "score_head", "classification_head", "cls_head"),
    *("qa_outputs", "reward_model_head", "regression_head", "out_head"),
)
_TIMES = (
    *("time_embed", "time_embedding", "time_embedder", "timestep_embed", "timestep_embedding", "timestep_embedder"),
    *("t_embed", "t_embedder", "time_mlp", "time_proj", "time_in", "time_text_embed"),
)
# Children of PEFT's own modules that hold the stock model or layer.
_STOCK = {*WRAPPED, "base_model", "model", "transformer_backbone", "word_embeddings"}


def reasons_to_stay(rows: Sequence[Row], modules: Mapping[str, nn.Module], policy: Policy) -> dict[str, str]:
    """The reason of each row (by its name) that stays in high precision because it is one of the table above.

    ``modules``: the modules of the model by name, the model itself as "".
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
            reasons[row.name] = ADDED  # whatever a rule says: the codes would be those of the base, without the adapter
            continue
        elif row.kind != "linear" or row.component == HEAD:  # the component's own recipe decides on a head
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
    """The end of a module's name that an adapter library added, as ("lora_A", "default"); () for a stock layer."""
    segments = name.split(".") if name else []
    for depth, child in enumerate(segments):
        parent = modules.get(".".join(segments[:depth]))
        module = modules.get(".".join(segments[: depth + 1]))
        if parent is not None and not hasattr(module, "base_layer") and _is_adapter_child(parent, child):
            return tuple(segments[depth:])
    return ()


def _is_adapter_child(parent: nn.Module, child: str) -> bool:
    """Whether ``child`` is a part of an adapter and no part of what the adapter was put around."""
    if child == "original_module":
        return "modules_to_save" in parent._modules
    declared = getattr(parent, "adapter_layer_names", ())
    if isinstance(declared, tuple | list) and child in declared:
        return True
    if child.startswith("lora_"):
        return True
    return type(parent).__module__.partition(".")[0] == "peft" and child not in _STOCK


def _has_adapted_parameter(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether PEFT's wrapper of parameters is around a module of experts: it has the parameter's name."""
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
    """Whether a layer has an output for each expert of the block that it (or the module around it) is in."""
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
    """The last linear layer by registration, which gives the output of a plain network; None where a head is known, and
    of a network of one layer, which is what the caller wants in FP8."""
    linear = [row for row in rows if row.kind in ("linear", "subclass")]
    if len(linear) < 2 or any(HEAD in (row.kind, row.component) for row in rows):
        return None
    return linear[-1]


def _is_narrow(shape: tuple[int, int]) -> bool:
    """Fewer outputs than inputs, and an eighth of them at most, or so few that an eighth and more would be zeros."""
    outputs, inputs = shape
    zeros = -outputs % ALIGN
    return outputs < inputs and (8 * outputs <= inputs or outputs < ALIGN or 8 * zeros > outputs)


def _rule_names_part(rule: Rule, row: Row, part: Sequence[str]) -> bool:
    """Whether a rule gives a layer a recipe by a word of ``part``; a glob that happens to match does not."""
    words = [segment for segment in rule.match.split(".") if segment.strip("*?")]
    named = any(fnmatchcase(segment_name, word) for segment_name in part for word in words)
    return rule.recipe is not None and named and matches(rule.match, row.name)
