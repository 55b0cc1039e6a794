"""This rank's part of a parameter: its plain tensor, and where that begins in the whole parameter.

Optimizers see three kinds of parameters: plain ones; FSDP2's DTensors, of which a rank has the rows of its shard; and
weights that have FP8 codes and the values that they are cast from (a tensor subclass whose ``master`` has the values),
sharded or not. Experts may be distributed over one mesh dimension before FSDP2 shards them over another: each rank's
rows are then still contiguous.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def is_dtensor(value: object) -> bool:
    """Return True for a DTensor. Does not import torch.distributed if it is not imported yet."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(value: Any) -> Any:
    """Return this rank's part of a parameter: the local tensor of a DTensor, anything else unchanged."""
    return value._local_tensor if is_dtensor(value) else value


def is_whole(value: object) -> bool:
    """Return True if all of a weight is on this rank, so that a GEMM may multiply by it; False for a DTensor."""
    return not is_dtensor(value)


def mesh_of(value: Any) -> DeviceMesh | None:
    """Return the device mesh of a DTensor; None for anything else."""
    return value.device_mesh if is_dtensor(value) else None


def full(value: Any) -> Any:
    """Return the whole tensor on every rank; anything except a DTensor unchanged. Collective call for a DTensor."""
    if not is_dtensor(value):
        return value
    over = sharded_over(value)
    if len(over) < 2 or not is_plain_tensor(value._local_tensor):
        return value.full_tensor()
    whole = value._local_tensor  # torch gathers twice too, with a warning on every rank
    for dim in reversed(over):
        whole = _gather_rows(whole, value.device_mesh.get_group(dim))
    return whole


def _gather_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Return the concatenated rows of all ranks of a group, which have the same number of rows."""
    whole = rows.new_empty((torch.distributed.get_world_size(group) * rows.shape[0], *rows.shape[1:]))
    torch.distributed.all_gather(list(whole.split(rows.shape[0])), rows.contiguous(), group=group)
    return whole


def local_experts(value: Tensor) -> Tensor:
    """Return this rank's experts, differentiable, of a parameter whose experts are distributed over ranks.

    Raises RuntimeError while the parameter is sharded by FSDP2.
    """
    if not is_dtensor(value) or len(value.placements) > 1:  # type: ignore[attr-defined]
        raise RuntimeError(
            f"A parameter of experts of shape {list(value.shape)} is not gathered where it is multiplied by. Call the "
            "module that fully_shard wrapped, so that its hooks gather it first."
        )
    return _LocalTensor.apply(value)


class _LocalTensor(torch.autograd.Function):
    """Returns the local tensor of a DTensor. (``to_local`` creates a view, which for FP8 codes would be values.)"""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Tensor:
        ctx.spec = value.device_mesh, value.placements, value.shape, value.stride()
        return value._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = ctx.spec
        return DTensor.from_local(gradient, mesh, placements, run_check=False, shape=shape, stride=stride)


def sharded_over(parameter: Any) -> tuple[int, ...]:
    """Return the mesh dimensions over which the rows of a DTensor are split, in the order of the splits: the last
    dimension first; two for experts that are distributed over ranks, else one. Raises ValueError for other splits.

    ``_StridedShard``, torch's placement of rows that were split before, does not report itself as a shard.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    over = tuple(dim for dim in reversed(range(mesh.ndim)) if not placements[dim].is_replicate())
    before = 1
    for dim in over:
        placement = placements[dim]
        if getattr(placement, "dim", None) != 0 or getattr(placement, "split_factor", 1) != before:
            raise ValueError(
                f"A parameter of shape {list(parameter.shape)} is split as {placements}, not only in rows."
            )
        before *= mesh.size(dim)
    return over


def distribute_like(value: Tensor, like: Any) -> Tensor:
    """Return a tensor that every rank has whole as a DTensor with the placements of ``like``, without communication."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def reshard(model: nn.Module) -> None:
    """Make FSDP2 restore the sharded parameters, if a forward left gathered ones in their place."""
    model.state_dict(keep_vars=True)


class Span(NamedTuple):
    """Elements ``start`` to ``stop`` of the flattened whole parameter of ``total`` elements."""

    start: int
    stop: int
    total: int


def is_plain_tensor(x: object) -> bool:
    """Return True for a plain tensor or parameter, False for a subclass with its own operations. A fake tensor counts
    as plain."""
    return type(x) in (Tensor, nn.Parameter) or hasattr(x, "fake_mode")


def plain(parameter: Tensor) -> Tensor:
    """Return the plain tensor with this rank's values in high precision; writing to it writes the parameter."""
    here = parameter.detach()
    if is_dtensor(here):
        here = here.to_local()  # type: ignore[attr-defined]
    return getattr(here, "master", here)


def span(parameter: Tensor) -> Span:
    """Return the elements of the whole parameter on this rank.

    Raises ValueError unless a DTensor is split in contiguous rows, as by FSDP2 over one mesh dimension, also after a
    split in rows over another dimension.
    """
    total = parameter.numel()
    if not is_dtensor(parameter):
        return Span(0, total, total)
    mesh, rows = parameter.device_mesh, parameter.shape[0] if parameter.ndim else 1  # type: ignore[attr-defined]
    here = mesh.get_coordinate()
    first, last = _split_rows(rows, [(mesh.size(dim), here[dim]) for dim in sharded_over(parameter)])
    row = parameter.shape[1:].numel()
    return Span(first * row, last * row, total)


def shard_borders(parameter: Any) -> tuple[int, ...]:
    """Return the rows of a DTensor at which another rank's rows begin, in order; equal on all ranks."""
    sizes = tuple(parameter.device_mesh.size(dim) for dim in sharded_over(parameter))
    return row_borders(parameter.shape[0], sizes)


@lru_cache(maxsize=4096)
def row_borders(rows: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return :func:`shard_borders` for ``rows`` rows that are split into ``sizes[0]`` parts, each of them into
    ``sizes[1]``, and so on."""
    places = product(*(range(size) for size in sizes))
    begin = {_split_rows(rows, list(zip(sizes, place, strict=True)))[0] for place in places}
    return tuple(sorted(begin - {0, rows}))


def _split_rows(rows: int, cuts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the rows [first, last) that remain of ``rows`` after each of the cuts (number of parts, selected part),
    divided like `torch.chunk`."""
    first, last = 0, rows
    for parts, part in cuts:
        each = -(-(last - first) // parts)
        first, last = (min(first + each * place, last) for place in (part, part + 1))
    return first, last


def local_rows(parameter: Tensor) -> tuple[int, int]:
    """Return the rows [first, last) of the whole parameter on this rank: all of them, unless it is a DTensor."""
    if not is_dtensor(parameter):
        return 0, parameter.shape[0]
    row, elements = max(1, parameter.shape[1:].numel()), span(parameter)
    return elements.start // row, elements.stop // row
