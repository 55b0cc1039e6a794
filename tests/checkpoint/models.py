"""A small model with a frozen weight, a tied weight and a buffer, trained a few steps; and what its state is."""

from __future__ import annotations

import copy

import torch
from torch import nn

from octavo import checkpoint
from octavo.fp8.optim.adamw import AdamW


class One:
    """A world of one, as `checkpoint` sees it."""

    rank = 0
    size = 1

    def gather_objects(self, value: object) -> list:
        return [value]


class Model(nn.Module):
    def __init__(self, width: int = 5):
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 9, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def optimizer_for(model: nn.Module, **settings) -> torch.optim.Optimizer:
    """torch's AdamW, or `fp8.AdamW` where the settings name states."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in trained if not n.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for n, p in trained if n.endswith("bias")], "weight_decay": 0.0},
    ]
    kind = AdamW if "states" in settings else torch.optim.AdamW
    return kind(groups, **{"lr": 1e-2, "betas": (0.9, 0.95), **settings})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, part: slice = slice(None)) -> list[float]:
    losses = []
    for step in steps:
        ids = torch.randint(0, 9, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = model(ids[part]).logsumexp(-1).sum() / 24
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(steps: int = 3, **settings) -> tuple[Model, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer_for(model, **settings)
    train(model, optimizer, range(steps))
    model.seen += 7
    return model, optimizer


def fresh(**settings) -> tuple[Model, torch.optim.AdamW]:
    torch.manual_seed(99)
    model = Model()
    return model, optimizer_for(model, **{"lr": 0.5, **settings})


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def small(states: str = "fp8", master: str = "bf16+16", seed: int = 0, **settings) -> tuple[Model, AdamW]:
    """A model whose parameters end inside groups of 128, and its optimizer; BF16 where the master is."""
    torch.manual_seed(seed)
    model = Model(width=40)
    if master != "fp32":
        model.bfloat16()
    return model, optimizer_for(model, states=states, master=master, **settings)


def same(left: object, right: object) -> bool:
    """Equal down to the last bit, dtype and key."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return left == right


def save(directory, step: int, model: nn.Module, optimizer, keep: int = 2, extra=None, world=None, **counters):
    return checkpoint.save(
        directory,
        step,
        model=model,
        optimizer=optimizer,
        extra=extra or {},
        counters=counters,
        world=world or One(),
        keep=keep,
    )


def load(path, model: nn.Module, optimizer, world=None) -> checkpoint.RestoredState:
    return checkpoint.load(path, model=model, optimizer=optimizer, world=world or One())
