"""One training step of a candidate: forward, loss over all positions, backward and update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo import fp8, models
from octavo.base import accelerator
from octavo.bench.bench import Bench, Unavailable
from octavo.bench.profiles.budget import HEAD, OPTIMIZER, Budget, measure_parts
from octavo.bench.suite_layer import SHAPE, build_model
from octavo.bench.suite_step.candidates import Candidate
from octavo.fp8.kernels import CudaGraph, Graph, forbid_synchronization
from octavo.fp8.memory import ChunkedHead, chunk_head
from octavo.models.attention.kernel_choice import Choice


def build_step_model(bench: Bench, layers: int | None, meta: bool = False) -> PreTrainedModel:
    """Build the model of the suite; ``meta``: without memory for weights, unless it is small."""
    if meta and not bench.small:
        return models.random_model(bench.shape or SHAPE, "meta", bench.dtype, layers)
    return build_model(bench, layers)[0]


def new_graph(device: torch.device) -> Graph:
    """Return the object that captures a candidate's graph. Unlike ``torch.cuda.graph`` it puts the random generator
    back after a capture that failed."""
    if not accelerator.has_graphs(device):
        raise Unavailable(f"CUDA graphs need a GPU, and this runs on {device}")
    return CudaGraph(torch.cuda.graph_pool_handle())


class Step:
    """The step of a candidate. ``attention``: the kernel that a run would choose, or None for torch's choice."""

    def __init__(
        self, bench: Bench, layers: int | None, tokens: int, candidate: Candidate, attention: Choice | None = None
    ) -> None:
        self.device, self.candidate, self.attention = bench.device, candidate, attention
        self.model = model = build_step_model(bench, layers)
        family = models.describe(model)
        if candidate.precision != bench.high:
            fwd = "bf16" if candidate.fp8_head_gradients else None
            in_fp8 = candidate.fp8_head or candidate.fp8_head_gradients
            head = {"lm_head": fp8.ComponentPolicy(recipe=candidate.precision, fwd=fwd)} if in_fp8 else {}
            fuse = "on" if candidate.fused else "off"
            policy = fp8.Policy(recipe=candidate.precision, fuse=fuse, components=head)
            fp8.apply(model, fp8.plan(model, policy, family.components))
        # In the order of a run: attention, head, compilation.
        if attention is not None:
            models.use_kernel(model, attention.kernel, "foundation" if family.tower else None)
        self.head = _chunk_head(model) if candidate.chunked else None
        if candidate.compiled:
            for _, block in family.layers(model):
                block.compile(fullgraph=True, backend=bench.compiler)
        trained = [p for n, p in model.named_parameters() if not (family.tower and n.startswith(family.tower + "."))]
        self.optimizer = _make_optimizer(trained, candidate.fp8_moments)
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        vocabulary = embedding.num_embeddings
        ids = torch.randint(0, min(vocabulary, 1000), (1, tokens + 1), device=bench.device)
        self.ids, self.target = ids[:, :-1], ids[:, 1:]
        if self.head is not None and not candidate.graph:
            self.target = self.target.cpu()  # as the targets of a run, which a graph has on the device
        self.loss, self.update = _chunked_loss, self.optimizer.step
        self.work = self.capture_graph() if candidate.graph else self.gradients

    def __call__(self) -> None:
        self.work()
        self.update()
        if not self.candidate.graph:  # a replay overwrites its gradients
            self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> Tensor:
        """Run forward, loss and backward; return the loss."""
        if self.head is not None:
            with self.head.losses(self.target) as losses:
                loss = losses.checked_losses(self.model(input_ids=self.ids, use_cache=False).logits).mean()
        else:
            hidden = self.model.get_decoder()(input_ids=self.ids, use_cache=False).last_hidden_state
            loss = self.loss(hidden[0], self.model.get_output_embeddings().weight, self.target[0])
        loss.backward()
        return loss.detach()

    def capture_graph(self) -> Callable[[], None]:
        """Capture `gradients` as a CUDA graph, including the casts of weights; returns its replay. Warmed up on another
        stream and under the synchronization check, as in a run, so that what cannot be captured fails before it."""
        gpu = self.device.type == "cuda"
        stream = torch.cuda.Stream(self.device) if gpu else None
        with models.disable_masks(self.model):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                for check in (nullcontext(), forbid_synchronization(self.device)):
                    with check:
                        self.gradients()
                    self.optimizer.zero_grad(set_to_none=True)
            if stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(stream)
            graph = new_graph(self.device)
            graph.capture(self.gradients)
        return graph.replay

    def note(self) -> str:
        """Return the attention kernel with the reason for its choice, or nothing if torch chooses at each call."""
        return "" if self.attention is None else str(self.attention)

    def parts(self, steps: int = 3) -> dict[str, float]:
        """Return the seconds by part of the median of ``steps`` steps; empty if blocks cannot be instrumented."""
        if self.candidate.compiled or self.candidate.graph:
            return {}
        budget = Budget(self.device)
        self.loss, self.update = budget.wrap(HEAD, _chunked_loss), budget.wrap(OPTIMIZER, self.optimizer.step)
        try:
            with measure_parts(self.model, budget):
                measured = sorted((budget.step(self) for _ in range(steps)), key=lambda parts: sum(parts.values()))
        finally:
            self.loss, self.update = _chunked_loss, self.optimizer.step
        return measured[steps // 2]


def _chunk_head(model: PreTrainedModel) -> ChunkedHead:
    head = chunk_head(model)
    if isinstance(head, str):
        raise Unavailable(f"a run computes full logits of this model: {head}")
    return head


def _make_optimizer(parameters: list[nn.Parameter], fp8_moments: bool) -> torch.optim.Optimizer:
    """Return AdamW without master weights: an 8 B model in BF16 then fits on one GPU of 141 GB."""
    if not fp8_moments:
        return torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    master = "fp32" if parameters[0].dtype == torch.float32 else "bf16+sr"
    return fp8.AdamW(parameters, lr=1e-6, states="fp8", master=master)


def _chunked_loss(hidden: Tensor, head: Tensor, labels: Tensor, chunk: int = 2048) -> Tensor:
    """Return the mean cross-entropy, computed in chunks so that 8 000 x 152 000 logits never exist at once."""
    total = hidden.new_zeros((), dtype=torch.float32)
    for part, target in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        total = total + torch.utils.checkpoint.checkpoint(
            _chunk_loss, part, head, target, use_reentrant=False, preserve_rng_state=False
        )
    return total / labels.numel()


def _chunk_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy((hidden @ head.t()).float(), labels, reduction="sum")
