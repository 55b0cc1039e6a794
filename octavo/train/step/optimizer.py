"""AdamW over a model's trainable parameters: a group with weight decay and one without; a critic with a different
learning rate has two more.

With everything in fp32 it is PyTorch's AdamW; for all other formats of states or weights it is
:class:`octavo.fp8.AdamW`, or its variant with states in host memory. For adapters in BF16 it also holds their fp32
values (`master: fp32`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo import fp8
from octavo.config import Config
from octavo.fp8.optim import OffloadedAdamW, decode
from octavo.fp8.weights import plain
from octavo.train.errors import TrainError
from octavo.train.forward import critic
from octavo.train.step.update import FACTOR


def adamw(model: nn.Module, cfg: Config) -> torch.optim.Optimizer:
    """Return the AdamW that `optimizer` and `train.lr` configure (decoupled weight decay, Loshchilov & Hutter 2019).

    Biases, norms and all other parameters of one dimension have no weight decay. Tied parameters appear once. The
    learning rate is set before every step as a Python float. Raises TrainError if nothing is trainable.
    """
    settings = cfg.optimizer
    apart = cfg.rl.critic_lr if cfg.rl is not None else None
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": decay, **({} if factor is None else {FACTOR: factor})}
        for factor in (None, *([] if apart is None else [apart / cfg.train.lr]))
        for decay in (settings.weight_decay, 0.0)
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            first = 2 if apart is not None and critic.is_critic_parameter(name) else 0
            groups[first + excludes_from_decay(name, parameter)]["params"].append(parameter)
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise TrainError("every parameter is frozen, so there is nothing to train. Freeze less (model.freeze)")
    common: dict[str, Any] = {"lr": cfg.train.lr, "betas": settings.betas, "eps": settings.eps}
    plain = (settings.states, settings.master, settings.update, settings.offload) == ("fp32", "fp32", "step", False)
    if plain and all(p.dtype == torch.float32 for group in groups for p in group["params"]):
        return torch.optim.AdamW(groups, **common, fused=True)
    kind = OffloadedAdamW if settings.offload else fp8.AdamW
    return kind(groups, **common, states=settings.states, master=settings.master, seed=cfg.run.seed)


@contextmanager
def count_zeroed(optimizer: torch.optim.Optimizer) -> Iterator[list[Tensor]]:
    """Context in which each update of a parameter counts the elements whose second moment is zero although the gradient
    was not: the next update of such a weight would be m / eps. One count per parameter on this rank; none for formats
    without codes, which do not round to zero.

    Squares of gradients that underflow fp32 do not count.
    """
    counts: list[Tensor] = []
    if not isinstance(optimizer, fp8.AdamW):
        yield counts
        return

    def count(p: Tensor, group: dict[str, Any], factor: float | Tensor | None) -> None:
        state = optimizer.state[p]
        if "exp_avg_sq_codes" not in state:
            return
        optimizer.settle()  # states in host memory may still be in transfer
        assert p.grad is not None, "only parameters with a gradient are updated"
        gradient = plain(p.grad).float().flatten()
        moved = (gradient if factor is None else gradient * factor).square() * (1.0 - group["betas"][1])
        _, v = decode(p, group, state)
        counts.append(((moved > torch.finfo(torch.float32).tiny).to(v.device) & (v == 0)).sum())

    optimizer.watch = count
    try:
        yield counts
    finally:
        optimizer.watch = None


def excludes_from_decay(name: str, parameter: torch.Tensor) -> bool:
    """True if a parameter has no weight decay. Biases of experts have two dimensions, so the name is checked too."""
    last = name.rpartition(".")[2]
    return parameter.ndim < 2 or last == "bias" or last.endswith("_bias")
