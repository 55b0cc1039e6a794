"""The tensors of a model that a rollout depends on: of the trainer's model, which sends them, and of a replica's, which
takes them, by the same names.

FP8 layers of a replica have no weights, only codes and scales (one byte per parameter), as the frozen copy of
:mod:`octavo.rl.phases.reference` has them: the trainer casts its weights as the forward does, and equal codes multiply
to equal bits. Everything else is sent in its dtype: weights of layers in high precision, and of FP8 layers whose cast
has no frozen form (mxfp8, delayed), norms, embeddings, buffers, and the amax histories of delayed scaling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from torch import Tensor, nn

from octavo import fp8
from octavo.fp8.delayed import named_histories
from octavo.fp8.weights import forward_codes, full, is_frozen, master_of, reshard
from octavo.train.forward.critic import is_critic_parameter
from octavo.train.setup.frozen_base import FrozenCast

SCALE = "#scale"
"""Ends the name of the scales of a weight's codes."""
NO_CASTS: Mapping[str, FrozenCast] = MappingProxyType({})


def rollout_tensors(
    model: nn.Module, casts: Mapping[str, FrozenCast] = NO_CASTS, fixed: bool | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a rollout depends on, by name; with `fixed` only those that training does not change, or
    all others.

    Parameters that `casts` names are yielded as codes and scales, and so are those that are codes already. The critic,
    which no rollout reads, is left out. What is yielded without a cast from a model that is not sharded is the model's
    own: writing to it changes the model. A collective if the model is sharded: all ranks get whole tensors.
    """
    reshard(model)
    for name, parameter in model.named_parameters():
        if is_critic_parameter(name) or (fixed is not None and fixed == parameter.requires_grad):
            continue
        weight: Tensor = parameter if is_frozen(parameter) else full(master_of(parameter)).detach()
        if name in casts and not is_frozen(weight):
            spec, transposed = casts[name]
            weight = fp8.freeze_weight(weight, spec, transposed=transposed)
        if is_frozen(weight):
            codes = forward_codes(weight)
            yield name, codes.data
            yield f"{name}{SCALE}", codes.scale
        else:
            yield name, weight
    if fixed:
        return
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer
    for name, history in named_histories(model).items():
        yield f"history.{name}", history


def load_rollout_tensor(targets: Mapping[str, Tensor], name: str, value: Tensor) -> None:
    """Write a tensor that was received over the one of this name in `targets`, which are :func:`rollout_tensors` of a
    model. Raises ValueError for an unknown name, and for another dtype or shape."""
    target = targets.get(name)
    if target is None:
        raise ValueError(f"{name} is not a tensor of this model")
    if target.dtype != value.dtype or target.shape != value.shape:
        raise ValueError(
            f"{name} is {value.dtype} of shape {list(value.shape)}, and {target.dtype} of shape {list(target.shape)} "
            "in this model"
        )
    target.copy_(value)
