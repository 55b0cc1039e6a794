"""AdamW over a model's trainable parameters: one group with weight decay, one without."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from octavo.config import Config
from octavo.train.errors import TrainError


def adamw(model: nn.Module, cfg: Config) -> torch.optim.AdamW:
    """AdamW as `optimizer` and `train.lr` say (decoupled weight decay, Loshchilov & Hutter 2019).

    Weight decay spares biases, norms and every other parameter of one dimension. Tied parameters appear once. The
    learning rate is set before every step from `schedule` as a Python float. Raises TrainError where nothing is
    trainable.
    """
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (spared if spares(name, parameter) else decayed).append(parameter)
    settings = cfg.optimizer
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise TrainError("every parameter is frozen, so there is nothing to train. Freeze less (model.freeze)")
    return torch.optim.AdamW(groups, lr=cfg.train.lr, betas=settings.betas, eps=settings.eps, fused=True)


def spares(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay leaves a parameter alone. Biases of experts have two dimensions, so the name counts too."""
    last = name.rpartition(".")[2]
    return parameter.ndim < 2 or last == "bias" or last.endswith("_bias")


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the step's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def trained(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that ask for a gradient, each once."""
    return (p for p in model.parameters() if p.requires_grad)
