"""The weights of a run state without the rest of it: what a run may begin with that is another training.

They may be stored here otherwise than they were saved: `optimizer.master` is of a run, and a BF16 weight may have its
lower half, or its fp32 value, among what the optimizer holds. Values are read as they were meant and stored as this run
stores them; between fp32 and both halves nothing is lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from octavo import fp8
from octavo.checkpoint.run_state import optimizer_state as states
from octavo.checkpoint.run_state.collective_errors import Ranks, dcp_errors, shared
from octavo.checkpoint.run_state.dcp_safe import SafeReader, TensorsOnly
from octavo.checkpoint.run_state.state import verified
from octavo.checkpoint.run_state.tensor_names import refuse_dead, same_names, tensors
from octavo.checkpoint.run_state.writing import TRAINED
from octavo.fp8.arithmetic import join_master
from octavo.fp8.optim import like, set_weight
from octavo.fp8.weights import plain

FLOATS = (torch.float32, torch.bfloat16)


def load_weights(
    path: str | os.PathLike[str], *, model: nn.Module, optimizer: torch.optim.Optimizer | None, world: Ranks,
    spare: Callable[[str], bool] = lambda name: False,
) -> dict[str, Any]:  # fmt: skip
    """Fill `model` with the weights of the checkpoint directory `path`, and of `optimizer` what it keeps of them; its
    states stay as they are. Gives state.json. A collective.

    Names whose parameters are `spare` may lack on either side; for all else, and what is raised, see `load`.
    """
    path = Path(path)
    document = verified(path, world)
    with shared("read", path, world):
        reader = SafeReader(path)
        metadata = reader.read_metadata()
        entries = metadata.state_dict_metadata
        trained_only = document.get("holds") == TRAINED
        state = tensors(model, None, trained_only)
        state = {n: t for n, t in state.items() if n in entries or not spare(n.removeprefix("model."))}
        same_names(state, metadata, path, trained_only, model, spare)
        parameters = {f"model.{name}": p for name, p in model.named_parameters()}
        groups = {} if optimizer is None else {p: g for g in optimizer.param_groups for p in g["params"]}
        held = {} if optimizer is None else optimizer.state
        apart: dict[str, dict[str, Any]] = {}  # of weights that are stored otherwise than saved: what makes their value
        for name, parameter in parameters.items():
            if name not in state or name not in entries:
                continue
            dtype = entries[name].properties.dtype
            beside = [key for key in states.OF_WEIGHTS if _slot(name, key) in entries]
            otherwise = bool(beside) or dtype != parameter.dtype or bool(held.get(parameter))
            if otherwise and dtype in FLOATS and parameter.dtype in FLOATS:
                apart[name] = {key: _room(parameter, entries[_slot(name, key)]) for key in ("model", *beside)}
        for name, parts in apart.items():
            state |= {_slot(name, key): room for key, room in parts.items()}
    with dcp_errors("read", path):
        dcp.load(state, storage_reader=reader, planner=TensorsOnly(), no_dist=world.size == 1)
    with shared("read", path, world):
        refuse_dead(state, path, "Begin from an earlier checkpoint")
        for name, parts in apart.items():
            set_weight(optimizer, groups.get(parameters[name]), parameters[name], _value(parts))
    fp8.invalidate(model)  # weights were written in place, behind every cache of FP8 codes
    return document


def _slot(name: str, key: str) -> str:
    """The entry of a weight, `model.NAME`, or of what the optimizer keeps of it."""
    return name if key == "model" else f"optimizer.{name.removeprefix('model.')}.{key}"


def _room(parameter: torch.Tensor, entry: Any) -> torch.Tensor:
    """A tensor like a parameter, in the dtype of a checkpoint's entry."""
    own = plain(parameter)
    return like(parameter, torch.empty(own.shape, dtype=entry.properties.dtype, device=own.device))


def _value(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The value of this rank's part of a weight, in fp32."""
    found = {key: plain(tensor) for key, tensor in parts.items()}
    if "master" in found:
        return found["master"]
    return join_master(found["model"], found["master_low"]) if "master_low" in found else found["model"].float()
