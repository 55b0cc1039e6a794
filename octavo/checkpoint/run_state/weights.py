"""Load only the weights of a run state, for example to start a new training from them.

The new run may store weights in another form than the run that saved them: with `optimizer.master` a BF16 weight has
its lower half, or its fp32 value, in the optimizer. The full value is reconstructed and stored in the form of the new
run; converting between fp32 and the two halves is exact.
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
from octavo.checkpoint.run_state.collective_errors import Ranks, dcp_errors, fail_together
from octavo.checkpoint.run_state.dcp_safe import SafeReader, TensorLoadPlanner, tensor_entry
from octavo.checkpoint.run_state.state import read_verified
from octavo.checkpoint.run_state.tensor_names import check_names, refuse_nonfinite, tensors
from octavo.checkpoint.run_state.writing import TRAINED
from octavo.fp8.arithmetic import join_master
from octavo.fp8.optim import set_weight, shard_like
from octavo.fp8.weights import plain

FLOATS = (torch.float32, torch.bfloat16)


def load_weights(
    path: str | os.PathLike[str], *, model: nn.Module, optimizer: torch.optim.Optimizer | None, world: Ranks,
    may_be_missing: Callable[[str], bool] = lambda name: False,
) -> dict[str, Any]:  # fmt: skip
    """Load the weights of the checkpoint directory `path` into `model`, and the optimizer's master weights with them.
    Moments stay as they are. Returns the contents of state.json. A collective.

    Parameters for whose name `may_be_missing` returns True may be missing on either side. Raises as `load` does.
    """
    path = Path(path)
    document = read_verified(path, world)
    with fail_together("read", path, world):
        reader = SafeReader(path)
        metadata = reader.read_metadata()
        entries = metadata.state_dict_metadata
        trained_only = document.get("holds") == TRAINED
        state = tensors(model, None, trained_only)
        state = {n: t for n, t in state.items() if n in entries or not may_be_missing(n.removeprefix("model."))}
        check_names(state, metadata, path, trained_only, model, may_be_missing)
        parameters = {f"model.{name}": p for name, p in model.named_parameters()}
        groups = {} if optimizer is None else {p: g for g in optimizer.param_groups for p in g["params"]}
        states_of = {} if optimizer is None else optimizer.state
        # Weights that this run stores in another form than the checkpoint -> the saved tensors that make up their
        # value. All other weights are read in place.
        converted: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in parameters.items():
            if name not in state or name not in entries:
                continue
            dtype = tensor_entry(metadata, name).properties.dtype
            masters = [key for key in states.WEIGHT_STATES if _entry_name(name, key) in entries]
            differs = bool(masters) or dtype != parameter.dtype or bool(states_of.get(parameter))
            if differs and dtype in FLOATS and parameter.dtype in FLOATS:
                converted[name] = {
                    key: _empty_like(parameter, tensor_entry(metadata, _entry_name(name, key)).properties.dtype)
                    for key in ("model", *masters)
                }
        for name, parts in converted.items():
            state |= {_entry_name(name, key): target for key, target in parts.items()}
    with dcp_errors("read", path):
        dcp.load(state, storage_reader=reader, planner=TensorLoadPlanner(), no_dist=world.size == 1)
    with fail_together("read", path, world):
        refuse_nonfinite(state, path, "Start from an earlier checkpoint")
        for name, parts in converted.items():
            set_weight(optimizer, groups.get(parameters[name]), parameters[name], _fp32_value(parts))
    fp8.invalidate(model)  # the weights were written in place, so cached FP8 codes are stale
    return document


def _entry_name(name: str, key: str) -> str:
    """Return the checkpoint entry of a weight (`model.NAME`) or of its part in the optimizer (`optimizer.NAME.KEY`)."""
    return name if key == "model" else f"optimizer.{name.removeprefix('model.')}.{key}"


def _empty_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor with the shape, sharding and device of a parameter."""
    local = plain(parameter)
    return shard_like(parameter, torch.empty(local.shape, dtype=dtype, device=local.device))


def _fp32_value(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the value of this rank's shard of a weight, in fp32."""
    local = {key: plain(tensor) for key, tensor in parts.items()}
    if "master" in local:
        return local["master"]
    return join_master(local["model"], local["master_low"]) if "master_low" in local else local["model"].float()
