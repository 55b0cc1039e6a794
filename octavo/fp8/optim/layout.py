"""What `fp8.AdamW` keeps of each parameter: names, shapes and dtypes, on one rank or over several.

A state is `step` (0-d fp32 on the CPU, as torch's) and two kinds of tensors. An *element* tensor has a value for every
element of the parameter, in its shape, sharded like it. A *group* tensor has a row for every group of 128 elements of
the flattened whole parameter that this rank's part touches; ranks that share a group hold the same row.

Which there are, `moments.LAYOUT` says for each format of states; master weights add element tensors: `master_low` int16
for "bf16+16", `master` fp32 for "fp32" with a BF16 parameter.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from octavo.fp8.arithmetic.moments import GROUP, LAYOUT, StateSpec
from octavo.fp8.weights.shards import Span, is_dtensor, plain, span

Group: TypeAlias = dict[str, Any]
"""A parameter group of an optimizer: its settings by name, whose values torch types as Any."""
PER_GROUP = frozenset(spec.name for kind in LAYOUT.values() for spec in kind if spec.row is not None)
"""Names of the tensors with a row a group."""


def state_specs(states: str, master: str, dtype: torch.dtype) -> tuple[StateSpec, ...]:
    """The state tensors of a parameter of `dtype`, without `step`."""
    moment_specs = LAYOUT[states]
    if dtype == torch.bfloat16 and master == "fp32":
        return (*moment_specs, StateSpec("master", torch.float32))
    return (*moment_specs, StateSpec("master_low", torch.int16)) if master == "bf16+16" else moment_specs


def num_groups(elements: int) -> int:
    """Groups that begin within the first `elements` elements."""
    return -(-elements // GROUP)


def local_groups(mine: Span) -> tuple[int, int]:
    """Groups first to last (exclusive) of the whole parameter that have an element on this rank."""
    first = mine.start // GROUP
    return (first, num_groups(mine.stop)) if mine.stop > mine.start else (first, first)


def shard_like(parameter: Tensor, local: Tensor) -> Tensor:
    """`local`, a plain tensor of the shape of this rank's part, as the parameter is: a DTensor where that is one."""
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
    """A parameter's state before its first step, in its group's formats: both moments zero, its `master` its value."""
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
