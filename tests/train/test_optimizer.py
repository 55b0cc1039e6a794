"""Which parameters weight decay spares."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo.train import TrainError
from octavo.train.step.optimizer import adamw, excludes_from_decay
from octavo.train.step.update import set_lr


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(2, 4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def test_norms_and_biases_are_spared_and_tied_weights_come_once(make):
    model = Small()
    optimizer = adamw(model, make("optimizer.weight_decay=0.1"))
    names = {p: n for n, p in model.named_parameters()}
    groups = {g["weight_decay"]: {names[p] for p in g["params"]} for g in optimizer.param_groups}
    assert groups == {
        0.1: {"embed.weight", "linear.weight"},
        0.0: {"linear.bias", "norm.weight", "norm.bias", "gate_up_proj_bias"},
    }


def test_settings_reach_adamw(make):
    optimizer = adamw(Small(), make("optimizer.betas=[0.8, 0.9]", "optimizer.eps=1e-6", "train.lr=0.5"))
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["eps"] == 1e-6
    set_lr(optimizer, 0.25)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


def test_frozen_parameters_stay_out(make):
    model = Small()
    model.embed.weight.requires_grad_(False)
    held = [p for group in adamw(model, make()).param_groups for p in group["params"]]
    assert all(p is not model.embed.weight for p in held)


def test_nothing_to_train_is_an_error(make):
    model = Small().requires_grad_(False)
    with pytest.raises(TrainError, match="every parameter is frozen.*Freeze less"):
        adamw(model, make())


@pytest.mark.parametrize(("name", "shape", "spared"), [
    ("a.weight", (2, 2), False), ("a.weight", (2,), True), ("a.bias", (2,), True),
    ("experts.down_proj_bias", (2, 2), True), ("conv.weight", (2, 2, 2, 2, 2), False), ("scale", (), True),
])  # fmt: skip
def test_what_is_spared(name: str, shape: tuple[int, ...], spared: bool):
    assert excludes_from_decay(name, torch.zeros(shape)) is spared
