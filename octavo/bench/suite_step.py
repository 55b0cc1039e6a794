"""``step``: whole training steps of a published size with random weights: tokens/s, TFLOP/s, MFU, peak memory.

Forward, loss over all positions, backward, and torch's fused AdamW with states in the weights' precision, so that an
8 B model fits one GPU of 141 GB. High precision, eager and compiled, beside every recipe, eager and compiled block by
block, unfused and fused by the plan, and on a GPU with forward and backward as one CUDA graph; one after the other,
since two such models do not fit beside each other. FLOPs are 6 a parameter and token for linear layers plus causal
attention's; recomputation counts for nothing. Of each step that runs eagerly a few more are cut into parts
(:mod:`octavo.bench.budget`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from octavo import fp8, models
from octavo.bench import peers
from octavo.bench.bench import Bench, Work
from octavo.bench.budget import HEAD, OPTIMIZER, Budget, claimed
from octavo.bench.suite_layer import SHAPE, shown, small_or_real

TOKENS, FEW = 8192, 24


def run(bench: Bench) -> None:
    """One case: the shape, text only, one sequence."""
    tokens = bench.tokens or (FEW if bench.small else TOKENS)
    layers = bench.layers or (2 if bench.small else None)
    name = f"{shown(bench)}{'' if layers is None else f' ({layers} blocks)'}, {tokens} tokens"
    flops = step_flops(_model(bench, layers, meta=True), tokens)
    candidates = {f"{bench.high} compiled": partial(Step, bench, layers, tokens, None, "compiled")}
    graph = ("graph",) if bench.device.type == "cuda" else ()
    for how in (*graph, ""):
        candidates[f"{bench.high} {how}".strip()] = partial(Step, bench, layers, tokens, None, how)
    for recipe in peers.RECIPES:
        if peers.able(bench, recipe):
            for how in ("fused compiled", "compiled", "fused", *graph, ""):
                candidates[f"{recipe} {how}".strip()] = partial(Step, bench, layers, tokens, recipe, how)
    work = Work(flops=flops, tokens=tokens)
    # One at a time: two models of this size do not fit beside each other.
    for candidate, build in candidates.items():
        bench.case("step", name, f"{bench.high} compiled", {candidate: build}, work, memory=True, parts=Step.parts)


def _model(bench: Bench, layers: int | None, meta: bool = False) -> PreTrainedModel:
    if meta and not bench.small:
        return models.random_model(bench.shape or SHAPE, "meta", bench.dtype, layers)
    return small_or_real(bench, layers)[0]


def step_flops(model: PreTrainedModel, tokens: int) -> float:
    """Operations of a text-only training step of ``tokens`` in one sequence.

    Linear layers: 2 operations a weight and token forward, 4 backward; of experts those that work on a token. Causal
    attention: two products of T^2 / 2 x (heads x head dim) forward, twice that backward: 6 T^2 (heads x head dim) a
    block. Source: PaLM, appendix B, with the causal half.
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
        self.model = model = _model(bench, layers)
        family = models.describe(model)
        if recipe is not None:
            policy = fp8.Policy(recipe=recipe, fuse="on" if "fused" in how else "off")
            fp8.apply(model, fp8.plan(model, policy, family.components))
        if "compiled" in how:
            for _, block in family.layers(model):
                block.compile(fullgraph=True)
        trained = [p for n, p in model.named_parameters() if not (family.tower and n.startswith(family.tower + "."))]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
        vocabulary = model.get_input_embeddings().num_embeddings
        self.ids = torch.randint(0, min(vocabulary, 1000), (1, tokens + 1), device=bench.device)
        self.loss, self.update = _loss, self.optimizer.step
        self.work = self.captured() if how == "graph" else self.gradients

    def __call__(self) -> None:
        self.work()
        self.update()
        if self.how != "graph":  # a replay writes over its gradients
            self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> None:
        """Forward, loss and backward."""
        hidden = self.model.get_decoder()(input_ids=self.ids[:, :-1], use_cache=False).last_hidden_state
        self.loss(hidden[0], self.model.get_output_embeddings().weight, self.ids[0, 1:]).backward()

    def captured(self) -> Callable[[], None]:
        """The same as a graph, the casts of weights in it."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with models.without_masks(self.model):
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self.gradients()
                    self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                self.gradients()
        return graph.replay

    def parts(self, steps: int = 3) -> dict[str, float]:
        """Seconds by part of the median of ``steps`` steps; empty where nobody sees into blocks."""
        if "compiled" in self.how or self.how == "graph":
            return {}
        budget = Budget(self.device)
        self.loss, self.update = budget.around(HEAD, _loss), budget.around(OPTIMIZER, self.optimizer.step)
        try:
            with claimed(self.model, budget):
                found = sorted((budget.step(self) for _ in range(steps)), key=lambda parts: sum(parts.values()))
        finally:
            self.loss, self.update = _loss, self.optimizer.step
        return found[steps // 2]


def _loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, chunk: int = 2048) -> torch.Tensor:
    """Mean cross-entropy, a part of the sequence at a time, so that 8 000 x 152 000 logits never stand at once."""
    total = hidden.new_zeros((), dtype=torch.float32)
    for part, target in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        total = total + torch.utils.checkpoint.checkpoint(
            _part, part, head, target, use_reentrant=False, preserve_rng_state=False
        )
    return total / labels.numel()


def _part(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy((hidden @ head.t()).float(), labels, reduction="sum")
