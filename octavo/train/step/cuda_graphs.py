"""``train.cuda_graphs``: forward and backward of a micro-batch as one CUDA graph, replayed for equal shapes.

A step of small kernels is bound by the host, which launches them one by one; a graph is launched at once. A graph reads
and writes fixed memory::

    read       ids, positions with a loss, their targets and weights: copied in before each replay
    written    the parts of the loss, and gradients, which accumulate in place, so that micro-batches with and without
               a graph add up in one step; they are zeroed at the first use in a step
    inside     casts of weights, which a graph cannot take from a cache: once per micro-batch instead of once per step

Clipping and the update stay outside. Steps that are observed (proof, health, memory, expert load) run eagerly. A shape
is captured at its second occurrence; up to :data:`MAX_SHAPES` are kept, in one memory pool. Computation that depends on
values on the host cannot be in a graph: batches with images or padding, and rows with losses at different positions,
run eagerly, which is logged once. So do operations that cannot be captured: a warm-up under CUDA's synchronization
check finds them before the capture. No autograd graph of an eager micro-batch may be
alive at a capture, because its gradients belong to another stream, on which the capture would have to wait. Settings
with which no step could be captured are refused at the start (:func:`unsupported_run_reason`,
:func:`unsupported_model_reason`).
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

MAX_SHAPES = 4  # maximum number of captured shapes
_HANDLED = ("input_ids", "attention_mask", "labels", "meta")  # entries of a batch; a mask of ones is not needed
_LOSS_INPUTS = ("keep", "target", "weight", "scale")  # inputs of a graph that are not passed to the model

LossAt = Callable[[dict[str, Any], Tensor, Tensor, Tensor], Loss]


@dataclass
class _Captured:
    """A captured graph.

    inputs              tensors that are filled before a replay
    parts               output: the parts of the loss
    parameters          those with a gradient
    gemms               GEMMs of one replay
    """

    graph: Graph
    inputs: dict[str, Tensor]
    parts: Tensor
    parameters: list[nn.Parameter]
    gemms: fp8.GemmCounts


class CudaGraphs:
    """Captures and replays the graphs of a run.

    compute_loss  called with (batch, keep, target, weight); runs the forward of a micro-batch
                  (`Stepper.loss_at_positions`)
    graph         creates the object that captures; a CUDA graph by default
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        compute_loss: LossAt,
        log: Callable[[str], None] = lambda text: None,
        graph: Callable[[], Graph] | None = None,
    ) -> None:
        self.model, self.device, self.compute_loss, self.log = model, device, compute_loss, log
        self.graph = partial(CudaGraph, torch.cuda.graph_pool_handle()) if graph is None else graph
        self.replays = 0
        self._captured: dict[Any, _Captured] = {}
        self._seen: Counter[Any] = Counter()
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._logged: set[str] = set()
        self._off = False

    def run(
        self, batch: dict[str, Any], keep: Tensor, target: Tensor, weight: Tensor, scale: float | None = None
    ) -> Tensor | None:
        """Run forward and backward of a micro-batch by a graph. Returns the parts of its loss, or None if it must run
        eagerly. ``scale`` is the loss scale, which may change between steps, or None if there is no loss scaling."""
        if self._off:
            return None
        if (why := _why_not(batch, target)) is not None:
            self._log_eager(why)
            return None
        inputs = {"input_ids": batch["input_ids"], "keep": keep, "target": target, "weight": weight}
        inputs |= {} if scale is None else {"scale": torch.tensor(scale)}
        inputs |= {name: value for name, value in batch.items() if name not in _HANDLED}
        key = tuple((name, *value.shape) for name, value in inputs.items())
        self._seen[key] += 1
        if key not in self._captured:
            if self._seen[key] < 2:
                return None
            if len(self._captured) == MAX_SHAPES:
                self._log_eager(f"{MAX_SHAPES} shapes of micro-batches are captured, which is the maximum")
                return None
            try:
                self._captured[key] = self._capture(inputs, batch["meta"])
            except Exception as error:  # whatever the error, the step cannot be captured
                self._off = True
                self._log_eager(f"a step cannot be captured ({first_line(error)})")
                return None
        captured = self._captured[key]
        for name, value in inputs.items():
            captured.inputs[name].copy_(value, non_blocking=True)
        self._use_graph_gradients(captured.parameters)
        captured.graph.replay()
        observe.report_replay(captured.gemms)
        self.replays += 1
        return captured.parts.clone()

    def _log_eager(self, why: str) -> None:
        if why not in self._logged:
            self._logged.add(why)
            self.log(f"train.cuda_graphs: runs without a graph: {why}")

    def _capture(self, inputs: dict[str, Tensor], meta: Any) -> _Captured:
        graph_inputs = {name: value.to(self.device, copy=True) for name, value in inputs.items()}

        def work() -> Tensor:
            batch = {name: value for name, value in graph_inputs.items() if name not in _LOSS_INPUTS}
            with models.disable_masks(self.model):
                keep, target, weight = (graph_inputs[name] for name in ("keep", "target", "weight"))
                loss = self.compute_loss({**batch, "meta": meta}, keep, target, weight)
            (loss.total * graph_inputs["scale"] if "scale" in graph_inputs else loss.total).backward()
            return loss.parts

        with self._saved_gradients():
            parameters = self._warm_up(work)
            self._use_graph_gradients(parameters)
            graph = self.graph()
            with observe.record_gemms() as gemms:
                parts = graph.capture(work)
        return _Captured(graph, graph_inputs, parts, parameters, gemms)

    @contextmanager
    def _saved_gradients(self) -> Iterator[None]:
        """Context in which no parameter has a gradient; on exit the gradients of earlier micro-batches are restored."""
        saved = [(p, p.grad, p.grad.clone() if p.grad is self._gradients.get(p) else None)
                 for p in self.model.parameters() if p.grad is not None]  # fmt: skip
        _without_gradients(self.model)
        try:
            yield
        finally:
            _without_gradients(self.model)
            for p, gradient, values in saved:
                p.grad = gradient if values is None else gradient.copy_(values)

    def _warm_up(self, work: Callable[[], Tensor]) -> list[nn.Parameter]:
        """Run twice on a side stream before the capture, so that kernels are compiled and libraries initialized. The
        second run is under the synchronization check. Returns the parameters that have a gradient."""
        gpu = self.device.type == "cuda"
        stream = torch.cuda.Stream(self.device) if gpu else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with observe.mute_reports(), torch.cuda.stream(stream) if stream is not None else nullcontext():
            work()
            parameters = [p for p in self.model.parameters() if p.grad is not None]
            _without_gradients(self.model)
            with forbid_synchronization(self.device):
                work()
            _without_gradients(self.model)
        if stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        return parameters

    def _use_graph_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Move the gradients of `parameters` to the memory that graphs add to; start from zero if a parameter has
        none."""
        to_zero = []
        for p in parameters:
            if p not in self._gradients:
                self._gradients[p] = torch.zeros_like(p)
            gradient = self._gradients[p]
            if p.grad is None:
                to_zero.append(gradient)
            elif p.grad is not gradient:
                gradient.copy_(p.grad)
            p.grad = gradient
        if to_zero:
            torch._foreach_zero_(to_zero)


def _without_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def _why_not(batch: dict[str, Any], target: Tensor) -> str | None:
    """Return why this batch cannot run by a graph, or None if it can."""
    meta = batch["meta"]
    if meta.sees:
        return "a batch has images or videos, whose sizes the vision tower reads on the host"
    if not meta.lengths or min(meta.lengths) < batch["input_ids"].shape[1]:
        return "rows of a batch differ in length, and their mask depends on values"
    if bool((target == IGNORE).any()):
        return "rows of a batch have losses at different positions, which are selected on the host"
    return None


def unsupported_run_reason(plan: fp8.Plan, world: World) -> str | None:
    """Return why no step of this run could be captured, with the setting to change, or None if steps can be captured.
    Conflicts between settings are rejected by config validation."""
    delayed = any(row.recipe is not None and row.recipe.delayed is not None for row in plan.rows)
    keeps_codes = any(plan.policy.param_of(row.component) for row in plan.rows if row.fp8)
    obstacles = {
        f"it needs a GPU, and this runs on {world.device}": not accelerator.has_graphs(world.device),
        f"FSDP2 moves weights between {world.size} ranks within a step; use one process": world.size > 1,
        "delayed scaling follows forwards on the host; use another recipe": delayed,
        "codes of weights that are FP8 between steps are computed outside; use fp8.param: false": keeps_codes,
    }
    return next((why for why, applies in obstacles.items() if applies), None)


def unsupported_model_reason(model: nn.Module, family: models.Family, aux_loss_coef: float) -> str | None:
    """Return why no step of this model could be captured, with the setting to change, or None if steps can be
    captured."""
    dropout = next((name for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p), None)
    tower = any(
        family.tower and n.startswith(f"{family.tower}.") and p.requires_grad for n, p in model.named_parameters()
    )
    obstacles = {
        "the routers' loss depends on a number of the host; use train.router_aux_loss_coef: 0": bool(aux_loss_coef),
        f"dropout ({dropout}) draws other random numbers in a graph": dropout is not None,
        f"{family.name} takes audio, which graphs do not support in this version": family.has_audio,
        "a vision tower that is trained runs in every batch, and reads image sizes; freeze image_encoder": tower,
    }
    return next((why for why, applies in obstacles.items() if applies), None)
