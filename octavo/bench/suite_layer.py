"""``layer``: forward and backward of a decoder block, of a vision tower block, of causal attention by each kernel, and
of the head with its chunked loss.

The arguments of a block (positions, masks, lengths) are captured from a real forward of its model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from octavo import fp8, models
from octavo.bench import peers
from octavo.bench.bench import Bench, Call, Rotation, Unavailable, Work
from octavo.bench.profiles.kernel_profile import profile_call
from octavo.fp8.memory import ChunkedHead, chunk_head
from octavo.models.attention.kernel_choice import STOCK, Heads, check_kernel, heads_of, make_call
from octavo.models.forward.unused_towers import dummy_image_inputs

SHAPE, TOKENS, PATCHES = "qwen3_vl_8b", 8192, 16384


def run(bench: Bench) -> None:
    """Measure each recipe, eager and compiled, and high precision, eager and compiled."""
    model, family = build_model(bench)
    tokens = bench.tokens or (24 if bench.small else TOKENS)
    run_attention_case(bench, heads_of(model.config, tokens)[0])
    calls = {"decoder block": partial(decoder_inputs, model, tokens)}
    if family.has_vision and "image_grid_thw" in dummy_image_inputs(model, family):
        calls["vision block"] = partial(vision_inputs, model, 16 if bench.small else PATCHES)
    for name, inputs in calls.items():
        if not bench.wants(f"{case_label(bench)} {name}"):
            continue
        index = 0 if name == "vision block" else -1
        block = family.layers(model)[index][1]
        args, kwargs = capture_arguments(block, inputs)
        rows = args[0].shape[:-1].numel()
        linear = sum(2 * p.numel() for p in block.parameters() if p.dim() == 2)
        work = Work(flops=3.0 * rows * linear, tokens=rows)
        # The vision tower's attention reads lengths (tolist), which causes a graph break.
        by_name = make_candidates(bench, block, args, kwargs, whole=name != "vision block")
        case = f"{case_label(bench)} {name}, {rows} rows fwd+bwd"
        bench.case("layer", case, bench.high, by_name, work, memory=True)
    run_head_case(bench, model, tokens)


def run_attention_case(bench: Bench, part: Heads) -> None:
    """Measure every attention kernel at the shape of the decoder. The rows by kernel show which one torch chooses.
    FLOPs as in a step: 2 T^2 (heads x size) in the forward and twice that in the backward."""
    candidates = {name: partial(_attention_call, bench, name, part) for name in (STOCK, *models.available_kernels())}
    work = Work(flops=6.0 * part.tokens**2 * part.heads * part.size, tokens=part.tokens)
    case = f"{case_label(bench)} attention, {part.tokens} rows fwd+bwd"
    bench.case("layer", case, STOCK, candidates, work, memory=True, profile=partial(profile_call, device=bench.device))


def _attention_call(bench: Bench, name: str, part: Heads) -> Call:
    if name != STOCK:
        check_kernel(name, part, bench.device)
    return make_call(name, part, bench.device)


def run_head_case(bench: Bench, model: PreTrainedModel, tokens: int) -> None:
    """Measure the losses of all positions without full logits, with the head in high precision and in each recipe
    (``fp8.lm_head``). FLOPs are the FLOPs of three GEMMs; the logits recomputed in the backward are not counted."""
    weight = model.get_output_embeddings().weight
    recipes = [None, *(r for r in peers.RECIPES if peers.supported_backends(bench, r))]
    builders = {recipe or bench.high: partial(_head_call, bench, weight.shape, recipe, tokens) for recipe in recipes}
    work = Work(flops=6.0 * tokens * weight.numel(), tokens=tokens)
    bench.case("layer", f"{case_label(bench)} head, {tokens} rows fwd+bwd", bench.high, builders, work, memory=True)


class _HeadOnlyModel(nn.Module):
    """A model that only has a head."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.lm_head = head

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(input_ids))


def _head_call(bench: Bench, shape: torch.Size, recipe: str | None, tokens: int) -> Call:
    model = _HeadOnlyModel(peers.high_precision_linear(bench, *shape))
    if recipe is not None:
        fp8.apply(
            model, fp8.plan(model, fp8.Policy(recipe="off", components={"lm_head": fp8.ComponentPolicy(recipe=recipe)}))
        )
    head = chunk_head(model)
    assert isinstance(head, ChunkedHead), head
    inputs = Rotation(lambda: bench.randn(1, tokens, shape[1], grad=True))
    target = torch.randint(0, shape[0], (1, tokens), device=bench.device)

    def call() -> None:
        x = inputs()
        with head.losses(target) as losses:
            loss = losses.checked_losses(model(x).logits).mean()
        torch.autograd.grad(loss, [x, *model.parameters()])

    return call


def case_label(bench: Bench) -> str:
    """Return the name of the shape for case names."""
    return "tiny qwen3_vl" if bench.small else bench.shape or SHAPE


def build_model(bench: Bench, layers: int | None = 1) -> tuple[PreTrainedModel, models.Family]:
    """Build the model of the suite: the requested shape with ``layers`` blocks, or the tiny Qwen3-VL if small."""
    if bench.small:
        config = models.tiny_config("qwen3_vl")
        model = models.random_model(config, bench.device, bench.dtype, layers, 1)
    else:
        model = models.random_model(bench.shape or SHAPE, bench.device, bench.dtype, layers, layers)
    return model, models.describe(model)


def decoder_inputs(model: PreTrainedModel, tokens: int) -> None:
    """Run a forward over random text."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    vocabulary = embedding.num_embeddings
    ids = torch.randint(0, min(vocabulary, 1000), (1, tokens), device=model.device)
    model(input_ids=ids, use_cache=False, logits_to_keep=1)


def vision_inputs(model: PreTrainedModel, patches: int) -> None:
    """Run a forward of the tower over one square image with this many patches."""
    config = model.config.vision_config
    side = max(round(patches**0.5) // config.spatial_merge_size, 1) * config.spatial_merge_size
    pixels = config.in_channels * config.temporal_patch_size * config.patch_size**2
    values = torch.randn(side * side, pixels, device=model.device, dtype=model.dtype)
    model.model.get_image_features(values, torch.tensor([[1, side, side]], device=model.device))


class _CaptureDone(Exception):
    """Raised to end a forward once the arguments of a block are captured."""


def capture_arguments(block: nn.Module, forward: Callable[[], None]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which ``forward`` calls ``block``. Raises Unavailable if it does not call it."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise _CaptureDone

    handle = block.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad():
            forward()
    except _CaptureDone:
        pass
    finally:
        handle.remove()
    if not calls:
        raise Unavailable("the model never called this block")
    args, kwargs = calls[0]
    if not args:  # some towers pass their first argument by keyword
        return (kwargs.pop("hidden_states"),), kwargs
    return args, kwargs


def make_candidates(
    bench: Bench, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = True
) -> dict[str, Callable[[], Call]]:
    """Return the candidates: high precision and every recipe, eager and compiled (as one graph if ``whole``), recipes
    also with norms and gated MLPs fused by the plan. All have the same weights."""
    recipes: list[str | None] = [None, *(r for r in peers.RECIPES if peers.supported_backends(bench, r))]
    builders: dict[str, Callable[[], Call]] = {}
    for how in ("", "compiled", "fused", "fused compiled"):
        for recipe in recipes:
            if recipe is not None or "fused" not in how:
                name = f"{recipe or bench.high} {how}".strip()
                builders[name] = partial(_make_call, bench, block, recipe, how, args, kwargs, whole)
    return builders


def _make_call(
    bench: Bench,
    block: nn.Module,
    recipe: str | None,
    how: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    whole: bool,
) -> Call:
    layer = copy.deepcopy(block)
    if recipe is not None:
        fp8.apply(layer, fp8.plan(layer, fp8.Policy(recipe=recipe, fuse="on" if "fused" in how else "off")))
    run = peers.compile_module(lambda: layer, whole) if "compiled" in how else layer
    shape = args[0].shape
    inputs = Rotation(lambda: bench.randn(*shape, grad=True))
    dy = bench.randn(*shape)
    parameters = list(layer.parameters())

    def call() -> None:
        x = inputs()
        out = run(x, *args[1:], **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad(out, [x, *parameters], dy, allow_unused=True)

    return call
