"""What of a parameter lies on this rank: the plain tensor behind it, and where that begins in the whole parameter.

Three kinds of parameter reach an optimizer: a plain one; FSDP2's DTensor, of which a rank holds the rows of its shard;
and a weight that keeps its FP8 codes beside the values they are cast from (a tensor subclass that names those values
``master``), sharded or not. Experts may be dealt to the ranks of one mesh dimension before FSDP2 shards them over
another: each rank's rows then still lie together.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def is_dtensor(value: object) -> bool:
    """True for a DTensor, without importing torch.distributed where nobody else has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(value: Any) -> Any:
    """What of a parameter lies on this rank: the local tensor of a DTensor, anything else as it is."""
    return value._local_tensor if is_dtensor(value) else value


def is_whole(value: object) -> bool:
    """Whether all of a weight is here, so that a GEMM may multiply by it; False for a DTensor."""
    return not is_dtensor(value)


def mesh_of(value: Any) -> Any:
    """The ranks that share a DTensor; None for anything else."""
    return value.device_mesh if is_dtensor(value) else None


def full(value: Any) -> Any:
    """All of a tensor, on every rank: a collective for a DTensor; anything else as it is."""
    if not is_dtensor(value):
        return value
    over = sharded_over(value)
    if len(over) < 2 or not ordinary(value._local_tensor):
        return value.full_tensor()
    whole = value._local_tensor  # torch gathers twice as well, and warns of it on every rank
    for dim in reversed(over):
        whole = _gathered(whole, value.device_mesh.get_group(dim))
    return whole


def _gathered(rows: Tensor, group: Any) -> Tensor:
    """The rows of all ranks of a group, as many of each, one behind the other."""
    whole = rows.new_empty((torch.distributed.get_world_size(group) * rows.shape[0], *rows.shape[1:]))
    torch.distributed.all_gather(list(whole.split(rows.shape[0])), rows.contiguous(), group=group)
    return whole


def experts_here(value: Tensor) -> Tensor:
    """Of a parameter of experts that are dealt to ranks, those of this rank, for its GEMMs: the local tensor, through
    which the gradient goes.

    Raises RuntimeError while FSDP2 holds it sharded.
    """
    if not is_dtensor(value) or len(value.placements) > 1:  # type: ignore[attr-defined]
        raise RuntimeError(
            f"A parameter of experts of shape {list(value.shape)} is not gathered where it is multiplied by. Call the "
            "module that fully_shard wrapped, so that its hooks gather it first."
        )
    return _Here.apply(value)


class _Here(torch.autograd.Function):
    """The local tensor of a DTensor. (``to_local`` takes a view, which of FP8 codes would be their values.)"""

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
    """The dimensions of its mesh over which a DTensor is split in rows, in the order in which they were: the last one
    first. One, or two of experts that are dealt to ranks. Raises ValueError where it is split otherwise.

    torch's placement of rows that were split before, ``_StridedShard``, says of itself that it is no shard.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    over = tuple(dim for dim in reversed(range(mesh.ndim)) if not placements[dim].is_replicate())
    before = 1
    for dim in over:
        placement = placements[dim]
        if getattr(placement, "dim", None) != 0 or getattr(placement, "split_factor", 1) != before:
            raise ValueError(
                f"A parameter of shape {list(parameter.shape)} is split as {placements}, not in rows alone."
            )
        before *= mesh.size(dim)
    return over


def distributed(value: Tensor, like: Any) -> Tensor:
    """A tensor that every rank has whole, as a DTensor cut like ``like``; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def reshard(model: nn.Module) -> None:
    """Let FSDP2 put the sharded parameters back, if a forward left gathered ones in their place."""
    model.state_dict(keep_vars=True)


class Span(NamedTuple):
    """Elements ``start`` to ``stop`` of the flattened whole parameter of ``total`` elements."""

    start: int
    stop: int
    total: int


def ordinary(x: object) -> bool:
    """Whether this is a tensor or a parameter as torch makes them, not of a subclass with operations of its own. A fake
    tensor is, too: it has all but the values."""
    return type(x) in (Tensor, nn.Parameter) or hasattr(x, "fake_mode")


def plain(parameter: Tensor) -> Tensor:
    """The ordinary tensor that holds this rank's values in high precision: writing into it writes the parameter."""
    here = parameter.detach()
    if is_dtensor(here):
        here = here.to_local()  # type: ignore[attr-defined]
    return getattr(here, "master", here)


def span(parameter: Tensor) -> Span:
    """Which elements of the whole parameter this rank holds.

    Raises ValueError for a DTensor that is split otherwise than in rows, of which each rank has some that follow one
    another: as FSDP2 does, over one mesh dimension, or over another one what was dealt out in rows.
    """
    total = parameter.numel()
    if not is_dtensor(parameter):
        return Span(0, total, total)
    mesh, rows = parameter.device_mesh, parameter.shape[0] if parameter.ndim else 1  # type: ignore[attr-defined]
    here = mesh.get_coordinate()
    first, last = _part(rows, [(mesh.size(dim), here[dim]) for dim in sharded_over(parameter)])
    row = parameter.shape[1:].numel()
    return Span(first * row, last * row, total)


def borders(parameter: Any) -> tuple[int, ...]:
    """The rows of a DTensor at which those of another rank begin, in order; the same on every rank."""
    sizes = tuple(parameter.device_mesh.size(dim) for dim in sharded_over(parameter))
    return borders_of(parameter.shape[0], sizes)


@lru_cache(maxsize=4096)
def borders_of(rows: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The same of so many rows that are cut into so many parts, and each of these again."""
    places = product(*(range(size) for size in sizes))
    begin = {_part(rows, list(zip(sizes, place, strict=True)))[0] for place in places}
    return tuple(sorted(begin - {0, rows}))


def _part(rows: int, cuts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The rows [first, last) that are left of so many after each of the cuts: (into how many parts, the part that is
    kept), divided as `torch.chunk` does."""
    first, last = 0, rows
    for parts, part in cuts:
        each = -(-(last - first) // parts)
        first, last = (min(first + each * place, last) for place in (part, part + 1))
    return first, last


def rows_here(parameter: Tensor) -> tuple[int, int]:
    """The rows [first, last) of the whole parameter that lie on this rank: all of them, unless it is a DTensor."""
    if not is_dtensor(parameter):
        return 0, parameter.shape[0]
    row, mine = max(1, parameter.shape[1:].numel()), span(parameter)
    return mine.start // row, mine.stop // row
