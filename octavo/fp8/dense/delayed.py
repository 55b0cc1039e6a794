"""Delayed scaling: amax histories of x and dy, one row per layer (or expert).

The scale of a cast is computed from the largest recorded amax of earlier forwards (backwards for dy), so that a cast
need not compute its amax first. Values that exceed the history saturate, and the next scale includes them. An empty
history falls back to the current amax. Every training forward records one entry, also with gradient accumulation;
evaluation and recomputed forwards read the history and record nothing. NaN and infinity are never recorded.

A recomputed forward uses the scale of its original forward, even if the history has changed since. Each forward, also
in evaluation and under ``uncounted``, stores a fingerprint of its input with its scale, and the recomputation looks the
scale up. The order of autograd nodes distinguishes inputs that are equal bit for bit, such as dummy images.

Histories are plain tensors of the module, not buffers: DistributedDataParallel would overwrite buffers with rank 0's
and lose the records of other ranks. They move with the module to a device, are copied with it, and are not in its
``state_dict``; :mod:`octavo.fp8.delayed` adds them to a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo.base import accelerator
from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.dense.gemms import LayerGemms
from octavo.fp8.dense.inputs import CastRequest, Input, QuantizedPair
from octavo.fp8.dense.linear import Linear
from octavo.fp8.kernels.capture import is_capturing
from octavo.fp8.kernels.registry import Backend
from octavo.fp8.observe.recorder import LayerRecord

PREFIX = "fp8_amax_"  # followed by "x" or "dy", and by "_<parameter>" in modules of experts
HISTORIES_KEY = "_fp8_histories"  # the attribute of a module: dict of name -> [slots, ...]
_NUM_RECENT = 64  # forwards whose scale a recomputation can look up
_MAX_DISTANCE = 1 << 62  # exceeds every distance between autograd nodes
_INT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size in bytes


class History(NamedTuple):
    """The history of one layer, newest first.

    ``x`` and ``dy`` [length] are fp32 amaxes, 0 where nothing is recorded yet. ``recent`` [3, 64], int64, has the
    number of the autograd node, the fingerprint (0 if empty) and the bits of the scale of the last forwards.
    """

    x: Tensor
    dy: Tensor
    recent: Tensor


class DelayedScaling(NamedTuple):
    """The scaling of a :class:`~octavo.fp8.dense.gemms.LayerGemms`, by the histories of its module whose names end in
    ``suffix``."""

    histories: dict[str, Tensor]
    suffix: str

    def begin(self, x: Tensor, slot: int | None, training: bool, seen: LayerRecord) -> DelayedCasts:
        """Return the casts of one forward and its backward; they record their amaxes only in training."""
        return DelayedCasts(self.history(slot or 0, x.device), training and seen.counted, seen.recompute)

    def history(self, slot: int, device: torch.device) -> History:
        """Return the rows of one slot on ``device``. A forward on meta gets a copy, and the real rows stay where they
        are."""
        rows = []
        for key in History._fields:
            name = PREFIX + key + self.suffix
            tensor = move_tensor(self.histories[name], device)
            if device.type != "meta":
                self.histories[name] = tensor
            rows.append(tensor[slot])
        return History(*rows)

    def move_to(self, device: torch.device) -> None:
        """Move the histories to the device of the weights; their dtype never changes."""
        if device.type != "meta":
            self.histories.update({name: move_tensor(tensor, device) for name, tensor in self.histories.items()})


class DelayedCasts(NamedTuple):
    """The casts of one forward and its backward; ``record`` stores their amaxes, except in a recomputation."""

    rows: History
    record: bool
    recompute: bool

    def cast_x(self, x: Input, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair:
        """Cast the input of a layer [M, K] with the scale of its history."""
        return _cast_pair(partial(self._cast_x, x.matrix()), row, col)

    def cast_dy(self, dy: Tensor, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair:
        """Cast the gradient of a layer's output [M, N] with the scale of its history."""
        return _cast_pair(partial(self._cast_dy, dy), row, col)

    def _cast_x(self, x: Tensor, request: CastRequest, contracts: Sequence[int]) -> Sequence[Quantized]:
        """Cast x. A forward and its recomputation run the same operations, except writes, because selective
        checkpointing replays results by counting operations."""
        (backend, spec), rows = request, self.rows
        with torch.no_grad():
            amax = _amax(x)
            scale = _history_scale(rows.x, amax, spec)
            if not x.numel():
                return _quantize(backend, x, scale, spec, amax, contracts)
            fingerprint = _fingerprint(x)
            number = torch.autograd._get_sequence_nr() - 1  # the node of this forward has the latest number
            entry = torch.stack(
                [torch.full_like(fingerprint, number), fingerprint, scale.view(torch.int32).long()]
            ).view(3, 1)
            recent, new_row = torch.cat([entry, rows.recent[:, :-1]], 1), _push(rows.x, amax, amax.isfinite())
            if self.recompute:
                scale = _look_up_scale(rows.recent, fingerprint, *_recomputing_node(), scale)
            else:
                rows.recent.copy_(recent)
                if self.record:
                    rows.x.copy_(new_row)
                scale = _look_up_scale(recent, fingerprint, number, False, scale)  # this forward's entry
            return _quantize(backend, x, scale, spec, amax, contracts)

    def _cast_dy(self, dy: Tensor, request: CastRequest, contracts: Sequence[int]) -> Sequence[Quantized]:
        (backend, spec), rows = request, self.rows
        with torch.no_grad():
            amax = _amax(dy)
            scale = _history_scale(rows.dy, amax, spec)
            if self.record and dy.numel():
                rows.dy.copy_(_push(rows.dy, amax, amax.isfinite()))
            return _quantize(backend, dy, scale, spec, amax, contracts)


def _cast_pair(
    cast: Callable[[CastRequest, Sequence[int]], Sequence[Quantized]], row: CastRequest | None, col: CastRequest | None
) -> QuantizedPair:
    """Return the codes under both requests; equal requests share one cast, because each cast changes the history."""
    if row is not None and col is not None and row.spec == col.spec:
        first, second = cast(row, (1, 0))
        return first, second
    return None if row is None else cast(row, (1,))[0], None if col is None else cast(col, (0,))[0]


def _quantize(
    backend: Backend, x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor, contracts: Sequence[int]
) -> Sequence[Quantized]:
    """Cast x with a known scale, once in the layout for each of ``contracts``: (1,), (0,) or (1, 0)."""
    if len(contracts) == 2:
        return backend.quantize_both_with_scale(x, scale, spec, amax)
    return (backend.quantize_with_scale(x, scale, spec, amax, contracts[0]),)


def convert(module: nn.Linear, site: LayerGemms) -> Linear:
    """Convert a layer (:meth:`Linear.convert`), and attach histories if the recipe uses delayed scaling."""
    layer = Linear.convert(module, site)
    if site.recipe.delayed is not None:
        attach_histories(layer, site)
    return layer


def attach_histories(module: nn.Module, site: LayerGemms, slots: int = 1, suffix: str = "") -> None:
    """Attach empty histories of x and dy, [slots, length] each, to a module, and delayed scaling to its site."""
    assert site.recipe.delayed is not None
    weight, length = next(module.parameters(recurse=False)), site.recipe.delayed.length
    device = torch.device("cpu") if weight.is_meta else weight.device
    histories = module.__dict__.setdefault(HISTORIES_KEY, {})
    with torch.inference_mode(False):  # training writes them, even if they were created in inference mode
        for key in ("x", "dy"):
            histories[PREFIX + key + suffix] = torch.zeros(slots, length, device=device, dtype=torch.float32)
        histories[PREFIX + "recent" + suffix] = torch.zeros(slots, 3, _NUM_RECENT, device=device, dtype=torch.int64)
    site.scaling = DelayedScaling(histories, suffix)


def move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on ``device``; a copy is not an inference tensor, even if inference mode is on."""
    if tensor.device == device:
        return tensor
    with torch.inference_mode(False):
        return tensor.to(device)


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the amax histories of all layers with delayed scaling, fp32, by name.

    The dict is empty if there are no such layers. Save it in checkpoints: without it, the first steps after a resume
    cast with different scales.
    """
    return {name: b.detach().clone() for name, b in named_histories(model).items()}


def move_scaling(model: nn.Module, device: torch.device) -> None:
    """Move the amax histories of a model to ``device``, for a model whose weights were on the meta device."""
    for module in model.modules():
        histories = module.__dict__.get(HISTORIES_KEY)
        if histories is not None:
            histories.update({name: move_tensor(tensor, device) for name, tensor in histories.items()})


def load_scaling_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Restore the state that :func:`scaling_state` returned. Raises ValueError if its names or shapes differ from the
    model's."""
    histories = named_histories(model)
    missing, extra = sorted(histories.keys() - state.keys()), sorted(state.keys() - histories.keys())
    if missing or extra:
        raise ValueError(
            f"The amax histories do not belong to this model: {len(missing)} are missing"
            f"{_format_example(missing)}, {len(extra)} are unknown{_format_example(extra)}. Resume with the recipe "
            "that wrote the checkpoint."
        )
    for name, history in histories.items():
        if tuple(state[name].shape) != tuple(history.shape):
            raise ValueError(
                f"The amax history {name!r} has shape {list(state[name].shape)}, the model's has "
                f"{list(history.shape)}. Resume with the recipe that wrote the checkpoint."
            )
        history.copy_(state[name])


def reduce_scaling_state(model: nn.Module, group: torch.distributed.ProcessGroup | None = None) -> None:
    """Replace the histories of each rank by their elementwise maximum over the ranks of ``group`` (all by default).

    Collective: call it after a step on every rank of the group. The amax of a tensor is local to a rank; afterwards all
    ranks cast with the scales of the whole batch.
    """
    rows = list(named_histories(model).values())
    if rows:
        # With offloaded weights, the histories of layers that have not run may still be in host memory.
        device = next((row.device for row in rows if row.device.type != "cpu"), rows[0].device)
        flat = torch.cat([row.flatten().to(device) for row in rows])
        torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group=group)
        for row, reduced in zip(rows, flat.split([r.numel() for r in rows]), strict=True):
            row.copy_(reduced.view_as(row))


def scale_gradient_histories(model: nn.Module, factor: float) -> None:
    """Multiply the histories of dy by ``factor``, after the loss scale changed by that factor.

    With a power of two, the following casts produce unchanged codes.
    """
    for name, row in named_histories(model).items():
        if name.rpartition(".")[2].startswith(PREFIX + "dy"):
            row.mul_(factor)


def named_histories(model: nn.Module) -> dict[str, Tensor]:
    """Return the histories of x and dy by the names that they would have as buffers."""
    # Entries for recomputed forwards are left out, because they are valid for one step only.
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules()
        for name, tensor in module.__dict__.get(HISTORIES_KEY, {}).items()
        if not name.startswith(PREFIX + "recent")
    }


def _format_example(names: list[str]) -> str:
    return f" (such as {names[0]!r})" if names else ""


def _fingerprint(x: Tensor) -> Tensor:
    """Return an int64, never 0, that depends on all bits of x and on the order of its rows.

    Integer sums do not depend on the order of summation, so that the fingerprint is deterministic.
    """
    x, packed = x.detach().contiguous(), 8 // x.element_size()
    if x.shape[1] % packed == 0:  # the fast path: several values per integer
        words = (x if x.storage_offset() % packed == 0 else x.clone()).view(torch.int64)
    else:
        words = x.view(_INT_DTYPES[x.element_size()])
    return (words.sum(1) * _odd_multipliers(x)).sum().bitwise_or(1)


_odd_multiplier_cache: dict[
    tuple[torch.device, int], Tensor
] = {}  # by device and stream, on which creation precedes use


def _odd_multipliers(x: Tensor) -> Tensor:
    """Return 1, 3, 5, ..., int64, one for each row of x. Cached, unless a mode or a graph capture would own the
    tensor."""
    rows, device = x.shape[0], x.device
    if x.is_meta or is_capturing(x.device) or torch._C._len_torch_dispatch_stack():
        return torch.arange(1, 2 * rows, 2, device=device)
    stream = 0 if device.type == "cpu" else accelerator.stream_id(device)
    histories = _odd_multiplier_cache.get((device, stream))
    if histories is None or histories.shape[0] < rows:
        with torch.inference_mode(False):
            histories = _odd_multiplier_cache[device, stream] = torch.arange(1, 2 * rows, 2, device=device)
    return histories[:rows]


def _recomputing_node() -> tuple[int, bool]:
    """Return (the number of the autograd node whose backward recomputes, whether the original forwards have larger
    numbers). The node of a reentrant checkpoint precedes them; other checkpoints recompute for a later node."""
    node = torch._C._current_autograd_node()
    return (0, False) if node is None else (node._sequence_nr(), node.name() == "CheckpointFunctionBackward")


def _look_up_scale(recent: Tensor, fingerprint: Tensor, node: int, after: bool, default: Tensor) -> Tensor:
    """Return the scale stored for the same input, or ``default`` if there is none.

    Among equal inputs, the forward nearest before (or ``after``) the node is taken.
    """
    numbers, fingerprints, scales = recent.unbind(0)
    # A distance in the wrong direction is negative and wraps to a large number.
    distance = ((numbers - node) * (1 if after else -1)).bitwise_and(_MAX_DISTANCE - 1)
    best = distance.masked_fill(fingerprints != fingerprint, _MAX_DISTANCE).argmin(0, keepdim=True)
    matches = fingerprints.index_select(0, best) == fingerprint
    return torch.where(matches, scales.index_select(0, best).int().view(torch.float32), default).view(())


def _amax(x: Tensor) -> Tensor:
    """Return ``cast.amax(x)`` without a copy of x: negation is exact, and both a minimum and a maximum keep NaN."""
    if not x.numel():
        return cast.amax(x)
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low).float()


def _history_scale(row: Tensor, amax: Tensor, spec: CastSpec) -> Tensor:
    largest = row.max()
    return cast.scale_from_amax(torch.where(largest > 0, largest, amax), spec)


def _push(row: Tensor, value: Tensor, valid: Tensor) -> Tensor:
    """Return ``row`` with ``value`` inserted first if it is valid; the device decides this without synchronization."""
    return torch.where(valid, torch.cat([value.reshape(1), row[:-1]]), row)
