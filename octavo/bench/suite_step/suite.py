"""Runs the candidates of ``step``, one after another, because two 8 B models do not fit in memory.

A step is the forward of one text-only sequence, the loss over all positions, the backward, and the update. FLOPs are 6
per parameter and token for linear layers, plus the FLOPs of causal attention; recomputation is not counted. A second
row of each candidate has one step by kernel (:mod:`~octavo.bench.profiles.kernel_profile`); eager candidates are also
timed by part (:mod:`~octavo.bench.profiles.budget`).

CUDA graphs run last. After a capture that failed, no other graph runs in this process: the allocator may still keep
memory for the capture, so the next figure would be another one. `make gpu` runs each graph in its own process.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from transformers import PreTrainedModel

from octavo import models
from octavo.bench.bench import Bench, Work
from octavo.bench.profiles.kernel_profile import profile_call
from octavo.bench.suite_layer import case_label
from octavo.bench.suite_step.candidates import Candidate, default_names, parse
from octavo.bench.suite_step.step import Step, build_step_model
from octavo.fp8 import measuring
from octavo.models.attention.kernel_choice import Choice, Heads, choose, heads_of

TOKENS, FEW = 8192, 24


def run(bench: Bench) -> None:
    """Measure one case: one text-only sequence of the shape."""
    candidates = [parse(name, bench.high) for name in bench.candidates or default_names(bench)]
    bench.offered |= {str(candidate) for candidate in candidates}  # all are known, also where a failure ends the suite
    tokens = bench.tokens or (FEW if bench.small else TOKENS)
    layers = bench.layers or (2 if bench.small else None)
    name = f"{case_label(bench)}{'' if layers is None else f' ({layers} blocks)'}, {tokens} tokens"
    model = build_step_model(bench, layers, meta=True)
    work = Work(flops=step_flops(model, tokens), tokens=tokens)
    text = heads_of(model.config, tokens)[0]
    del model
    candidates.sort(key=lambda candidate: candidate.graph)
    for number, candidate in enumerate(candidates):
        absent = len(bench.result.absent)
        build = {str(candidate): partial(_build, bench, layers, text, candidate)}
        time_it = partial(bench.case, "step", name, candidate.baseline(bench.high), build, work, memory=True)
        time_it(parts=Step.parts, note=Step.note, profile=partial(profile_call, device=bench.device))
        failed = candidate.graph and len(bench.result.absent) > absent
        if failed and candidates[number + 1 :] and not bench.apart:  # apart: the next one has another process anyway
            left = ", ".join(str(other) for other in candidates[number + 1 :])
            bench.leave_out(f"step {name}: {left}: the capture of {candidate} failed; run them in another process")
            return


def _build(bench: Bench, layers: int | None, text: Heads, candidate: Candidate) -> Step:
    return Step(bench, layers, text.tokens, candidate, attention_of(text, bench.device) if candidate.chunked else None)


@lru_cache
def attention_of(text: Heads, device: torch.device) -> Choice | None:
    """Return the kernel that a run with `model.attention: auto` chooses on this device."""
    return choose("auto", (text,), device, measuring.time_calls)


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
