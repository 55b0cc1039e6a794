"""The states of `fp8.AdamW`: names, shapes and dtypes, on one rank or several.

A state has `step` (0-d fp32 on the CPU, as in torch) and two kinds of tensors. An *element* tensor has one value per
element of the parameter, and the same shape and sharding. A *group* tensor has one row per group of 128 elements of the
flattened whole parameter that overlaps with this rank's part; ranks that share a group have the same row.

`moments.LAYOUT` has the tensors of each format. Master weights add element tensors: `master_low` int16 for "bf16+16",
and `master` fp32 for "fp32" with a BF16 parameter.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from octavo.fp8.arithmetic.moments import GROUP, LAYOUT, StateSpec
from octavo.fp8.weights.shards import Span, is_dtensor, plain, span

Group: TypeAlias = dict[str, Any]
"""A parameter group of an optimizer: settings by name."""
PER_GROUP = frozenset(spec.name for kind in LAYOUT.values() for spec in kind if spec.row is not None)
"""Names of the tensors with one row per group."""


def state_specs(states: str, master: str, dtype: torch.dtype) -> tuple[StateSpec, ...]:
    """Return the state tensors of a parameter of `dtype`, without `step`."""
    moment_specs = LAYOUT[states]
    if dtype == torch.bfloat16 and master == "fp32":
        return (*moment_specs, StateSpec("master", torch.float32))
    return (*moment_specs, StateSpec("master_low", torch.int16)) if master == "bf16+16" else moment_specs


def num_groups(elements: int) -> int:
    """Return the number of groups that begin in the first `elements` elements."""
    return -(-elements // GROUP)


def local_groups(local: Span) -> tuple[int, int]:
    """Return the range (first, last exclusive) of groups with elements on this rank."""
    first = local.start // GROUP
    return (first, num_groups(local.stop)) if local.stop > local.start else (first, first)


def shard_like(parameter: Tensor, local: Tensor) -> Tensor:
    """Wrap `local`, a plain tensor with the shape of this rank's part, as a DTensor if the parameter is one."""
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def init_state(parameter: Tensor, group: Group) -> dict[str, Tensor]:
    """Return the initial state of a parameter in the formats of its group: zero moments, and `master` equal to it."""
    here = plain(parameter)
    first, last = local_groups(span(parameter))
    state: dict[str, Tensor] = {"step": torch.zeros((), dtype=torch.float32)}
    for spec in state_specs(group["states"], group["master"], here.dtype):
        if spec.row is None:
            state[spec.name] = shard_like(parameter, torch.zeros(here.shape, dtype=spec.dtype, device=here.device))
        else:
            state[spec.name] = torch.zeros((last - first, *spec.row), dtype=spec.dtype, device=here.device)
    if "master" in state:
        plain(state["master"]).copy_(here)
    return state
