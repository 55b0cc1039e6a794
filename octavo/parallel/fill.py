"""Weights for a model that was sharded on the meta device: each rank reads the rows of its own shards.

FSDP2 shards meta parameters like any others and looks its shards up again before the first forward, so they can be
replaced by real tensors in between. Ranks communicate only the amaxes of weights with one scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.fp8.optim import shard_like
from octavo.fp8.weights import fill_parameter, local_rows
from octavo.parallel.world import World, WorldError


class Unfilled(Protocol):
    """A source of weights (`models.Deferred` is one)."""

    def fill(
        self,
        window: Callable[[nn.Module, str], tuple[int, int]],
        place: Callable[[str, nn.Module, str, Tensor, Tensor | None], None],
        largest: Callable[[Tensor], Tensor],
    ) -> int: ...


def fill(model: nn.Module, source: Unfilled, world: World) -> tuple[dict[str, Tensor], int]:
    """Replace the meta parameters of `model` by this rank's rows of their values. A collective.

    Returns the lower halves (int16) of BF16 parameters by the source's names, sharded like the parameters, without
    those that are 0 on every rank; and the bytes that this rank read. Raises WorldError for a parameter that the source
    lacks.
    """
    # By identity: tied parameters are one object under several names, and must stay one.
    filled_by_id: dict[int, nn.Parameter] = {}
    lows: dict[str, Tensor] = {}

    def window(module: nn.Module, leaf: str) -> tuple[int, int]:
        return local_rows(_parameter(module, leaf))

    def place(name: str, module: nn.Module, leaf: str, values: Tensor, low: Tensor | None) -> None:
        empty = _parameter(module, leaf)
        filled_by_id[id(empty)] = fill_parameter(empty, values)
        if low is not None:
            lows[name] = shard_like(filled_by_id[id(empty)], low)

    def largest(amax: Tensor) -> Tensor:
        # As bit patterns, which sort like non-negative floats and put NaN last: a NaN on one rank reaches all.
        return world.all_reduce_max(amax.float().view(torch.int32)).view(torch.float32)

    read = source.fill(window, place, largest)
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = filled_by_id.get(id(parameter), parameter)
    if left := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise WorldError(f"{len(left)} parameters were sharded without values and got none, first {left[0]}")
    model.load_state_dict({}, strict=False)  # makes FSDP2 look up its shards, which are now the filled ones
    return _of_any_rank(lows, world), read


def _parameter(module: nn.Module, leaf: str) -> nn.Parameter:
    parameter = module._parameters[leaf]
    assert parameter is not None
    return parameter


def _of_any_rank(lows: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """The lower halves that are not 0 on some rank: the same names on every rank."""
    here = [bool(low.to_local().any()) if hasattr(low, "to_local") else bool(low.any()) for low in lows.values()]
    anywhere = world.all_reduce_max(torch.tensor(here, dtype=torch.int32)).tolist() if here else []
    return {name: low for (name, low), nonzero in zip(lows.items(), anywhere, strict=True) if nonzero}
