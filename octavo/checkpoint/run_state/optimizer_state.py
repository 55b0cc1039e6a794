"""The optimizer's part of a run state: its tensors by parameter name, its hyper-parameters by group as JSON.

torch's optimizers keep tensors of the parameter's shape, DTensors like it. `fp8.AdamW` also keeps figures of groups of
128 elements, which do not follow FSDP2's borders; those go to DCP as `Rows`. Nothing goes through `load_state_dict`,
which would need one state dict in memory beside the state itself.
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
from octavo.checkpoint.run_state.expert_rows import Rows
from octavo.fp8 import optim
from octavo.fp8.optim import AdamW
from octavo.fp8.weights import reshard, span

# How the step is computed, not what it computes: these belong to the machine, not to the run.
_MACHINE_FLAGS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})

#: what of the state is part of a weight: the value behind a BF16 one, whole or its lower half
OF_WEIGHTS = ("master", "master_low")

Slots = dict[tuple[str, str], torch.Tensor]


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state as DCP takes it, `optimizer.<parameter>.<key>`: live tensors, to be read or written in place."""
    names = _names(model, optimizer)
    if isinstance(optimizer, AdamW):
        optimizer.settle()
    return {
        f"optimizer.{names[parameter]}.{key}": form(parameter, key, value)
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def form(parameter: torch.Tensor, key: str, value: Any) -> Any:
    """A value of a parameter's state as DCP takes it: `Rows` where it is this rank's piece of more and no DTensor."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor) or key not in optim.PER_GROUP:
        return value
    mine = span(parameter)
    first, last = optim.touched(mine)
    return Rows(value, first, optim.groups(mine.total), writes=last - max(first, optim.groups(mine.start)))


def groups(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Each parameter group as JSON: the names of its parameters and its hyper-parameters."""
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


def slots(
    model: nn.Module, optimizer: torch.optim.Optimizer, metadata: Metadata, document: dict[str, Any], path: Path
) -> tuple[Slots, dict[str, Any]]:
    """Room for the state in a checkpoint, by (parameter, key), and the same as DCP takes it.

    Raises CheckpointError where the checkpoint's groups, kinds of states or keys are not those of this optimizer.
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
    found: Slots = {}
    for name, keys in saved.items():
        parameter = parameters[name]
        if isinstance(optimizer, AdamW):
            mine = optimizer.fresh(parameter, group_of[parameter])
            if set(keys) != set(mine):
                raise CheckpointError(
                    f"{path} holds {', '.join(sorted(keys))} of {name}, where this run's optimizer keeps "
                    f"{', '.join(sorted(mine))}: it was written by another optimizer. Continue with that one, or "
                    "start a new run from its weights"
                )
            found.update({(name, key): value for key, value in mine.items()})
            continue
        for key in keys:
            entry = metadata.state_dict_metadata[f"optimizer.{name}.{key}"]
            like = parameter.detach()
            if entry.size == like.shape and key != "step":
                found[name, key] = torch.empty_like(like, dtype=entry.properties.dtype)
            else:
                found[name, key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return found, {f"optimizer.{n}.{key}": form(parameters[n], key, value) for (n, key), value in found.items()}


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, found: Slots, document: dict[str, Any]) -> None:
    """Hand the loaded state over. Not through `load_state_dict`, which casts moments to the parameter's dtype."""
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
        if group.get("fused") or group.get("capturable"):
            on_device.update(saved["parameters"])
    for (name, key), tensor in found.items():
        if key == "step" and name in on_device:
            tensor = tensor.to(parameters[name].device)
        optimizer.state[parameters[name]][key] = tensor


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """The name of each of the optimizer's parameters.

    Resharded first: only then are the module's parameters the ones that the optimizer knows.
    """
    reshard(model)
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not the model's: make "
                    "the optimizer after fp8.apply and after sharding, from this model's parameters"
                )
    return names


def _check_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], document: dict[str, Any], path: Path
) -> None:
    """That the checkpoint's groups hold the same parameters, in states of the same kind, and numbers for settings."""
    mine = [{names[p] for p in group["params"]} for group in optimizer.param_groups]
    saved = [set(group["parameters"]) for group in document["groups"]]
    if mine != saved:
        odd = sorted(set().union(*mine) ^ set().union(*saved))
        what = f"{odd[0]} is trained in only one of them" if odd else "the groups are divided otherwise"
        raise CheckpointError(
            f"{path} was written with other parameters in the optimizer: {what}. Resume with the freezing and weight "
            "decay that it was written with (model.freeze, optimizer), or start a new run from its weights"
        )
    for group, former in zip(optimizer.param_groups, document["groups"], strict=True):
        check_kinds(group, former["settings"], path)
        for key, value in former["settings"].items():
            present = group.get(key)
            if isinstance(present, tuple):
                fits = isinstance(value, list) and len(value) == len(present) and all(map(_is_number, value))
            else:
                fits = not _is_number(present) or _is_number(value)
            if not fits:
                raise CheckpointError(
                    f"{path / files.STATE} says that the optimizer's {key!r} is {value!r}, which is no number; Octavo "
                    "did not write it. Use an earlier checkpoint"
                )


def check_kinds(group: Mapping[str, Any], former: Mapping[str, Any], path: Path) -> None:
    """That a group keeps its states and master weights as they were saved. torch's AdamW keeps both in fp32.

    Nothing is converted on resuming: what would follow is not the run that was interrupted, and encoding fp32 states
    loses what cannot come back. `fp8.AdamW.load_state_dict` and `fp8.AdamW.copy_state` convert for who wants that.
    """
    for key in ("states", "master"):
        was, asked = former.get(key, "fp32"), group.get(key, "fp32")
        if was != asked:
            raise CheckpointError(
                f"{path} was written with optimizer.{key}: {was}, and this run asks for optimizer.{key}: {asked}. "
                f"Continue with optimizer.{key}={was}, or start a new run from its weights"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (int, float)) and not isinstance(value, bool))
