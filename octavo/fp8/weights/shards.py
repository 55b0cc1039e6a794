"""What of a parameter lies on this rank: the plain tensor behind it, and where that begins in the whole parameter.

Three kinds of parameter reach an optimizer: a plain one; FSDP2's DTensor, of which a rank holds the rows of its shard;
and a weight that keeps its FP8 codes beside the values they are cast from (a tensor subclass that names those values
``master``), sharded or not.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

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


def full(value: Any) -> Any:
    """All of a tensor, on every rank: a collective for a DTensor; anything else as it is."""
    return value.full_tensor() if is_dtensor(value) else value


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

    Raises ValueError for a DTensor that is split otherwise than FSDP2 does, in rows over one mesh dimension: the
    elements of a rank would not lie together.
    """
    total = parameter.numel()
    if not is_dtensor(parameter):
        return Span(0, total, total)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = parameter.placements  # type: ignore[attr-defined]
    if all(isinstance(p, Replicate) for p in placements):
        return Span(0, total, total)
    if not all(isinstance(p, Replicate) or p == Shard(0) for p in placements):
        raise ValueError(f"A parameter of shape {list(parameter.shape)} is split as {placements}, not in rows alone.")
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    row = parameter.shape[1:].numel()
    start = offset[0] * row
    return Span(start, start + shape[0] * row, total) if shape[0] else Span(start, start, total)


def rows_here(parameter: Tensor) -> tuple[int, int]:
    """The rows [first, last) of the whole parameter that lie on this rank: all of them, unless it is a DTensor."""
    if not is_dtensor(parameter):
        return 0, parameter.shape[0]
    row, mine = max(1, parameter.shape[1:].numel()), span(parameter)
    return mine.start // row, mine.stop // row
