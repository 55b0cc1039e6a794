"""Delayed scaling: the amax histories of x and dy, one row per layer (or expert).

The scale of a cast comes from the largest amax of the recorded forwards (for dy: backwards), so that a cast does not
wait for its own amax; values that exceed the history saturate, and the next scale includes them. An empty history falls
back to the current amax. Every training forward records one entry, whatever the accumulation; evaluation and recomputed
forwards read the history and record nothing. NaN and infinity are never recorded.

A recomputed forward takes the scale of its original forward, even if the history has changed since. Each forward, also
in evaluation and under ``uncounted``, stores a fingerprint of its input with its scale, by which the recomputation
finds it. The order of autograd nodes distinguishes inputs that are equal bit for bit, such as dummy images.

Histories are plain tensors of the module and not buffers: DistributedDataParallel would overwrite buffers with rank 0's
and lose the records of other ranks. They follow the module to a device and into copies and are absent from
``state_dict``. :mod:`octavo.fp8.delayed` adds them to a checkpoint.
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
from octavo.fp8.dense.gemms import Site
from octavo.fp8.dense.inputs import CastRequest, Input, QuantizedPair
from octavo.fp8.dense.linear import Linear
from octavo.fp8.kernels.capture import is_capturing
from octavo.fp8.kernels.registry import Backend
from octavo.fp8.observe.recorder import LayerRecord

PREFIX = "fp8_amax_"  # names: PREFIX + "x" or "dy", then "_<parameter>" in modules of experts
HISTORIES_KEY = "_fp8_histories"  # the attribute of a module: dict of name -> [slots, ...]
_NUM_RECENT = 64  # forwards whose scale a recomputation can find
_MAX_DISTANCE = 1 << 62  # larger than any distance between autograd nodes
_INT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class History(NamedTuple):
    """One layer's rows: ``x`` and ``dy`` [length], fp32, newest first, 0 for no record yet; ``recent`` [3, 64], int64:
    number of the autograd node, fingerprint (0: empty) and bits of the scale of the last forwards, newest first."""

    x: Tensor
    dy: Tensor
    recent: Tensor


class DelayedScaling(NamedTuple):
    """The scaling of a :class:`~octavo.fp8.dense.gemms.Site`: its module's histories, ``held``, under ``suffix``."""

    held: dict[str, Tensor]
    suffix: str

    def begin(self, x: Tensor, slot: int | None, training: bool, seen: LayerRecord) -> DelayedCasts:
        """The casts of one forward and its backward: rows on the device of x, which only training writes."""
        return DelayedCasts(self.history(slot or 0, x.device), training and seen.counted, seen.recompute)

    def history(self, slot: int, device: torch.device) -> History:
        """The rows of one slot, on ``device``. A forward on meta gets a copy, so that the real rows stay on their
        device."""
        rows = []
        for key in History._fields:
            name = PREFIX + key + self.suffix
            tensor = move_tensor(self.held[name], device)
            if device.type != "meta":
                self.held[name] = tensor
            rows.append(tensor[slot])
        return History(*rows)

    def move_to(self, device: torch.device) -> None:
        """Histories follow the weights to their device, never to their dtype."""
        if device.type != "meta":
            self.held.update({name: move_tensor(tensor, device) for name, tensor in self.held.items()})


class DelayedCasts(NamedTuple):
    """The casts of one forward and its backward; ``record``: their amaxes, except in a recomputation."""

    rows: History
    record: bool
    recompute: bool

    def cast_x(self, x: Input, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair:
        """The input of a layer [M, K] by its history."""
        return _cast_pair(partial(self._cast_x, x.matrix()), row, col)

    def cast_dy(self, dy: Tensor, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair:
        """The gradient of a layer's output [M, N] by its history."""
        return _cast_pair(partial(self._cast_dy, dy), row, col)

    def _cast_x(self, x: Tensor, request: CastRequest, contracts: Sequence[int]) -> Sequence[Quantized]:
        """A forward and its recomputation run the same operations, except writes: selective checkpointing replays
        results by counting operations."""
        (backend, spec), rows = request, self.rows
        with torch.no_grad():
            amax = _amax(x)
            scale = _history_scale(rows.x, amax, spec)
            if not x.numel():
                return _quantize(backend, x, scale, spec, amax, contracts)
            print_ = _fingerprint(x)
            number = torch.autograd._get_sequence_nr() - 1  # the node of this forward has the latest number
            entry = torch.stack([torch.full_like(print_, number), print_, scale.view(torch.int32).long()]).view(3, 1)
            recent, longer = torch.cat([entry, rows.recent[:, :-1]], 1), _push(rows.x, amax, amax.isfinite())
            if self.recompute:
                scale = _look_up_scale(rows.recent, print_, *_recomputing_node(), scale)
            else:
                rows.recent.copy_(recent)
                if self.record:
                    rows.x.copy_(longer)
                scale = _look_up_scale(recent, print_, number, False, scale)  # this forward's entry
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
    """The codes under both requests; equal requests share one cast, because each cast changes the history."""
    if row is not None and col is not None and row.spec == col.spec:
        first, second = cast(row, (1, 0))
        return first, second
    return None if row is None else cast(row, (1,))[0], None if col is None else cast(col, (0,))[0]


def _quantize(
    backend: Backend, x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor, contracts: Sequence[int]
) -> Sequence[Quantized]:
    """x under a known scale, in the layout for each of ``contracts``: (1,), (0,) or (1, 0)."""
    if len(contracts) == 2:
        return backend.quantize_both_with_scale(x, scale, spec, amax)
    return (backend.quantize_with_scale(x, scale, spec, amax, contracts[0]),)


def convert(module: nn.Linear, site: Site) -> Linear:
    """:meth:`Linear.convert`, with histories if the recipe uses delayed scaling."""
    layer = Linear.convert(module, site)
    if site.recipe.delayed is not None:
        attach_histories(layer, site)
    return layer


def attach_histories(module: nn.Module, site: Site, slots: int = 1, suffix: str = "") -> None:
    """Add empty histories to a module, [slots, length] for x and dy, and delayed scaling to its site."""
    assert site.recipe.delayed is not None
    weight, length = next(module.parameters(recurse=False)), site.recipe.delayed.length
    device = torch.device("cpu") if weight.is_meta else weight.device
    held = module.__dict__.setdefault(HISTORIES_KEY, {})
    with torch.inference_mode(False):  # training writes them, even if they were created in inference mode
        for key in ("x", "dy"):
            held[PREFIX + key + suffix] = torch.zeros(slots, length, device=device, dtype=torch.float32)
        held[PREFIX + "recent" + suffix] = torch.zeros(slots, 3, _NUM_RECENT, device=device, dtype=torch.int64)
    site.scaling = DelayedScaling(held, suffix)


def move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``; a copy is an ordinary tensor, also inside inference mode."""
    if tensor.device == device:
        return tensor
    with torch.inference_mode(False):
        return tensor.to(device)


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """The amax histories of all layers with delayed scaling, by name (copies, fp32); empty without such layers.

    A checkpoint needs them: without them the first steps after a resume cast with other scales.
    """
    return {name: b.detach().clone() for name, b in _named_histories(model).items()}


def move_scaling(model: nn.Module, device: torch.device) -> None:
    """Move the amax histories of a model to ``device``, for a model whose weights were on the meta device."""
    for module in model.modules():
        held = module.__dict__.get(HISTORIES_KEY)
        if held is not None:
            held.update({name: move_tensor(tensor, device) for name, tensor in held.items()})


def load_scaling_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Restore what :func:`scaling_state` returned. Raises ValueError if names or shapes differ from the model's."""
    histories = _named_histories(model)
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
    """Give every rank of ``group`` (None: all) the elementwise maximum of the histories of all ranks.

    A collective: call it after a step, on every rank of the group.

    Per-tensor amax is local to a rank; afterwards all ranks cast with the scales of the whole batch.
    """
    rows = list(_named_histories(model).values())
    if rows:
        # With offloaded weights, the histories of layers that have not run may still be in host memory.
        device = next((row.device for row in rows if row.device.type != "cpu"), rows[0].device)
        flat = torch.cat([row.flatten().to(device) for row in rows])
        torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group=group)
        for row, reduced in zip(rows, flat.split([r.numel() for r in rows]), strict=True):
            row.copy_(reduced.view_as(row))


def scale_gradient_histories(model: nn.Module, factor: float) -> None:
    """Multiply the histories of dy by ``factor``: for a loss whose scale before backward changes by that factor.

    A power of two changes no code of the following casts.
    """
    for name, row in _named_histories(model).items():
        if name.rpartition(".")[2].startswith(PREFIX + "dy"):
            row.mul_(factor)


def _named_histories(model: nn.Module) -> dict[str, Tensor]:
    """The histories of x and dy, by the names that buffers would have."""
    # Notes for recomputed forwards are left out: they serve one step only.
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules()
        for name, tensor in module.__dict__.get(HISTORIES_KEY, {}).items()
        if not name.startswith(PREFIX + "recent")
    }


def _format_example(names: list[str]) -> str:
    return f" (such as {names[0]!r})" if names else ""


def _fingerprint(x: Tensor) -> Tensor:
    """An int64 that depends on all bits of x and their rows, never 0. Integer sums do not depend on their order."""
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
    """1, 3, 5, ... for each row of x, int64. Cached, except where a mode or a graph capture would own the tensor."""
    rows, device = x.shape[0], x.device
    if x.is_meta or is_capturing(x.device) or torch._C._len_torch_dispatch_stack():
        return torch.arange(1, 2 * rows, 2, device=device)
    stream = 0 if device.type == "cpu" else accelerator.stream_id(device)
    held = _odd_multiplier_cache.get((device, stream))
    if held is None or held.shape[0] < rows:
        with torch.inference_mode(False):
            held = _odd_multiplier_cache[device, stream] = torch.arange(1, 2 * rows, 2, device=device)
    return held[:rows]


def _recomputing_node() -> tuple[int, bool]:
    """The number of the node whose backward recomputes, and whether the original forwards have larger numbers: the node
    of a reentrant checkpoint precedes them, while other checkpoints recompute for a node after them."""
    node = torch._C._current_autograd_node()
    return (0, False) if node is None else (node._sequence_nr(), node.name() == "CheckpointFunctionBackward")


def _look_up_scale(recent: Tensor, print_: Tensor, node: int, after: bool, otherwise: Tensor) -> Tensor:
    """The scale stored for the same input; among equal inputs, of the forward nearest before (or after) the node."""
    numbers, prints, scales = recent.unbind(0)
    # A distance in the wrong direction is negative and wraps to a large number.
    distance = ((numbers - node) * (1 if after else -1)).bitwise_and(_MAX_DISTANCE - 1)
    best = distance.masked_fill(prints != print_, _MAX_DISTANCE).argmin(0, keepdim=True)
    matches = prints.index_select(0, best) == print_
    return torch.where(matches, scales.index_select(0, best).int().view(torch.float32), otherwise).view(())


def _amax(x: Tensor) -> Tensor:
    """``cast.amax`` without a copy of x: negation is exact, and a minimum keeps NaN like a maximum."""
    if not x.numel():
        return cast.amax(x)
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low).float()


def _history_scale(row: Tensor, amax: Tensor, spec: CastSpec) -> Tensor:
    largest = row.max()
    return cast.scale_from_amax(torch.where(largest > 0, largest, amax), spec)


def _push(row: Tensor, value: Tensor, valid: Tensor) -> Tensor:
    """``row`` with ``value`` first, if it is valid, which the device decides without synchronization."""
    return torch.where(valid, torch.cat([value.reshape(1), row[:-1]]), row)
