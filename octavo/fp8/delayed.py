"""The amax histories of a model with delayed scaling: saved, restored, reduced over ranks, moved and rescaled.

    state = fp8.scaling_state(model)              # into a checkpoint
    fp8.load_scaling_state(model, state)          # and back
    delayed.reduce_scaling_state(model, group)    # after each step, where several ranks see different batches

What a history holds and how casts use it is described in :mod:`octavo.fp8.dense.delayed`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from octavo.fp8.dense.delayed import HELD, PREFIX, moved


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """The amax histories of all layers with delayed scaling, by name (copies, fp32); empty without such layers.

    A checkpoint needs them: without them the first steps after a resume cast with other scales.
    """
    return {name: b.detach().clone() for name, b in _named(model).items()}


def move_scaling(model: nn.Module, device: torch.device) -> None:
    """Move the amax histories of a model to ``device``, for a model whose weights were on the meta device."""
    for module in model.modules():
        held = module.__dict__.get(HELD)
        if held is not None:
            held.update({name: moved(tensor, device) for name, tensor in held.items()})


def load_scaling_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Restore what :func:`scaling_state` returned. Raises ValueError if names or shapes differ from the model's."""
    histories = _named(model)
    missing, extra = sorted(histories.keys() - state.keys()), sorted(state.keys() - histories.keys())
    if missing or extra:
        raise ValueError(
            f"The amax histories do not belong to this model: {len(missing)} are missing"
            f"{_some(missing)}, {len(extra)} are unknown{_some(extra)}. Resume with the recipe that wrote the "
            "checkpoint."
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
    rows = list(_named(model).values())
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
    for name, row in _named(model).items():
        if name.rpartition(".")[2].startswith(PREFIX + "dy"):
            row.mul_(factor)


def _named(model: nn.Module) -> dict[str, Tensor]:
    """The histories of x and dy, by the names that buffers would have."""
    # Notes for recomputed forwards are left out: they serve one step only.
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules()
        for name, tensor in module.__dict__.get(HELD, {}).items()
        if not name.startswith(PREFIX + "recent")
    }


def _some(names: list[str]) -> str:
    return f" (such as {names[0]!r})" if names else ""
