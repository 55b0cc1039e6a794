"""Delayed scaling: the amax histories of x and dy, one row a layer (or an expert).

The scale of a cast comes from the largest amax of the recorded forwards (for dy: backwards), so that a cast need not
wait for its own amax; values that outgrow the history saturate, and the next history knows. An empty history falls
back to the current amax. One entry is recorded per training forward, whatever the accumulation; evaluation reads the
history and records nothing, as does a recomputed forward, which finds the scale of its original by its amax. NaN and
infinity never enter.

Histories are non-persistent buffers: they follow the module to a device and into copies and are absent from
``state_dict``. :func:`scaling_state` takes them into a checkpoint.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.fp8 import cast
from octavo.fp8.cast import CastSpec, Quantized
from octavo.fp8.recipe import Delayed

PREFIX = "fp8_amax_"  # buffers: PREFIX + "x", "dy" or "recent", with "_<parameter>" behind it in modules of experts
_RECENT = 64  # how many forwards back a recomputation can find its scale


class History(NamedTuple):
    """One layer's rows: ``x`` and ``dy`` [length], newest first, 0 for not yet; ``recent`` [2, 64]: amax and scale of
    the last forwards, newest first."""

    x: Tensor
    dy: Tensor
    recent: Tensor


def attach(module: nn.Module, delayed: Delayed, slots: int = 1, suffix: str = "") -> None:
    """Give a module empty histories: [slots, length] for x and dy."""
    weight = next(module.parameters(recurse=False))
    shapes = {"x": (slots, delayed.length), "dy": (slots, delayed.length), "recent": (slots, 2, _RECENT)}
    for key, shape in shapes.items():
        empty = torch.zeros(shape, dtype=torch.float32, device=weight.device)
        module.register_buffer(PREFIX + key + suffix, empty, persistent=False)


def history(module: nn.Module, slot: int, device: torch.device, suffix: str = "") -> History:
    """The rows of one slot; buffers that a meta device left without memory start empty."""
    rows = []
    for key in History._fields:
        buffer = module._buffers[PREFIX + key + suffix]
        assert buffer is not None
        if buffer.device != device:
            buffer = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            module._buffers[PREFIX + key + suffix] = buffer
        rows.append(buffer[slot])
    return History(*rows)


def keep_fp32(module: nn.Module, before: dict[str, Tensor]) -> None:
    """After ``module._apply``: histories follow the device, never the dtype."""
    for name, old in before.items():
        new = module._buffers[name]
        assert new is not None
        if old.is_meta and not new.is_meta:
            module._buffers[name] = torch.zeros_like(old, device=new.device)
        elif new.dtype != old.dtype:
            module._buffers[name] = old.to(new.device)


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {n: b for n, b in module._buffers.items() if n.startswith(PREFIX) and b is not None}


def quantize_x(x: Tensor, spec: CastSpec, rows: History, record: bool, recompute: bool) -> Quantized:
    """Cast the input of a layer [M, K] by its history; ``record`` the amax, unless this is a recomputation."""
    with torch.no_grad():
        amax = cast.amax(x)
        scale = _scale(rows.x, amax, spec)
        if recompute:
            same = rows.recent[0] == amax
            newest = same.to(torch.uint8).argmax()  # the first of the equal ones
            scale = torch.where(same.any(), rows.recent[1, newest], scale)
        elif record and x.numel():
            _push(rows.x, amax, amax.isfinite())
            _push(rows.recent[0], amax, amax.isfinite())
            _push(rows.recent[1], scale, amax.isfinite())
        return cast.quantize_with_scale(x, scale, spec, amax)


def quantize_dy(dy: Tensor, spec: CastSpec, rows: History, record: bool) -> Quantized:
    """Cast the gradient of a layer's output [M, N] by its history."""
    with torch.no_grad():
        amax = cast.amax(dy)
        scale = _scale(rows.dy, amax, spec)
        if record and dy.numel():
            _push(rows.dy, amax, amax.isfinite())
        return cast.quantize_with_scale(dy, scale, spec, amax)


def _scale(row: Tensor, amax: Tensor, spec: CastSpec) -> Tensor:
    largest = row.max()
    return cast.scale_from_amax(torch.where(largest > 0, largest, amax), spec)


def _push(row: Tensor, value: Tensor, valid: Tensor) -> None:
    """Newest first, without waiting for the device to know whether the value is valid."""
    row.copy_(torch.where(valid, torch.cat([value.reshape(1), row[:-1]]), row))


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """The amax histories of all layers with delayed scaling, by name (copies, fp32); empty without such layers.

    They belong into a checkpoint: without them the first steps after a resume take other scales.
    """
    return {name: b.detach().clone() for name, b in _named(model).items()}


def load_scaling_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Put back what :func:`scaling_state` gave. Raises ValueError if names or shapes are not those of the model."""
    own = _named(model)
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or extra:
        raise ValueError(
            f"The amax histories do not belong to this model: {len(missing)} are missing"
            f"{_some(missing)}, {len(extra)} are unknown{_some(extra)}. Resume with the recipe that wrote the "
            "checkpoint."
        )
    for name, buffer in own.items():
        if tuple(state[name].shape) != tuple(buffer.shape):
            raise ValueError(
                f"The amax history {name!r} has shape {list(state[name].shape)}, the model's has {list(buffer.shape)}. "
                "Resume with the recipe that wrote the checkpoint."
            )
        buffer.copy_(state[name])


def reduce_scaling_state(model: nn.Module, group: Any = None) -> None:
    """Give every rank of ``group`` (None: all) the largest histories of all ranks; call it after a step, on every rank.

    Per-tensor amax is local to a rank; afterwards all ranks cast with the scales of the whole batch.
    """
    rows = [b for name, b in _named(model).items() if not _is_recent(name)]
    if rows:
        flat = torch.cat([b.flatten() for b in rows])
        torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group=group)
        for buffer, reduced in zip(rows, flat.split([b.numel() for b in rows]), strict=True):
            buffer.copy_(reduced.view_as(buffer))


def _is_recent(name: str) -> bool:
    return name.rpartition(".")[2].startswith(PREFIX + "recent")


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {n: b for n, b in model.named_buffers() if n.rpartition(".")[2].startswith(PREFIX)}


def _some(names: list[str]) -> str:
    return f" (such as {names[0]!r})" if names else ""
