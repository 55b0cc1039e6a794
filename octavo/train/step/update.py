"""From the losses of a step to new weights: backward, gradient norm, finiteness check, update.

There are two ways. After backward: the gradients of all micro-batches accumulate, and one update follows. In backward
(`optimizer.update: backward`): each weight is updated as soon as its gradient is complete, so gradients are never all
held; a step is then one micro-batch per process (:mod:`octavo.fp8.optim.in_backward`).
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
"""Key of a parameter group: its learning rate relative to the schedule's."""


class Loss(NamedTuple):
    """The loss of one micro-batch: `total`, which backward differentiates, and its detached `parts` [cross-entropy,
    load balancing]."""

    total: Tensor
    parts: Tensor


class Outcome(NamedTuple):
    """`parts`: summed over micro-batches and ranks. `norm`: of all gradients before clipping, except those with a
    separate norm, unless that one is not finite. `applied`: whether weights were updated."""

    parts: Tensor
    norm: Tensor
    applied: bool


class Update(Protocol):
    """``scale``: multiplies losses before backward and divides gradients after it (None: without)."""

    scale: LossScale | None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Read-only here, because an update in backward needs an :class:`octavo.fp8.AdamW`."""

    def backward(self, loss: Loss) -> None:
        """The backward of one micro-batch of a step."""

    def step(self) -> Outcome:
        """Update the weights after the last backward, if everything is finite."""

    def free(self) -> None:
        """Make gradients of a backward outside a step stay in `.grad`, until the next step."""


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's learning rate to the step's, times the group's factor if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(FACTOR, 1.0)


def trained(model: nn.Module) -> Iterator[nn.Parameter]:
    """The trainable parameters, each once."""
    return (p for p in model.parameters() if p.requires_grad)


def update_for(cfg: Config, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Update:
    """The update that `optimizer.update` names."""
    scale = LossScale.of(cfg)
    if cfg.optimizer.update == "step":
        apart = cfg.lora is not None and critic.is_enabled(cfg)
        return AfterBackward(optimizer, model, cfg.train.clip, world, critic.parameters(model) if apart else (), scale)
    assert isinstance(optimizer, fp8.AdamW)
    return InBackward(optimizer, model, cfg.train.clip, world, scale)


class AfterBackward:
    """Accumulates the gradients of all micro-batches, then clips and updates. ``apart``: parameters that the others'
    loss does not reach (a critic on the same base), whose gradients have a separate norm and limit."""

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
        """Add the parts of a micro-batch whose backward has already run."""
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
        if applied and ours is not None:  # clips inside the update, without another pass over the gradients
            ours.step(factor=clip_factor(norm, self.clip, undo))
        elif applied:
            self.optimizer.step()
        return Outcome(parts, norm, applied)

    def free(self) -> None:
        pass

    def _clipped(self) -> Tensor:
        """Undo the loss scale and clip all gradients; return their norm before clipping."""
        if self.scale is not None and (gradients := [plain(p.grad) for p in trained(self.model) if p.grad is not None]):
            torch._foreach_mul_(gradients, 1.0 / self.scale.value)  # a power of two: nothing is rounded
        apart = {id(p) for p in self.apart}
        return _limited([p for p in trained(self.model) if id(p) not in apart], self.clip)


def _limited(parameters: Sequence[nn.Parameter], clip: float) -> Tensor:
    """Clip the gradients of parameters; return their norm over all ranks before clipping.

    torch clips gradients of one mesh and cannot combine norms of two, but experts that are distributed over ranks have
    a separate mesh."""
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
    """Updates each weight in backward; see :class:`octavo.fp8.optim.in_backward.UpdateInBackward`."""

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
