"""Weights for a model that was sharded on the meta device: each rank reads only the rows of its shards.

FSDP2 shards meta parameters like any others and looks up its shards again before the first forward, so they can be
replaced by real tensors in between. Ranks communicate only the amaxes of weights with one scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.base.wording import count_noun
from octavo.fp8.optim import shard_like
from octavo.fp8.weights import fill_parameter, local_rows
from octavo.parallel.world import World, WorldError


class WeightSource(Protocol):
    """A source of weights (`models.DeferredModel` is one)."""

    def fill(
        self,
        window: Callable[[nn.Module, str], tuple[int, int]],
        place: Callable[[str, nn.Module, str, Tensor, Tensor | None], None],
        reduce_max: Callable[[Tensor], Tensor],
    ) -> int: ...


def load_into_shards(model: nn.Module, source: WeightSource, world: World) -> tuple[dict[str, Tensor], int]:
    """Replace the meta parameters of `model` by this rank's rows of their values. Collective call.

    Returns the lower halves (int16) of BF16 parameters that are not 0 on every rank, by the source's names and sharded
    like the parameters, and the number of bytes that this rank read. Raises WorldError for a parameter that the source
    does not have.
    """
    # By identity: tied parameters are one object under several names, and must stay one.
    filled_by_id: dict[int, nn.Parameter] = {}
    lower_halves: dict[str, Tensor] = {}

    def window(module: nn.Module, leaf: str) -> tuple[int, int]:
        return local_rows(_parameter(module, leaf))

    def place(name: str, module: nn.Module, leaf: str, values: Tensor, half: Tensor | None) -> None:
        empty = _parameter(module, leaf)
        filled_by_id[id(empty)] = fill_parameter(empty, values)
        if half is not None:
            lower_halves[name] = shard_like(filled_by_id[id(empty)], half)

    def reduce_max(amax: Tensor) -> Tensor:
        # As bit patterns: they sort like non-negative floats with NaN last, so a NaN on one rank reaches all.
        return world.all_reduce_max(amax.float().view(torch.int32)).view(torch.float32)

    read = source.fill(window, place, reduce_max)
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = filled_by_id.get(id(parameter), parameter)
    if unfilled := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise WorldError(f"no values for {count_noun(len(unfilled), 'sharded parameter')}, first {unfilled[0]}")
    model.load_state_dict({}, strict=False)  # makes FSDP2 look up its shards, which are now the filled ones
    return _drop_zeros(lower_halves, world), read


def _parameter(module: nn.Module, leaf: str) -> nn.Parameter:
    parameter = module._parameters[leaf]
    assert parameter is not None
    return parameter


def _drop_zeros(lower_halves: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return the lower halves that are nonzero on at least one rank: the same names on every rank."""
    local = [
        bool(half.to_local().any()) if hasattr(half, "to_local") else bool(half.any()) for half in lower_halves.values()
    ]
    on_any_rank = world.all_reduce_max(torch.tensor(local, dtype=torch.int32)).tolist() if local else []
    return {name: half for (name, half), nonzero in zip(lower_halves.items(), on_any_rank, strict=True) if nonzero}
