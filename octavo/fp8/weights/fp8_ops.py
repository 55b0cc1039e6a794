"""torch operations on FP8 weights that return FP8 weights. Other operations, and those that return None, see values.

The result of a weight with a master has its own master, sliced or copied: FSDP2 and ``module.to()`` use this. The
result of a weight of codes has codes: aliases, transposes, single experts; for frozen codes also rows and copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.fp8.weights.fp8_codes import Codes
from octavo.fp8.weights.fp8_tensor import Fp8Weight

__all__ = ["Fp8Weight"]  # importing it from here registers its operations

aten = torch.ops.aten


def _implements(*operations: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        Fp8Weight.operations.update(dict.fromkeys(operations, function))
        return function

    return register


@_implements(aten.detach.default, aten.alias.default)
def _alias(weight: Fp8Weight, *_: object, **__: object) -> Fp8Weight:
    state = weight.held or weight.stored
    assert state is not None
    return Fp8Weight(weight, weight.source, state)


@_implements(aten.as_strided.default)
def _as_strided(
    weight: Fp8Weight, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Fp8Weight | None:
    is_unchanged = tuple(size) == tuple(weight.shape) and tuple(stride) == weight.stride() and not offset
    return _alias(weight) if is_unchanged else None


@_implements(aten.view.default)
def _view(weight: Fp8Weight, size: Sequence[int]) -> Tensor | None:
    """Return the codes for FSDP2's flat view of the padded shard, by which it detects that a shard was moved."""
    if weight.frozen is None:
        return None
    if tuple(size) == tuple(weight.shape):
        return weight.detach()
    flat = list(size) in ([-1], [weight.numel()])
    return weight.first_tensor().view(-1) if flat and weight.frozen.shard else None


# Rows: how FSDP2 splits weights ---------------------------------------------------------------------------------------


@_implements(aten.slice.Tensor)
def _slice(
    weight: Fp8Weight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Fp8Weight | None:
    if dim != 0 or step != 1:
        return None
    if weight.held is not None:
        return Fp8Weight.of(aten.slice.Tensor(weight.held.tensor.detach(), dim, start, end), weight.source)
    codes = _row_codes(weight)
    if codes is None:
        return None
    first, last, _ = slice(start, end).indices(weight.shape[0])
    last = max(first, last)
    shape = (last - first, *weight.shape[1:])
    return Fp8Weight.from_codes(codes.rows(first, last), shape, weight.dtype, weight.device)


@_implements(aten.narrow.default)
def _narrow(weight: Fp8Weight, dim: int, start: int, length: int) -> Fp8Weight | None:
    return _slice(weight, dim, start, start + length) if weight.frozen else None


@_implements(aten.split.Tensor)
def _split(weight: Fp8Weight, size: int, dim: int = 0) -> list[Fp8Weight | None] | None:
    sizes = [min(size, weight.shape[0] - at) for at in range(0, weight.shape[0], size)]
    return _split_sizes(weight, sizes, dim)


@_implements(aten.split_with_sizes.default)
def _split_sizes(weight: Fp8Weight, sizes: list[int], dim: int = 0) -> list[Fp8Weight | None] | None:
    if _row_codes(weight) is None or dim != 0:
        return None
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_slice(weight, 0, at, at + size) for at, size in zip(starts, sizes, strict=True)]


def _row_codes(weight: Fp8Weight) -> Codes | None:
    """Return frozen codes with the same rows (or experts) as the weight; None otherwise."""
    return None if weight.is_transposed and weight.dim() == 2 else weight.frozen


# Copies ---------------------------------------------------------------------------------------------------------------


@_implements(aten.clone.default)
def _clone(weight: Fp8Weight, **how: Any) -> Fp8Weight | None:
    if weight.held is not None:
        return weight.map(partial(aten.clone.default, **how))
    return weight.map(torch.clone) if weight.frozen else None


@_implements(aten._to_copy.default)
def _to_copy(weight: Fp8Weight, **how: Any) -> Fp8Weight | None:
    dtype, device = how.get("dtype"), how.get("device")
    if weight.held is not None:
        master = aten._to_copy.default(weight.held.tensor.detach(), **how)
        return Fp8Weight.of(master, weight.source)
    if weight.frozen is None:
        return None
    if dtype is not None and dtype is not weight.dtype:
        if weight.frozen.shard:  # a module converts its shards this way; other callers get values
            weight.refuse_dtype(dtype)
        return None
    blocking = bool(how.get("non_blocking", False))
    target = weight.device if device is None else device
    return weight.map(lambda t: t.to(target, non_blocking=blocking, copy=True))


@_implements(aten._pin_memory.default)
def _pin(weight: Fp8Weight, device: object = None) -> Fp8Weight | None:
    return weight.map(lambda t: t.pin_memory()) if weight.frozen else None


@_implements(aten.is_pinned.default)
def _is_pinned(weight: Fp8Weight, device: object = None) -> bool | None:
    return all(q.data.is_pinned() for q in weight.frozen.codes) if weight.frozen else None


@_implements(aten.copy_.default)
def _copy(weight: object, source: object, non_blocking: bool = False) -> Fp8Weight | None:
    if not isinstance(weight, Fp8Weight) or not weight.frozen:
        return None
    weight.copy_from(source)
    return weight


# Other views of codes -------------------------------------------------------------------------------------------------


@_implements(aten.t.default, aten.transpose.int)
def _transpose(weight: Fp8Weight, *dims: int) -> Fp8Weight | None:
    last = weight.dim() - 1
    if weight.stored is None or (dims and {d % weight.dim() for d in dims} != {last - 1, last}):
        return None
    like = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta").mT
    return Fp8Weight(like, weight.source, weight.stored.transposed(), weight.device)


@_implements(aten.select.int)
def _select(weight: Fp8Weight, dim: int, index: int) -> Fp8Weight | None:
    return None if weight.stored is None or weight.dim() != 3 or dim != 0 else weight.expert(index)


@_implements(aten.unbind.int)
def _unbind(weight: Fp8Weight, dim: int = 0) -> list[Fp8Weight] | None:
    if weight.stored is None or weight.dim() != 3 or dim != 0 or not weight.shape[0]:
        return None
    return [weight.expert(i) for i in range(weight.shape[0])]


# Tensors of the same shape: nothing is dequantized for them -----------------------------------------------------------


def _like(op: Any, weight: Fp8Weight, *args: Any, **how: Any) -> Any:
    """Apply ``op`` to a placeholder with the weight's shape, dtype and device, and one element of memory."""
    return op(torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape), *args, **how)


for _op in (
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_ones.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_full.default,
):
    Fp8Weight.operations[_op] = partial(_like, _op)


@_implements(aten.new_zeros.default)
def _new_zeros(weight: Fp8Weight, size: Sequence[int], **how: Any) -> Any:
    """Return a master of zeros or, for frozen codes, an empty shard that ``copy_`` fills, if the width is unchanged."""
    changes = [v for k, v in how.items() if v is not None and k != "pin_memory"]
    if not changes and len(size) == weight.dim() and tuple(size[1:]) == tuple(weight.shape[1:]):
        if weight.held is not None:
            return Fp8Weight.of(weight.held.tensor.new_zeros(size), weight.source)
        if _row_codes(weight) is not None:
            codes = Codes([], weight.source, weight.source.needs[0].transposed, frozen=True, shard=True)
            return Fp8Weight.from_codes(codes, size, weight.dtype, weight.device)
    return _like(aten.new_zeros.default, weight, size, **how)
