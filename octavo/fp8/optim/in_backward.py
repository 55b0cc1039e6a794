"""Update in backward: step each parameter when its gradient is complete, and free the gradient immediately.

This saves the gradient buffer: 2 bytes per parameter in BF16, 4 in fp32. With ``bf16+sr`` and FP8 states a parameter
then takes 4.1 bytes in total.

    updating = UpdateInBackward(optimizer, model)
    loss = forward(batch)
    result = updating.run(lambda retain: loss.backward(retain_graph=retain), clip=1.0)
    result.norm, result.applied

**Clipping** needs the norm of all gradients before the first update. So ``run`` runs the backward twice: the first pass
computes the norm and frees each gradient, the second computes the same gradients again and updates with the clip
factor. The norm is exact, and the step equals the ordinary step bit for bit. The second backward adds about two thirds
to the time of a step, and no memory, because saved tensors exist until the second pass. Without clipping (``clip=0``)
one pass is sufficient.

**Nonfinite gradients.** With two passes the norm is known before any write, and the step is skipped (``applied`` is
False). With one pass other weights may have been updated already: updates stop, and ``run`` raises
:class:`PartialUpdate`, because updates cannot be undone.

**Gradient accumulation** is not supported: a step has one backward, and a second one raises.

The optimizer itself is not changed. Parameters without a gradient (experts without tokens, frozen ones) do not change,
as in ``torch.optim``. A parameter with two uses is stepped when both gradients are summed; only reentrant checkpointing
around both uses separates them, which is rejected as a second backward. With FSDP2 hooks get the reduced sharded
gradient, in the same order on all ranks, and the norm needs one all-reduce. A parameter with a group of 128 that is
split over ranks (:mod:`octavo.fp8.optim.sharded`) needs two small all-reduces (one with coat, none with fp32 and bf16
states); an ordinary step needs two for all such parameters together. DistributedDataParallel calls hooks before it
reduces gradients: use FSDP2. With ``torch.compile``, two passes need
``torch._functorch.config.donated_buffer = False`` before the first forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.base import accelerator
from octavo.fp8 import delayed
from octavo.fp8.arithmetic.errors import Fp8Error
from octavo.fp8.observe import recorder
from octavo.fp8.optim.adamw import AdamW
from octavo.fp8.weights.shards import is_dtensor, plain, sharded_over


class PartialUpdate(Fp8Error, RuntimeError):
    """A gradient was not finite after other weights of the step were updated."""


class UpdateResult(NamedTuple):
    """``norm``: norm of all gradients before clipping, 0-d fp32, the same on all ranks; ``applied``: False if it was
    not finite, and nothing was written."""

    norm: Tensor
    applied: bool


class UpdateInBackward:
    """Hooks on the parameters of an optimizer that step each one in backward; see the module docstring.

    ``model`` is needed for the histories of delayed scaling, which two passes must record only once; without delayed
    scaling a list of parameters is sufficient. While hooks are registered, every backward must use :meth:`run`;
    :meth:`remove` removes them.

    Raises ValueError for optimizers other than fp8.AdamW, for parameters that are not in it, and for parameters with
    another UpdateInBackward.
    """

    def __init__(self, optimizer: AdamW, model: nn.Module | Iterable[nn.Parameter]) -> None:
        if not isinstance(optimizer, AdamW):
            raise ValueError(
                f"Update in backward was asked of {type(optimizer).__name__}, which cannot step single parameters. "
                "Use fp8.AdamW (without a wrapper around it), or call optimizer.step() after the backward."
            )
        self.optimizer = optimizer
        self._model = model if isinstance(model, nn.Module) else None
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
        foreign = sum(p.requires_grad and id(p) not in known for p in parameters)
        if foreign:
            raise ValueError(
                f"{foreign} of {len(parameters)} parameters ask for a gradient and are not in the optimizer, which "
                "would never free it. Freeze them (requires_grad_(False)) or give them to the optimizer."
            )
        self._hooks: dict[int, Any] = {}
        self._action: Callable[[nn.Parameter], None] | None = None
        self._seen: set[int] = set()
        self._wrote = False
        self._register_hooks()

    def run(self, backward: Callable[[bool], None], clip: float = 0.0, undo: float = 1.0) -> UpdateResult:
        """Run one step. ``backward(retain)`` must run the backward of the loss with ``retain_graph=retain``.

        Args:
            backward: called twice if ``clip > 0``, first with True; otherwise once, with False.
            clip: maximum norm of all gradients; 0 disables clipping.
            undo: factor of all gradients, to undo loss scaling.

        Waits for the device once, to check whether the norm is finite. Raises PartialUpdate if a gradient is not finite
        and ``clip=0``, when some weights may have been written; RuntimeError if a parameter gets a second gradient or
        has one before the step, or if there is no gradient at all.
        """
        parameters = self._register_hooks()
        old = sum(p.grad is not None for p in parameters)
        if old:
            raise RuntimeError(
                f"{old} parameters hold a gradient from before this step, which update in backward would add to. "
                "Call optimizer.zero_grad() first."
            )
        if not clip >= 0:  # also NaN
            raise ValueError(f"Gradients cannot be clipped to a norm of {clip}; use a positive one, or 0 for none.")
        norms: dict[int, Tensor] = {}
        if not clip:
            return self._run_one_pass(backward, parameters, norms, undo)
        histories = delayed.scaling_state(self._model) if self._model is not None else {}
        with self._backward_pass(lambda p: norms.__setitem__(id(p), _local_norm(p))):
            backward(True)
        norm = _total_norm(parameters, norms) * undo
        if not bool(norm.isfinite()):
            return UpdateResult(norm, False)
        factor = clip_factor(norm, clip, undo)
        if histories and self._model is not None:  # use the same scales again, and record one entry per step
            delayed.load_scaling_state(self._model, histories)
        with self._backward_pass(lambda p: self.optimizer.update([p], factor)), recorder.mute_reports():
            backward(False)
        self._notify_step()
        return UpdateResult(norm, True)

    def remove(self) -> None:
        """Remove the hooks; gradients stay in ``.grad`` again."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def _run_one_pass(
        self, backward: Callable[[bool], None], parameters: list[nn.Parameter], norms: dict[int, Tensor], undo: float
    ) -> UpdateResult:
        watch = _NonfiniteWatch()

        def update(p: nn.Parameter) -> None:
            norms[id(p)] = _local_norm(p)
            watch.add(norms[id(p)])
            if not watch.found_nonfinite():
                self.optimizer.update([p], None if undo == 1 else undo)
                self._wrote = True

        self._wrote = False
        with self._backward_pass(update):
            backward(False)
        norm = _total_norm(parameters, norms) * undo
        if not bool(norm.isfinite()):
            raise PartialUpdate(
                f"The gradient norm of this step is {float(norm)}, and without clipping update in backward learns of "
                "that after the first weights were updated: the model is updated in part. Resume from the last "
                "checkpoint; with train.clip > 0 such a step is skipped whole, before anything is written."
            )
        self._notify_step()
        return UpdateResult(norm, True)

    def _notify_step(self) -> None:
        """Run a step without gradients, which updates nothing, so that caches of FP8 codes, schedulers and step hooks
        are notified."""
        self.optimizer.step()

    def _register_hooks(self) -> list[nn.Parameter]:
        """Register hooks on parameters that require a gradient and have none yet; return all of these parameters."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        new = [p for p in parameters if id(p) not in self._hooks]
        taken = sum(
            isinstance(getattr(hook, "__self__", None), UpdateInBackward)
            for p in new
            for hook in (p._post_accumulate_grad_hooks or {}).values()
        )
        if taken:
            raise ValueError(
                f"{taken} of {len(parameters)} parameters are updated in backward by another UpdateInBackward already, "
                "and each can have only one. Go on with that one, or call its remove() first."
            )
        for p in new:
            self._hooks[id(p)] = p.register_post_accumulate_grad_hook(self._on_gradient)
        return parameters

    @contextmanager
    def _backward_pass(self, act: Callable[[nn.Parameter], None]) -> Iterator[None]:
        self._action, self._seen = act, set()
        try:
            yield
        finally:
            self._action = None
        if self._hooks and not self._seen:
            raise RuntimeError(
                "No gradient arrived: none of the parameters that ask for one got one in this pass, and nothing was "
                "updated. The function given to run must call loss.backward(retain_graph=retain) each time it is "
                "called, on a loss that depends on the optimizer's parameters."
            )

    def _on_gradient(self, p: nn.Parameter) -> None:
        """Handle a complete gradient; registered as a hook on each parameter."""
        try:
            if self._action is None:
                raise RuntimeError(
                    "A backward ran outside UpdateInBackward.run, where no update is due. Update in backward takes one "
                    "backward a step: to accumulate gradients over micro-batches use optimizer.update=step, else "
                    "call remove() first."
                )
            if id(p) in self._seen:
                raise RuntimeError(
                    f"A parameter of shape {list(p.shape)} got a second gradient in one step, and the first is freed "
                    "already. Update in backward takes one backward a step (train.grad_accum: 1) and no reentrant "
                    "checkpointing around two uses of one parameter; use optimizer.update=step for that."
                    + (" Some weights have been updated: resume from the last checkpoint." if self._wrote else "")
                )
            self._seen.add(id(p))
            self._action(p)
        finally:
            p.grad = None


class _NonfiniteWatch:
    """Detects nonfinite norms without synchronizing: on devices with events each norm is copied to the host
    asynchronously, and read after it has arrived, a few parameters later."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Tensor, Any]] = deque()
        self._bad = False

    def add(self, norm: Tensor) -> None:
        if accelerator.why_no_streams(norm.device) is None:
            here = accelerator.empty_pinned((), norm.dtype, norm.device)
            here.copy_(norm, non_blocking=True)
            event = accelerator.new_event(norm.device)
            event.record(accelerator.current_stream(norm.device))
            self._pending.append((here, event))
        else:
            self._bad |= not bool(norm.isfinite())

    def found_nonfinite(self) -> bool:
        while self._pending and self._pending[0][1].query():
            self._bad |= not bool(self._pending.popleft()[0].isfinite())
        return self._bad


# --- the norm ---------------------------------------------------------------------------------------------------------


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients in ``.grad`` over all ranks, 0-d fp32, with the same operations as the first
    pass of :class:`UpdateInBackward`, so that both clip equally."""
    parameters = [p for p in parameters if p.requires_grad]
    return _total_norm(parameters, {id(p): _local_norm(p) for p in parameters if p.grad is not None})


def clip_factor(norm: Tensor, clip: float, undo: float = 1.0) -> Tensor | float | None:
    """Return the factor that limits the norm of gradients to ``clip``, as in ``clip_grad_norm_``, or None for no
    factor. 0 disables clipping. ``undo``: factor that undoes loss scaling, included in ``norm``."""
    if not clip:
        return None if undo == 1 else undo
    factor = (clip / (norm + 1e-6)).clamp(max=1.0)
    return factor if undo == 1 else factor * undo


_PART = 1 << 20  # elements


def _local_norm(p: nn.Parameter) -> Tensor:
    """Return the norm of this rank's part of a gradient, 0-d fp32."""
    assert p.grad is not None
    grad = plain(p.grad)
    if grad.device.type != "cpu" or grad.dtype == torch.float32 or grad.numel() <= _PART or not grad.is_contiguous():
        return torch.linalg.vector_norm(grad, dtype=torch.float32)
    # On the CPU this would convert the whole gradient first. In parts, copies are at most 4 MiB.
    parts = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in grad.view(-1).split(_PART)]
    return torch.linalg.vector_norm(torch.stack(parts))


def _total_norm(parameters: list[nn.Parameter], norms: dict[int, Tensor]) -> Tensor:
    """Return the total norm, in the order of parameters, not of the backward; shards are summed over ranks."""
    if not parameters:
        return torch.zeros(())
    parts: dict[Any, list[Tensor]] = {}
    for p in parameters:  # also those without a gradient here: ranks must agree on the collectives
        of_ranks = (p.device_mesh, sharded_over(p)) if is_dtensor(p) else None  # type: ignore[attr-defined]
        part_norms = parts.setdefault(of_ranks, [])
        if id(p) in norms:
            part_norms.append(norms[id(p)])
    squares = []
    for of_ranks, part_norms in parts.items():
        square = (
            torch.stack(part_norms).square().sum()
            if part_norms
            else torch.zeros((), device=plain(parameters[0]).device)
        )
        if of_ranks is not None:
            mesh, over = of_ranks
            for dim in over:
                torch.distributed.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()
