"""The tensors of a model and its optimizer that a run state holds, by name, and checks that a state fits a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from octavo import fp8
from octavo.base.wording import count_noun
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.run_state import optimizer_state as states
from octavo.checkpoint.run_state.expert_rows import ShardedRows
from octavo.fp8.weights import is_frozen


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None, trained_only: bool = False) -> dict[str, Any]:
    """Return the model's parameters and persistent buffers, each once (tied ones under the first name), and the
    optimizer's state. Frozen FP8 weights are left out; with `trained_only` all that need no gradient are.

    The tensors are live and detached: DCP reads from them and writes into them.
    """
    result: dict[str, Any] = {}
    seen: set[int] = set()
    # state_dict reshards FSDP modules: only then are the module's parameters the ones that the optimizer holds. So it
    # comes before the optimizer's state.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if trained_only and not getattr(tensor, "requires_grad", False):
            continue
        if id(tensor) not in seen and not is_frozen(tensor):
            seen.add(id(tensor))
            result[f"model.{name}"] = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor
    if optimizer is not None:
        result.update(states.tensors(model, optimizer))
    return result


def local_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (entry, this rank's shard) of the tensors of model and optimizer. Extra tensors may hold any value."""
    saved = ((name, value) for name, value in state.items() if not name.startswith("extra."))
    return ((name, value.local if isinstance(value, ShardedRows) else value) for name, value in saved)


def entry_label(entry: str) -> str:
    """Return a readable name of an entry."""
    kind, _, name = entry.partition(".")
    if kind == "model":
        return name
    parameter, _, key = name.rpartition(".")
    return f"the optimizer's {key} of {parameter}" if kind == "optimizer" else entry


def refuse_nonfinite(state: Mapping[str, Any], path: Path, fix: str) -> None:
    """Raise CheckpointError if a tensor that was read from a checkpoint is not finite."""
    if bad := fp8.find_nonfinite(local_tensors(state)):
        raise CheckpointError(
            f"{path}: {entry_label(bad[0])} holds NaN or infinity (tensors that do: {len(bad)}): the run had diverged "
            f"when it was saved. {fix}"
        )


def refuse_non_tensors(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a value that is not a tensor."""
    for name, value in state.items():
        if not isinstance(value, (torch.Tensor, ShardedRows)):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}; checkpoints hold tensors, because DCP would pickle anything "
                "else. Make it a tensor, or a counter"
            )


def check_names(
    state: Mapping[str, torch.Tensor], metadata: Metadata, path: Path, trained_only: bool, model: nn.Module,
    may_be_missing: Callable[[str], bool],
) -> None:  # fmt: skip
    """Raise CheckpointError for a checkpoint of another model, with tensors that this one does not have.

    `TensorLoadPlanner` refuses the opposite case, missing tensors. `may_be_missing`: whether a name may be missing
    here.
    """
    saved = [n for n in metadata.state_dict_metadata if n.startswith("model.")]
    unknown = sorted(n for n in saved if n not in state and not may_be_missing(n.removeprefix("model.")))
    if trained_only and unknown:
        raise CheckpointError(
            f"{path} holds only trained parameters ({len(saved)}, first {saved[0].removeprefix('model.')}), as a LoRA "
            f"run saves its adapters, and this model does not train {unknown[0].removeprefix('model.')}. Continue it "
            "with the `lora` section that it was trained with; adapter/ in its run directory is for all other uses"
        )
    frozen = {f"model.{n}" for n, p in model.named_parameters() if not p.requires_grad}
    missing = sorted(n for n in state if n not in saved and n not in frozen)
    if frozen and missing and not any(n in saved for n in state if n not in frozen):
        raise CheckpointError(
            f"{path} holds a whole model, and not one of the parameters that this model trains (first "
            f"{missing[0].removeprefix('model.')}): it belongs to a run without these adapters. Start a LoRA run from "
            "its weights (hf/ in its run directory as model.path), or continue it without `lora`"
        )
    if unknown:
        raise CheckpointError(
            f"{path} holds {count_noun(len(unknown), 'tensor')} that this model does not have, first "
            f"{unknown[0].removeprefix('model.')}: it was written by another model"
        )
