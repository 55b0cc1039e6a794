"""Values for a model that was sharded on the meta device: each rank reads the rows of its own shards.

FSDP2 shards a parameter without memory like any other, and looks at its shards anew before the first forward; so what
lies between is free to put tensors in their places. Nothing is sent but the amaxes of weights with one scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.fp8.optim import like
from octavo.fp8.weights import filled, rows_here
from octavo.parallel.world import World, WorldError


class Unfilled(Protocol):
    """What gives the values (`models.Deferred` is one)."""

    def fill(
        self,
        window: Callable[[nn.Module, str], tuple[int, int]],
        place: Callable[[str, nn.Module, str, Tensor, Tensor | None], None],
        largest: Callable[[Tensor], Tensor],
    ) -> int: ...


def fill(model: nn.Module, source: Unfilled, world: World) -> tuple[dict[str, Tensor], int]:
    """Give the parameters of `model` that are on the meta device this rank's rows of their values. A collective.

    Returns the lower halves (int16) of BF16 parameters by the source's names, sharded as these are, where any rank has
    one that is not 0; and the bytes that this rank read. Raises WorldError for a parameter that the source lacks.
    """
    made: dict[int, nn.Parameter] = {}
    lows: dict[str, Tensor] = {}

    def window(module: nn.Module, leaf: str) -> tuple[int, int]:
        return rows_here(_parameter(module, leaf))

    def place(name: str, module: nn.Module, leaf: str, values: Tensor, low: Tensor | None) -> None:
        empty = _parameter(module, leaf)
        made[id(empty)] = filled(empty, values)
        if low is not None:
            lows[name] = like(made[id(empty)], low)

    def largest(amax: Tensor) -> Tensor:
        # As bit patterns: they order as amaxes do, and a NaN comes last.
        return world.all_reduce_max(amax.float().view(torch.int32)).view(torch.float32)

    read = source.fill(window, place, largest)
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = made.get(id(parameter), parameter)
    if left := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise WorldError(f"{len(left)} parameters were sharded without values and got none, first {left[0]}")
    model.load_state_dict({}, strict=False)  # FSDP2 takes the new shards as its own
    return _of_any_rank(lows, world), read


def _parameter(module: nn.Module, leaf: str) -> nn.Parameter:
    found = module._parameters[leaf]
    assert found is not None
    return found


def _of_any_rank(lows: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Those that are not all 0: the same on every rank."""
    here = [bool(low.to_local().any()) if hasattr(low, "to_local") else bool(low.any()) for low in lows.values()]
    there = world.all_reduce_max(torch.tensor(here, dtype=torch.int32)) if here else here
    return {name: low for (name, low), one in zip(lows.items(), there, strict=True) if one}
