"""``step``: whole training steps of a published size with random weights: tokens/s, TFLOP/s, MFU, peak memory.

A step is the forward, the loss over all positions, the backward, and torch's fused AdamW with states in the precision
of the weights, so that an 8 B model fits on one GPU of 141 GB. Candidates are high precision and every recipe, each
eager and compiled block by block, recipes also fused by the plan, and on a GPU with forward and backward in one CUDA
graph. They run one after another, because two such models do not fit in memory. FLOPs are 6 per parameter and token for
linear layers, plus the FLOPs of causal attention; recomputation is not counted.

For eager candidates, a few more steps are timed by part (:class:`Budget`): linear layers, attention, the head, norms,
the optimizer, and the rest (embeddings, residual sums, activation functions, idle time). Times are measured with CUDA
events on a GPU and with the clock on a CPU. A part runs during the calls wrapped for it (the forward of a module, the
loss, the optimizer step), and in the backward during the autograd nodes that these calls created. At any time exactly
one part runs, so the parts add up to the step.

Modules are neither hooked, which would disable fusions, nor called with different tensors. Each event costs the host a
few microseconds; if the GPU waits for the host, the time counts for the current part. Compiled blocks have no modules
to instrument.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from octavo import fp8, models
from octavo.base import accelerator
from octavo.bench import peers
from octavo.bench.bench import Bench, Work
from octavo.bench.suite_layer import SHAPE, build_model, case_label

TOKENS, FEW = 8192, 24
#: parts in the order in which they are shown; the last is all time of no other part
PARTS = ("linears", "attention", "head", "norms", "optimizer", "rest")
LINEARS, ATTENTION, HEAD, NORMS, OPTIMIZER, REST = PARTS

_ATTENTION = re.compile(r"(^|_)(attn|attention)$", re.IGNORECASE)
_MLP = re.compile(r"(^|_)(mlp|ffn|feed_forward)$", re.IGNORECASE)


def run(bench: Bench) -> None:
    """Measure one case: one text-only sequence of the shape."""
    tokens = bench.tokens or (FEW if bench.small else TOKENS)
    layers = bench.layers or (2 if bench.small else None)
    name = f"{case_label(bench)}{'' if layers is None else f' ({layers} blocks)'}, {tokens} tokens"
    flops = step_flops(_build_model(bench, layers, meta=True), tokens)
    candidates = {f"{bench.high} compiled": partial(Step, bench, layers, tokens, None, "compiled")}
    graph = ("graph",) if bench.device.type == "cuda" else ()
    for how in (*graph, ""):
        candidates[f"{bench.high} {how}".strip()] = partial(Step, bench, layers, tokens, None, how)
    for recipe in peers.RECIPES:
        if peers.supported_backends(bench, recipe):
            for how in ("fused compiled", "compiled", "fused", *graph, ""):
                candidates[f"{recipe} {how}".strip()] = partial(Step, bench, layers, tokens, recipe, how)
    work = Work(flops=flops, tokens=tokens)
    # One at a time: two models of this size do not fit in memory together.
    for candidate, build in candidates.items():
        bench.case("step", name, f"{bench.high} compiled", {candidate: build}, work, memory=True, parts=Step.parts)


def _build_model(bench: Bench, layers: int | None, meta: bool = False) -> PreTrainedModel:
    if meta and not bench.small:
        return models.random_model(bench.shape or SHAPE, "meta", bench.dtype, layers)
    return build_model(bench, layers)[0]


def step_flops(model: PreTrainedModel, tokens: int) -> float:
    """Return the operations of a text-only training step with one sequence of ``tokens``.

    Linear layers: 2 operations per weight and token in the forward, 4 in the backward; only active experts count.
    Causal attention: two products of T^2 / 2 x (heads x head dim) in the forward, twice that in the backward, which is
    6 T^2 (heads x head dim) per block. Source: PaLM, appendix B, with the causal half.
    """
    config = model.config.get_text_config()
    tower = models.describe(model).tower
    experts = getattr(config, "num_experts", None)
    active = getattr(config, "num_experts_per_tok", 1) / experts if experts else 1.0
    weights = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or "embed" in name or (tower and name.startswith(tower + ".")):
            continue
        weights += parameter.numel() * (active if parameter.dim() == 3 else 1.0)
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    return 6.0 * weights * tokens + 6.0 * config.num_hidden_layers * tokens**2 * width


class Step:
    """One training step of a candidate: forward, loss, backward and update."""

    def __init__(self, bench: Bench, layers: int | None, tokens: int, recipe: str | None, how: str) -> None:
        self.device, self.how = bench.device, how
        self.model = model = _build_model(bench, layers)
        family = models.describe(model)
        if recipe is not None:
            policy = fp8.Policy(recipe=recipe, fuse="on" if "fused" in how else "off")
            fp8.apply(model, fp8.plan(model, policy, family.components))
        if "compiled" in how:
            for _, block in family.layers(model):
                block.compile(fullgraph=True)
        trained = [p for n, p in model.named_parameters() if not (family.tower and n.startswith(family.tower + "."))]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        vocabulary = embedding.num_embeddings
        self.ids = torch.randint(0, min(vocabulary, 1000), (1, tokens + 1), device=bench.device)
        self.loss, self.update = _chunked_loss, self.optimizer.step
        self.work = self.capture_graph() if how == "graph" else self.gradients

    def __call__(self) -> None:
        self.work()
        self.update()
        if self.how != "graph":  # a replay overwrites its gradients
            self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> None:
        """Run forward, loss and backward."""
        hidden = self.model.get_decoder()(input_ids=self.ids[:, :-1], use_cache=False).last_hidden_state
        self.loss(hidden[0], self.model.get_output_embeddings().weight, self.ids[0, 1:]).backward()

    def capture_graph(self) -> Callable[[], None]:
        """Capture `gradients` as a CUDA graph, including the casts of weights; returns its replay."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with models.disable_masks(self.model):
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self.gradients()
                    self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                self.gradients()
        return graph.replay

    def parts(self, steps: int = 3) -> dict[str, float]:
        """Return the seconds by part of the median of ``steps`` steps; empty if blocks cannot be instrumented."""
        if "compiled" in self.how or self.how == "graph":
            return {}
        budget = Budget(self.device)
        self.loss, self.update = budget.wrap(HEAD, _chunked_loss), budget.wrap(OPTIMIZER, self.optimizer.step)
        try:
            with measure_parts(self.model, budget):
                measured = sorted((budget.step(self) for _ in range(steps)), key=lambda parts: sum(parts.values()))
        finally:
            self.loss, self.update = _chunked_loss, self.optimizer.step
        return measured[steps // 2]


def _chunked_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, chunk: int = 2048) -> torch.Tensor:
    """Return the mean cross-entropy, computed in chunks so that 8 000 x 152 000 logits never exist at once."""
    total = hidden.new_zeros((), dtype=torch.float32)
    for part, target in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        total = total + torch.utils.checkpoint.checkpoint(
            _chunk_loss, part, head, target, use_reentrant=False, preserve_rng_state=False
        )
    return total / labels.numel()


def _chunk_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy((hidden @ head.t()).float(), labels, reduction="sum")


class Budget:
    """Measures the seconds of a step by part: wrap functions with :meth:`wrap`, then call :meth:`step`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str, Any]] = []
        self._claimed: set[Any] = set()

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` so that its calls in a step, and their backward, count as ``part``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._marks[-1][0] if self._marks else REST
            self._mark(part)
            output = function(*args, **kwargs)
            self._mark(before)
            self._claim(part, output, (args, kwargs))
            return output

        return run

    @property
    def _has_events(self) -> bool:
        return accelerator.why_no_streams(self.device) is None

    def step(self, call: Callable[[], Any]) -> dict[str, float]:
        """Run a step; return seconds by part."""
        self._wait()
        self._marks.clear()
        self._mark(REST)
        call()
        self._mark(REST)
        self._wait()
        self._claimed.clear()
        seconds = dict.fromkeys(PARTS, 0.0)
        for (part, begins), (_, ends) in zip(self._marks, self._marks[1:], strict=False):
            seconds[part] += begins.elapsed_time(ends) / 1e3 if self._has_events else ends - begins
        return seconds

    def _mark(self, part: str) -> None:
        """Record that ``part`` starts now."""
        if self._has_events:
            moment: Any = accelerator.new_event(self.device, timing=True)
            moment.record(accelerator.current_stream(self.device))
        else:
            moment = time.perf_counter()
        self._marks.append((part, moment))

    def _claim(self, part: str, output: Any, inputs: Any) -> None:
        """Assign autograd nodes between inputs and outputs to this part, unless a nested part has them."""
        border = {t.grad_fn for t in tree_leaves(inputs) if isinstance(t, Tensor)}
        todo = [t.grad_fn for t in tree_leaves(output) if isinstance(t, Tensor)]
        seen = set()
        while todo:
            node = todo.pop()
            if node is None or node in border or node in seen:
                continue
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
            if node not in self._claimed and node.name() != "torch::autograd::AccumulateGrad":
                self._claimed.add(node)
                node.register_prehook(lambda *_: self._mark(part))
                node.register_hook(lambda *_: self._mark(REST))

    def _wait(self) -> None:
        accelerator.synchronize(self.device)


@contextmanager
def measure_parts(model: nn.Module, budget: Budget) -> Iterator[None]:
    """Context in which the modules of a model count as parts: linear layers, MLPs (as a whole, to compare with fused
    MLPs), norms, and attention without its linear layers and norms."""
    changed = list(_iter_parts(model, ""))
    for part, module in changed:
        module.forward = budget.wrap(part, module.forward)
    try:
        yield
    finally:
        for _, module in changed:
            del module.forward


def _iter_parts(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over (part, module) of the modules that count as parts, outermost first."""
    if isinstance(module, nn.Linear) or _MLP.search(name):
        yield LINEARS, module
    elif "norm" in type(module).__name__.lower():
        yield NORMS, module
    else:
        if _ATTENTION.search(name):
            yield ATTENTION, module
        for child, inner in module.named_children():
            yield from _iter_parts(inner, child)
