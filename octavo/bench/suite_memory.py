"""``memory``: the memory of a stack of decoder blocks of a published size in training, with and without each saving.

Four blocks, no embedding and no head: 0.77 B parameters at the width of 8 B. Each row is a way to train them, the first
in plain PyTorch (fp32 weights under autocast, fused AdamW); those above the line of :data:`LEAN` add one saving each to
the row before, those below exchange one thing of the leanest. Bytes are the allocator's, as tensors asked for them:

    weights       parameters
    states        what lies there between two steps beside them: moments, halves of weights, cached FP8 codes
    activations   what a forward left for the backward
    gradients     what lies there after a backward
    peak          the most that was there in a step, beside what lay there before the stack was made

Where there is no allocator to ask, on a CPU, steps are timed alone. One way at a time is on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedConfig

from octavo import fp8, models
from octavo.base import accelerator
from octavo.bench.bench import Bench, Call, Work
from octavo.bench.suite_layer import capture, decoder_inputs, shown, small_or_real
from octavo.fp8.blocks import grouped_attention
from octavo.fp8.optim import OffloadedAdamW, UpdateInBackward, clip_factor, gradient_norm

BLOCKS, TOKENS, FEW = 4, 8192, 24


@dataclass(frozen=True)
class Way:
    """How a stack is trained; the defaults are plain PyTorch's. ``states`` None: torch's AdamW."""

    recipe: str | None = None
    states: str | None = None
    master: str = "fp32"
    activations: str = "bf16"
    inside: bool = False
    codes: str = "keep"
    param: bool = False
    recompute: str = "none"
    offload: str = ""  # what is kept in host memory: "states", "activations"


FP8 = Way(recipe="blockwise")
LEAN = Way("blockwise", "fp8", "bf16+sr", "fp8", inside=True)
BASELINE = "PyTorch"
WAYS: Mapping[str, Way] = {
    BASELINE: Way(),
    "FP8 layers": FP8,
    "+ FP8 states": replace(FP8, states="fp8"),
    "+ bf16+16 weights": replace(FP8, states="fp8", master="bf16+16"),
    "+ bf16+sr weights": replace(FP8, states="fp8", master="bf16+sr"),
    "+ FP8 activations": replace(LEAN, inside=False),
    "+ update in backward": LEAN,
    "that, codes recast": replace(LEAN, codes="recast"),
    "that, FP8 weights": replace(LEAN, param=True),
    "that, selective recomputation": replace(LEAN, recompute="selective"),
    "that, full recomputation": replace(LEAN, recompute="full"),
    "that, states offloaded": replace(LEAN, offload="states"),
    "that, activations offloaded": replace(LEAN, offload="activations"),
}


def run(bench: Bench) -> None:
    """One case: measure every way, one after the other."""
    model, family = small_or_real(bench, 2 if bench.small else BLOCKS)
    tokens = bench.tokens or (FEW if bench.small else TOKENS)
    blocks = [block for name, block in family.layers(model) if family.component_of(name) == "foundation"]
    args, kwargs = capture(blocks[0], partial(decoder_inputs, model, tokens))
    inputs = tree_map(_lowered, (args, kwargs))
    count = sum(p.numel() for block in blocks for p in block.parameters())
    case = f"{shown(bench)}, {len(blocks)} blocks, {count / 1e6:.3g} M parameters, {tokens} tokens"
    work = Work(tokens=tokens)
    for name, way in WAYS.items():
        bytes_by_kind: dict[str, int] = {}
        candidates = {name: partial(_call, bench, model, blocks, way, inputs, bytes_by_kind)}
        bench.case("memory", case, BASELINE, candidates, work, memory=bytes_by_kind)


def _call(
    bench: Bench, model: Any, blocks: list[nn.Module], way: Way, inputs: tuple[Any, Any], bytes_by_kind: dict[str, int]
) -> Call:
    """Build the stack, run the steps that determine its memory, and return a step to time."""
    held = _Held(bench.device)
    stack = _stack(blocks, way)
    if way.activations == "fp8":
        models.use_attention(model, grouped_attention)
    else:
        model.set_attn_implementation("sdpa")
    for block in stack:  # blocks have a copy of the configuration
        _follow(block, model)
    weights = held.now()
    optimizer, (args, kwargs) = _optimizer(stack, way), inputs
    updating = None
    if way.inside:
        assert isinstance(optimizer, fp8.AdamW)
        updating = UpdateInBackward(optimizer, stack)
    dy = torch.randn_like(args[0])

    def forward() -> Tensor:
        x: Any = args[0].detach().requires_grad_()
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=way.master == "fp32"):
            for block in stack:
                x = block(x, *args[1:], **kwargs)
                x = x[0] if isinstance(x, tuple) else x
        return x

    def backward(out: Tensor) -> None:
        if updating:
            updating.run(lambda retain: torch.autograd.backward(out, dy, retain_graph=retain))
        else:
            torch.autograd.backward(out, dy)

    def update() -> None:
        if isinstance(optimizer, fp8.AdamW) and not updating:
            optimizer.step(factor=clip_factor(gradient_norm(stack.parameters()), 1.0))
        elif not updating:
            torch.nn.utils.clip_grad_norm_(stack.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step() -> None:
        backward(forward())
        update()

    before = held.now()
    step()  # creates states, codes and workspaces
    standing = held.now()
    held.reset()
    out = forward()
    saved = held.now() - standing - out.numel() * out.element_size()
    backward(out)
    del out
    gradients = held.now() - standing
    update()
    if held.measures:
        bytes_by_kind.update(
            weights=weights, states=standing - before, activations=saved, gradients=gradients, peak=held.most()
        )
    return step


class _Held:
    """Memory allocated on the device since this object was created."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked, self._held = 0, 0
        self._asked, self._held = self.now(), self._allocated()

    @property
    def measures(self) -> bool:
        return accelerator.requested_bytes(self._device) is not None

    def now(self) -> int:
        """Bytes requested by live tensors."""
        if not self.measures:
            return 0
        accelerator.synchronize(self._device)
        return (accelerator.requested_bytes(self._device) or 0) - self._asked

    def reset(self) -> None:
        accelerator.reset_peak(self._device)

    def most(self) -> int:
        """Peak bytes since `reset`."""
        return (accelerator.peak_bytes(self._device) or 0) - self._held

    def _allocated(self) -> int:
        return accelerator.allocated_bytes(self._device) or 0


def _stack(blocks: list[nn.Module], way: Way) -> nn.ModuleList:
    dtype = torch.float32 if way.master == "fp32" else torch.bfloat16
    stack: nn.ModuleList = copy.deepcopy(nn.ModuleList(blocks)).to(dtype)
    if way.recipe is not None:
        settings = {"activations": way.activations, "weight_codes": way.codes, "param": way.param}
        fp8.apply(stack, fp8.plan(stack, fp8.Policy(recipe=way.recipe, **settings)))  # type: ignore[arg-type]
    fp8.activation_checkpointing(stack.named_children(), way.recompute)
    if way.offload == "activations":
        fp8.offload_activations(stack.named_children())
    return stack.train()


def _follow(block: nn.Module, model: Any) -> None:
    """Make a copied block compute attention as its model does."""
    wanted = model.config.get_text_config()._attn_implementation
    for module in block.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = wanted


def _optimizer(stack: nn.Module, way: Way) -> torch.optim.Optimizer:
    if way.states is None:
        return torch.optim.AdamW(stack.parameters(), lr=1e-6, fused=True)
    kind: Callable[..., fp8.AdamW] = OffloadedAdamW if way.offload == "states" else fp8.AdamW
    return kind(stack.parameters(), lr=1e-6, states=way.states, master=way.master)


def _lowered(x: Any) -> Any:
    return x.to(torch.bfloat16) if isinstance(x, Tensor) and x.is_floating_point() else x
