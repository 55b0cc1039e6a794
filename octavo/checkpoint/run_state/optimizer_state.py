"""The optimizer's part of a run state: tensors by parameter name, and hyper-parameters by group as JSON.

torch's optimizers keep tensors of the parameter's shape, as DTensors if the parameter is one. `fp8.AdamW` also keeps
values for groups of 128 elements, which do not align with FSDP2's shards; DCP gets those as `ShardedRows`.
`load_state_dict` is not used, because it would need a second copy of the state in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.run_state import files
from octavo.checkpoint.run_state.dcp_safe import tensor_entry
from octavo.checkpoint.run_state.expert_rows import ShardedRows
from octavo.fp8 import optim
from octavo.fp8.optim import AdamW
from octavo.fp8.weights import reshard, span

# They choose the implementation of the step, not its result; they depend on the machine and are not saved.
_MACHINE_FLAGS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})

#: states that are part of a weight: the fp32 value of a BF16 weight, or its lower half
WEIGHT_STATES = ("master", "master_low")

Slots = dict[tuple[str, str], torch.Tensor]


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state as DCP takes it, `optimizer.<parameter>.<key>`: live tensors, read or written in place."""
    names = _names(model, optimizer)
    if isinstance(optimizer, AdamW):
        optimizer.settle()
    return {
        f"optimizer.{names[parameter]}.{key}": to_dcp(parameter, key, value)
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def to_dcp(parameter: torch.Tensor, key: str, value: Any) -> Any:
    """Return a value of a parameter's state as DCP takes it: `ShardedRows` for a shard that is not a DTensor."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor) or key not in optim.PER_GROUP:
        return value
    shard = span(parameter)
    first, last = optim.local_groups(shard)
    return ShardedRows(
        value, first, optim.num_groups(shard.total), writes=last - max(first, optim.num_groups(shard.start))
    )


def groups(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Return each parameter group as JSON: the names of its parameters and its hyper-parameters."""
    if optimizer is None:
        return []
    names = _names(model, optimizer)
    result = []
    for group in optimizer.param_groups:
        settings = {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in _MACHINE_FLAGS
        }
        result.append({"parameters": [names[p] for p in group["params"]], "settings": settings})
    return result


def allocate_slots(
    model: nn.Module, optimizer: torch.optim.Optimizer, metadata: Metadata, document: dict[str, Any], path: Path
) -> tuple[Slots, dict[str, Any]]:
    """Allocate tensors for the optimizer state of a checkpoint.

    Returns them by (parameter name, key), and the same tensors as DCP takes them. Raises CheckpointError where groups,
    kinds of state or keys differ between the checkpoint and this optimizer.
    """
    names = _names(model, optimizer)
    _check_groups(optimizer, names, document, path)
    parameters = {name: p for p, name in names.items()}
    saved: dict[str, list[str]] = {}
    for slot in metadata.state_dict_metadata:
        if slot.startswith("optimizer."):
            name, _, key = slot.removeprefix("optimizer.").rpartition(".")
            if name not in parameters:
                raise CheckpointError(f"{path} holds optimizer state of {name}, which the optimizer does not have")
            saved.setdefault(name, []).append(key)
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    empty: Slots = {}
    for name, keys in saved.items():
        parameter = parameters[name]
        if isinstance(optimizer, AdamW):
            new_state = optimizer.init_state(parameter, group_of[parameter])
            if set(keys) != set(new_state):
                raise CheckpointError(
                    f"{path} contains {', '.join(sorted(keys))} of {name}, but this run's optimizer has "
                    f"{', '.join(sorted(new_state))}: it was written by another optimizer. Continue with that one, or "
                    "start a new run from its weights"
                )
            empty.update({(name, key): value for key, value in new_state.items()})
            continue
        for key in keys:
            entry = tensor_entry(metadata, f"optimizer.{name}.{key}")
            like = parameter.detach()
            # `step` has the shape [], as a scalar parameter has, and is never sharded.
            if entry.size == like.shape and key != "step":
                empty[name, key] = torch.empty_like(like, dtype=entry.properties.dtype)
            else:
                empty[name, key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return empty, {f"optimizer.{n}.{key}": to_dcp(parameters[n], key, value) for (n, key), value in empty.items()}


def load_slots(model: nn.Module, optimizer: torch.optim.Optimizer, loaded: Slots, document: dict[str, Any]) -> None:
    """Put the loaded state into the optimizer. `load_state_dict` would cast moments to the parameter's dtype."""
    parameters = {name: p for p, name in _names(model, optimizer).items()}
    optimizer.state.clear()
    on_device: set[str] = set()
    for group, saved in zip(optimizer.param_groups, document["groups"], strict=True):
        for key, value in saved["settings"].items():
            present = group.get(key)
            if isinstance(present, torch.Tensor):
                present.fill_(value)
            elif key in group or not isinstance(optimizer, AdamW):
                group[key] = tuple(value) if isinstance(present, tuple) else value
        # These implementations read `step` on the device; the others expect it on the CPU.
        if group.get("fused") or group.get("capturable"):
            on_device.update(saved["parameters"])
    for (name, key), tensor in loaded.items():
        if key == "step" and name in on_device:
            tensor = tensor.to(parameters[name].device)
        optimizer.state[parameters[name]][key] = tensor


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Return the name of each of the optimizer's parameters."""
    reshard(model)  # only sharded are the module's parameters the objects that the optimizer holds
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not the model's: create "
                    "the optimizer after fp8.apply and after sharding, from this model's parameters"
                )
    return names


def _check_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], document: dict[str, Any], path: Path
) -> None:
    """Raise CheckpointError unless the checkpoint's groups have the same parameters and kinds of state, and numbers as
    settings."""
    current = [{names[p] for p in group["params"]} for group in optimizer.param_groups]
    saved = [set(group["parameters"]) for group in document["groups"]]
    if current != saved:
        differing = sorted(set().union(*current) ^ set().union(*saved))
        what = f"{differing[0]} is trained in only one of them" if differing else "the groups are divided differently"
        raise CheckpointError(
            f"{path} was written with different parameters in the optimizer: {what}. Resume with the freezing and "
            "weight decay that it was written with (model.freeze, optimizer), or start a new run from its weights"
        )
    for group, saved_group in zip(optimizer.param_groups, document["groups"], strict=True):
        check_settings(group, saved_group["settings"], path)
        for key, value in saved_group["settings"].items():
            present = group.get(key)
            if isinstance(present, tuple):
                fits = isinstance(value, list) and len(value) == len(present) and all(map(_is_number, value))
            else:
                fits = not _is_number(present) or _is_number(value)
            if not fits:
                raise CheckpointError(
                    f"the optimizer's {key!r} in {path / files.STATE} is {value!r}, which is not a number; Octavo "
                    "did not write it. Use an earlier checkpoint"
                )


def check_settings(group: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError unless a group keeps its states and master weights in the saved form (torch's AdamW: fp32).

    Resuming converts nothing: the result would not be the run that was interrupted, and encoding fp32 states loses
    precision for good. `fp8.AdamW.load_state_dict` and `fp8.AdamW.copy_state` convert explicitly.
    """
    for key in ("states", "master"):
        saved_form, form = saved.get(key, "fp32"), group.get(key, "fp32")
        if saved_form != form:
            raise CheckpointError(
                f"{path} was written with optimizer.{key}: {saved_form}, but this run has optimizer.{key}: {form}. "
                f"Continue with optimizer.{key}={saved_form}, or start a new run from its weights"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (int, float)) and not isinstance(value, bool))
