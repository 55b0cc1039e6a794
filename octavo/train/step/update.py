"""From the losses of a step to new weights: backward, the gradients' norm, the check that all is finite, the update.

Two ways. After backward: the gradients of all micro-batches add up, and one update follows. In backward
(`optimizer.update: backward`): each weight is updated as soon as its gradient is complete, so that gradients are never
held; a step then is one micro-batch a process (:mod:`octavo.fp8.optim.in_backward`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from octavo import fp8
from octavo.config import Config
from octavo.fp8.optim import PartialUpdate, UpdateInBackward, clip_factor, gradient_norm
from octavo.fp8.weights import full, mesh_of, plain
from octavo.parallel import World
from octavo.train.errors import TrainError
from octavo.train.forward import critic
from octavo.train.step.loss_scale import LossScale

FACTOR = "lr_factor"
"""Of a parameter group: its learning rate over that of the schedule."""


class Loss(NamedTuple):
    """Of one micro-batch: what is differentiated, and the parts of the step's figures in it [cross-entropy, load
    balancing], detached."""

    total: Tensor
    parts: Tensor


class Outcome(NamedTuple):
    """`parts` summed over micro-batches and ranks; the norm of all gradients before clipping (without those that have
    one of their own, unless that is not finite); whether weights moved."""

    parts: Tensor
    norm: Tensor
    applied: bool


class Update(Protocol):
    """``scale``: what losses are multiplied by before backward, and gradients divided by after it (None: neither)."""

    scale: LossScale | None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Read-only here, because an update in backward needs an :class:`octavo.fp8.AdamW`."""

    def backward(self, loss: Loss) -> None:
        """The backward of one micro-batch of a step."""

    def step(self) -> Outcome:
        """After the last backward: the weights are updated, if all is finite."""

    def free(self) -> None:
        """Let gradients of a backward outside a step stay in `.grad`, until the next step."""


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the step's learning rate, times the factor that it may have."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(FACTOR, 1.0)


def trained(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that ask for a gradient, each once."""
    return (p for p in model.parameters() if p.requires_grad)


def update_for(cfg: Config, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Update:
    """The way that `optimizer.update` asks for."""
    scale = LossScale.of(cfg)
    if cfg.optimizer.update == "step":
        apart = cfg.lora is not None and critic.wanted(cfg)
        return AfterBackward(optimizer, model, cfg.train.clip, world, critic.parameters(model) if apart else (), scale)
    assert isinstance(optimizer, fp8.AdamW)
    return InBackward(optimizer, model, cfg.train.clip, world, scale)


class AfterBackward:
    """Add the gradients of all micro-batches, then clip and update. ``apart``: parameters that nothing of the others'
    loss reaches (a critic over the same base), whose gradients have a norm, and a limit, of their own."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, clip: float, world: World,
        apart: Sequence[nn.Parameter] = (), scale: LossScale | None = None,
    ) -> None:  # fmt: skip
        self.optimizer, self.model, self.clip, self.world, self.apart = optimizer, model, clip, world, apart
        self.scale = scale
        self._parts: Tensor | None = None

    def backward(self, loss: Loss) -> None:
        (loss.total if self.scale is None else loss.total * self.scale.value).backward()
        self.add(loss.parts)

    def add(self, parts: Tensor) -> None:
        """The parts of a micro-batch whose backward has run already."""
        before = torch.zeros_like(parts, dtype=torch.float32) if self._parts is None else self._parts
        self._parts = before + parts

    def step(self) -> Outcome:
        assert self._parts is not None
        parts, self._parts = self.world.sum(self._parts), None
        ours = self.optimizer if isinstance(self.optimizer, fp8.AdamW) and not self.apart else None
        undo = 1.0 if self.scale is None else 1.0 / self.scale.value
        norm = gradient_norm(trained(self.model)) * undo if ours is not None else self._clipped()
        if self.apart:
            other = _limited(self.apart, self.clip)
            norm = torch.where(other.isfinite(), norm, other)
        applied = bool(parts.isfinite().all() & norm.isfinite())
        if applied and ours is not None:  # clipped inside the update, without a pass over the gradients
            ours.step(factor=clip_factor(norm, self.clip, undo))
        elif applied:
            self.optimizer.step()
        return Outcome(parts, norm, applied)

    def free(self) -> None:
        pass

    def _clipped(self) -> Tensor:
        """The norm of all gradients, which are those of the loss from here on, scaled down to the limit."""
        if self.scale is not None and (gradients := [plain(p.grad) for p in trained(self.model) if p.grad is not None]):
            torch._foreach_mul_(gradients, 1.0 / self.scale.value)  # a power of two: nothing is rounded
        apart = {id(p) for p in self.apart}
        return _limited([p for p in trained(self.model) if id(p) not in apart], self.clip)


def _limited(parameters: Sequence[nn.Parameter], clip: float) -> Tensor:
    """The norm of their gradients over all ranks; the gradients are scaled down to the limit.

    torch scales those of one mesh at a time, and adds up no norms of two: experts that are dealt to ranks have a mesh
    of their own."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(mesh_of(parameter), []).append(parameter)
    if len(by_mesh) < 2:
        return full(torch.nn.utils.clip_grad_norm_(parameters, clip or math.inf))
    norm = gradient_norm(parameters)
    for group in by_mesh.values():
        clip_grads_with_norm_(group, clip or math.inf, norm)
    return norm


class InBackward:
    """Update each weight in backward; see :class:`octavo.fp8.optim.in_backward.UpdateInBackward`."""

    def __init__(
        self, optimizer: fp8.AdamW, model: nn.Module, clip: float, world: World, scale: LossScale | None = None
    ) -> None:
        self.optimizer, self.clip, self.world, self.scale = optimizer, clip, world, scale
        self._updating = UpdateInBackward(optimizer, model)
        self._done: Outcome | None = None

    def backward(self, loss: Loss) -> None:
        assert self._done is None, "checks.check_update: a step has one micro-batch"
        parts = self.world.sum(loss.parts)
        if not bool(parts.isfinite().all()):
            self._done = Outcome(parts, torch.full((), math.nan), False)
            return
        total, undo = loss.total, 1.0
        if self.scale is not None:
            total, undo = loss.total * self.scale.value, 1.0 / self.scale.value
        try:
            done = self._updating.run(lambda retain: total.backward(retain_graph=retain), self.clip, undo)
        except PartialUpdate as error:
            raise TrainError(str(error)) from error
        self._done = Outcome(parts, done.norm, done.applied)

    def step(self) -> Outcome:
        assert self._done is not None
        done, self._done = self._done, None
        return done

    def free(self) -> None:
        self._updating.remove()  # the next step puts its hooks back
