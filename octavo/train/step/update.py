"""From the losses of a step to new weights: backward, gradient norm, finiteness check, update.

By default the gradients of all micro-batches accumulate, and one update follows. With `optimizer.update: backward` each
weight is updated as soon as its gradient is complete, so all gradients never exist at once; a step is then one
micro-batch per process (:mod:`octavo.fp8.optim.in_backward`).
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
"""Key of a parameter group: the factor by which its learning rate differs from the schedule's."""


class Loss(NamedTuple):
    """The loss of one micro-batch: `total`, which backward differentiates, and its detached `parts` [cross-entropy,
    load balancing]."""

    total: Tensor
    parts: Tensor


class Outcome(NamedTuple):
    """The outcome of a step.

    parts    loss parts, summed over micro-batches and ranks
    norm     norm of all gradients before clipping, except those with a separate norm; that norm if it is not finite
    applied  True if the weights were updated
    """

    parts: Tensor
    norm: Tensor
    applied: bool


class Update(Protocol):
    """Runs backward and updates the weights. ``scale`` multiplies losses before backward and divides gradients after
    it, or is None if there is no loss scaling."""

    scale: LossScale | None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Read-only here, because an update in backward needs an :class:`octavo.fp8.AdamW`."""

    def backward(self, loss: Loss) -> None:
        """Run the backward of one micro-batch of a step."""

    def step(self) -> Outcome:
        """Update the weights after the last backward, if everything is finite."""

    def free(self) -> None:
        """Make gradients of a backward outside a step stay in `.grad`, until the next step."""


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's learning rate to the step's, times the group's factor if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(FACTOR, 1.0)


def trainable_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Return the trainable parameters, each once."""
    return (p for p in model.parameters() if p.requires_grad)


def make_update(cfg: Config, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Update:
    """Return the implementation of `optimizer.update`."""
    scale = LossScale.of(cfg)
    if cfg.optimizer.update == "step":
        separate = cfg.lora is not None and critic.is_enabled(cfg)
        return AfterBackward(
            optimizer, model, cfg.train.clip, world, critic.parameters(model) if separate else (), scale
        )
    assert isinstance(optimizer, fp8.AdamW)
    return InBackward(optimizer, model, cfg.train.clip, world, scale)


class AfterBackward:
    """Accumulates the gradients of all micro-batches, then clips and updates. ``separate`` are parameters that the loss
    of the others does not reach (a critic on the same base); their gradients have a separate norm and limit."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, clip: float, world: World,
        separate: Sequence[nn.Parameter] = (), scale: LossScale | None = None,
    ) -> None:  # fmt: skip
        self.optimizer, self.model, self.clip, self.world, self.separate = optimizer, model, clip, world, separate
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
        ours = self.optimizer if isinstance(self.optimizer, fp8.AdamW) and not self.separate else None
        undo = 1.0 if self.scale is None else 1.0 / self.scale.value
        norm = gradient_norm(trainable_parameters(self.model)) * undo if ours is not None else self._unscale_and_clip()
        if self.separate:
            other = _clip_gradients(self.separate, self.clip)
            norm = torch.where(other.isfinite(), norm, other)
        applied = bool(parts.isfinite().all() & norm.isfinite())
        if applied and ours is not None:  # clips inside the update, without another pass over the gradients
            ours.step(factor=clip_factor(norm, self.clip, undo))
        elif applied:
            self.optimizer.step()
        return Outcome(parts, norm, applied)

    def free(self) -> None:
        pass

    def _unscale_and_clip(self) -> Tensor:
        """Undo the loss scale and clip all gradients; return their norm before clipping."""
        if self.scale is not None and (
            gradients := [plain(p.grad) for p in trainable_parameters(self.model) if p.grad is not None]
        ):
            torch._foreach_mul_(gradients, 1.0 / self.scale.value)  # a power of two: nothing is rounded
        separate = {id(p) for p in self.separate}
        return _clip_gradients([p for p in trainable_parameters(self.model) if id(p) not in separate], self.clip)


def _clip_gradients(parameters: Sequence[nn.Parameter], clip: float) -> Tensor:
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
        self._outcome: Outcome | None = None

    def backward(self, loss: Loss) -> None:
        assert self._outcome is None, "checks.check_update: a step has one micro-batch"
        parts = self.world.sum(loss.parts)
        if not bool(parts.isfinite().all()):
            self._outcome = Outcome(parts, torch.full((), math.nan), False)
            return
        total, undo = loss.total, 1.0
        if self.scale is not None:
            total, undo = loss.total * self.scale.value, 1.0 / self.scale.value
        try:
            done = self._updating.run(lambda retain: total.backward(retain_graph=retain), self.clip, undo)
        except PartialUpdate as error:
            raise TrainError(str(error)) from error
        self._outcome = Outcome(parts, done.norm, done.applied)

    def step(self) -> Outcome:
        assert self._outcome is not None
        done, self._outcome = self._outcome, None
        return done

    def free(self) -> None:
        self._updating.remove()  # the next step puts its hooks back
