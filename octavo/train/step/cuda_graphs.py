"""``train.cuda_graphs``: forward and backward of a micro-batch as one CUDA graph, replayed for equal shapes.

A step of small kernels is bound by the host, which launches them one by one; a graph is launched at once. A graph reads
and writes fixed memory::

    read       ids, positions with a loss, their targets and weights: copied there before each replay
    written    the parts of the loss, and gradients, which accumulate in place, so that micro-batches with and without
               a graph add up in one step; they are zeroed at the first use in a step
    inside     casts of weights, which a graph cannot take from a cache: once per micro-batch instead of once per step

Clipping and the update stay outside. Steps that are observed (proof, health, memory, expert load) run eagerly. A shape
is captured at its second occurrence; up to :data:`MOST` are kept, in one memory pool. Computation that depends on
values on the host cannot be in a graph: batches with images or padding, and rows with losses at different positions,
run eagerly, and the run reports it once. The same holds for anything that the capture refuses: a warm-up under CUDA's
check for synchronization finds such operations before the capture. No autograd graph of an eager micro-batch may be
alive at a capture, because its gradients belong to another stream, on which the capture would have to wait. Settings
with which no step could be captured are refused at the start (:func:`why_never`, :func:`why_not_this`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from octavo import fp8, models
from octavo.base import accelerator
from octavo.base.safe_read import first_line
from octavo.fp8 import observe
from octavo.fp8.kernels import CudaGraph, Graph, forbid_synchronization
from octavo.parallel import World
from octavo.train.forward.losses import IGNORE
from octavo.train.step.update import Loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST = 4  # most captured shapes
_HANDLED = ("input_ids", "attention_mask", "labels", "meta")  # entries of a batch; a mask of ones is not needed
_NOT_THE_MODELS = ("keep", "target", "weight", "scale")  # inputs of a graph that the model does not get

LossAt = Callable[[dict[str, Any], Tensor, Tensor, Tensor], Loss]


@dataclass
class _Captured:
    """A graph, its inputs, its output (the parts of the loss), the parameters with gradients, and its GEMMs."""

    graph: Graph
    inputs: dict[str, Tensor]
    parts: Tensor
    reached: list[nn.Parameter]
    tape: fp8.GemmCounts


class Graphs:
    """The graphs of a run. ``loss_at(batch, keep, target, weight)``: the forward of a micro-batch (`Stepper.loss_at`);
    ``graph`` creates the object that captures (None: a CUDA graph)."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        loss_at: LossAt,
        log: Callable[[str], None] = lambda text: None,
        graph: Callable[[], Graph] | None = None,
    ) -> None:
        self.model, self.device, self.loss_at, self.log = model, device, loss_at, log
        self.graph = partial(CudaGraph, torch.cuda.graph_pool_handle()) if graph is None else graph
        self.replays = 0
        self._captured: dict[Any, _Captured] = {}
        self._seen: Counter[Any] = Counter()
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._said: set[str] = set()
        self._off = False

    def run(
        self, batch: dict[str, Any], keep: Tensor, target: Tensor, weight: Tensor, scale: float | None = None
    ) -> Tensor | None:
        """Run forward and backward of a micro-batch by a graph; return the parts of its loss. None: run it eagerly.
        ``scale``: the loss scale (None: without), which may change from step to step."""
        if self._off:
            return None
        if (why := _why_not(batch, target)) is not None:
            self._eagerly(why)
            return None
        inputs = {"input_ids": batch["input_ids"], "keep": keep, "target": target, "weight": weight}
        inputs |= {} if scale is None else {"scale": torch.tensor(scale)}
        inputs |= {name: value for name, value in batch.items() if name not in _HANDLED}
        key = tuple((name, *value.shape) for name, value in inputs.items())
        self._seen[key] += 1
        if key not in self._captured:
            if self._seen[key] < 2:
                return None
            if len(self._captured) == MOST:
                self._eagerly(f"{MOST} shapes of micro-batches are captured, and this is another one")
                return None
            try:
                self._captured[key] = self._capture(inputs, batch["meta"])
            except Exception as error:  # any error means that it cannot be captured, and is reported
                self._off = True
                self._eagerly(f"a step cannot be captured ({first_line(error)})")
                return None
        captured = self._captured[key]
        for name, value in inputs.items():
            captured.inputs[name].copy_(value, non_blocking=True)
        self._hold(captured.reached)
        captured.graph.replay()
        observe.report_replay(captured.tape)
        self.replays += 1
        return captured.parts.clone()

    def _eagerly(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            self.log(f"train.cuda_graphs: runs without a graph: {why}")

    def _capture(self, inputs: dict[str, Tensor], meta: Any) -> _Captured:
        held = {name: value.to(self.device, copy=True) for name, value in inputs.items()}

        def work() -> Tensor:
            batch = {name: value for name, value in held.items() if name not in _NOT_THE_MODELS}
            with models.disable_masks(self.model):
                loss = self.loss_at({**batch, "meta": meta}, held["keep"], held["target"], held["weight"])
            (loss.total * held["scale"] if "scale" in held else loss.total).backward()
            return loss.parts

        with self._aside():
            reached = self._warm(work)
            self._hold(reached)
            graph = self.graph()
            with observe.record_gemms() as tape:
                parts = graph.capture(work)
        return _Captured(graph, held, parts, reached, tape)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Context without the gradients of the step's earlier micro-batches, which are restored afterwards."""
        before = [(p, p.grad, p.grad.clone() if p.grad is self._gradients.get(p) else None)
                  for p in self.model.parameters() if p.grad is not None]  # fmt: skip
        _without_gradients(self.model)
        try:
            yield
        finally:
            _without_gradients(self.model)
            for p, gradient, values in before:
                p.grad = gradient if values is None else gradient.copy_(values)

    def _warm(self, work: Callable[[], Tensor]) -> list[nn.Parameter]:
        """Run twice on a side stream before the capture, so that kernels are compiled and libraries initialized, the
        second time under the check for synchronization; return the parameters that get gradients."""
        gpu = self.device.type == "cuda"
        stream = torch.cuda.Stream(self.device) if gpu else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with observe.mute_reports(), torch.cuda.stream(stream) if stream is not None else nullcontext():
            work()
            reached = [p for p in self.model.parameters() if p.grad is not None]
            _without_gradients(self.model)
            with forbid_synchronization(self.device):
                work()
            _without_gradients(self.model)
        if stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        return reached

    def _hold(self, reached: list[nn.Parameter]) -> None:
        """Put these gradients into the memory to which graphs add; zeros if the step has none yet."""
        fresh = []
        for p in reached:
            if p not in self._gradients:
                self._gradients[p] = torch.zeros_like(p)
            mine = self._gradients[p]
            if p.grad is None:
                fresh.append(mine)
            elif p.grad is not mine:
                mine.copy_(p.grad)
            p.grad = mine
        if fresh:
            torch._foreach_zero_(fresh)


def _without_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def _why_not(batch: dict[str, Any], target: Tensor) -> str | None:
    """Why this batch cannot run by a graph; None if it can."""
    meta = batch["meta"]
    if meta.sees:
        return "a batch has images or videos, whose sizes the vision tower reads on the host"
    if not meta.lengths or min(meta.lengths) < batch["input_ids"].shape[1]:
        return "rows of a batch differ in length, and their mask depends on values"
    if bool((target == IGNORE).any()):
        return "rows of a batch have losses at different positions, which are selected on the host"
    return None


def why_never(plan: fp8.Plan, world: World) -> str | None:
    """Why no step of this run could be captured, with the setting to change; None if some could. Conflicts between
    settings are refused by the configuration's rules."""
    late = any(row.recipe is not None and row.recipe.delayed is not None for row in plan.rows)
    held = any(plan.policy.param_of(row.component) for row in plan.rows if row.fp8)
    obstacles = {
        f"it needs a GPU, and this runs on {world.device}": not accelerator.has_graphs(world.device),
        f"FSDP2 moves weights between {world.size} ranks within a step; use one process": world.size > 1,
        "delayed scaling follows forwards on the host; use another recipe": late,
        "codes of weights that are FP8 between steps are computed outside; use fp8.param: false": held,
    }
    return next((why for why, applies in obstacles.items() if applies), None)


def why_not_this(model: nn.Module, family: models.Family, balance: float) -> str | None:
    """The same for the assembled model."""
    dropout = next((name for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p), None)
    tower = any(
        family.tower and n.startswith(f"{family.tower}.") and p.requires_grad for n, p in model.named_parameters()
    )
    obstacles = {
        "the routers' loss depends on a number of the host; use train.router_aux_loss_coef: 0": bool(balance),
        f"dropout ({dropout}) draws other random numbers in a graph": dropout is not None,
        f"{family.name} takes audio, which graphs do not support in this version": family.has_audio,
        "a vision tower that is trained runs in every batch, and reads image sizes; freeze image_encoder": tower,
    }
    return next((why for why, applies in obstacles.items() if applies), None)
