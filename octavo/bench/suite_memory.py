"""``memory``: the training memory of a stack of decoder blocks of a published size, with and without each saving.

The stack has four blocks without embedding and head: 0.77 B parameters at the width of an 8 B model. Each row is one
setup. The first is plain PyTorch (fp32 weights under autocast, fused AdamW); the rows down to :data:`LEAN` each add one
saving to the row before, and the others each change one setting of :data:`LEAN`. Bytes are those that tensors requested
from the allocator:

    weights       parameters
    states        allocated between steps in addition to weights: moments, low halves of weights, cached FP8 codes
    activations   saved by the forward for the backward
    gradients     allocated after the backward
    peak          the peak of a step, without memory that was allocated before the stack was built

On a CPU, which has no allocator statistics, steps are only timed. Only one setup is on the device at a time.
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
from octavo.bench.suite_layer import build_model, capture_arguments, case_label, decoder_inputs
from octavo.fp8.blocks import grouped_attention
from octavo.fp8.optim import OffloadedAdamW, UpdateInBackward, clip_factor, gradient_norm

BLOCKS, TOKENS, FEW = 4, 8192, 24


@dataclass(frozen=True)
class Setup:
    """The settings for training a stack; the defaults are plain PyTorch. ``states=None`` uses torch's AdamW."""

    recipe: str | None = None
    states: str | None = None
    master: str = "fp32"
    activations: str = "bf16"
    update_in_backward: bool = False
    codes: str = "keep"
    param: bool = False
    recompute: str = "none"
    offload: str = ""  # kept in host memory: "states" or "activations"


FP8 = Setup(recipe="blockwise")
LEAN = Setup("blockwise", "fp8", "bf16+sr", "fp8", update_in_backward=True)
BASELINE = "PyTorch"
SETUPS: Mapping[str, Setup] = {
    BASELINE: Setup(),
    "FP8 layers": FP8,
    "+ FP8 states": replace(FP8, states="fp8"),
    "+ bf16+16 weights": replace(FP8, states="fp8", master="bf16+16"),
    "+ bf16+sr weights": replace(FP8, states="fp8", master="bf16+sr"),
    "+ FP8 activations": replace(LEAN, update_in_backward=False),
    "+ update in backward": LEAN,
    "that, codes recast": replace(LEAN, codes="recast"),
    "that, FP8 weights": replace(LEAN, param=True),
    "that, selective recomputation": replace(LEAN, recompute="selective"),
    "that, full recomputation": replace(LEAN, recompute="full"),
    "that, states offloaded": replace(LEAN, offload="states"),
    "that, activations offloaded": replace(LEAN, offload="activations"),
}


def run(bench: Bench) -> None:
    """Measure all setups of one case, one after another."""
    model, family = build_model(bench, 2 if bench.small else BLOCKS)
    tokens = bench.tokens or (FEW if bench.small else TOKENS)
    blocks = [block for name, block in family.layers(model) if family.component_of(name) == "foundation"]
    args, kwargs = capture_arguments(blocks[0], partial(decoder_inputs, model, tokens))
    inputs = tree_map(_to_bf16, (args, kwargs))
    count = sum(p.numel() for block in blocks for p in block.parameters())
    case = f"{case_label(bench)}, {len(blocks)} blocks, {count / 1e6:.3g} M parameters, {tokens} tokens"
    work = Work(tokens=tokens)
    for name, setup in SETUPS.items():
        bytes_by_kind: dict[str, int] = {}
        candidates = {name: partial(_make_call, bench, model, blocks, setup, inputs, bytes_by_kind)}
        bench.case("memory", case, BASELINE, candidates, work, memory=bytes_by_kind)


def _make_call(
    bench: Bench,
    model: Any,
    blocks: list[nn.Module],
    setup: Setup,
    inputs: tuple[Any, Any],
    bytes_by_kind: dict[str, int],
) -> Call:
    """Build the stack, run the steps that determine its memory, and return a step to time."""
    memory = _AllocatedMemory(bench.device)
    stack = _build_stack(blocks, setup)
    if setup.activations == "fp8":
        models.use_attention(model, grouped_attention)
    else:
        model.set_attn_implementation("sdpa")
    for block in stack:  # blocks have a copy of the configuration
        _copy_attention(block, model)
    weights = memory.now()
    optimizer, (args, kwargs) = _make_optimizer(stack, setup), inputs
    updating = None
    if setup.update_in_backward:
        assert isinstance(optimizer, fp8.AdamW)
        updating = UpdateInBackward(optimizer, stack)
    dy = torch.randn_like(args[0])

    def forward() -> Tensor:
        x: Any = args[0].detach().requires_grad_()
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=setup.master == "fp32"):
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

    before = memory.now()
    step()  # creates states, codes and workspaces
    between_steps = memory.now()
    memory.reset()
    out = forward()
    saved = memory.now() - between_steps - out.numel() * out.element_size()
    backward(out)
    del out
    gradients = memory.now() - between_steps
    update()
    if memory.measures:
        bytes_by_kind.update(
            weights=weights, states=between_steps - before, activations=saved, gradients=gradients, peak=memory.peak()
        )
    return step


class _AllocatedMemory:
    """Measures the memory allocated on the device since this object was created."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._requested_before, self._allocated_before = 0, 0
        self._requested_before, self._allocated_before = self.now(), self._allocated()

    @property
    def measures(self) -> bool:
        return accelerator.requested_bytes(self._device) is not None

    def now(self) -> int:
        """Return the bytes requested by live tensors."""
        if not self.measures:
            return 0
        accelerator.synchronize(self._device)
        return (accelerator.requested_bytes(self._device) or 0) - self._requested_before

    def reset(self) -> None:
        accelerator.reset_peak(self._device)

    def peak(self) -> int:
        """Return the peak bytes since `reset`."""
        return (accelerator.peak_bytes(self._device) or 0) - self._allocated_before

    def _allocated(self) -> int:
        return accelerator.allocated_bytes(self._device) or 0


def _build_stack(blocks: list[nn.Module], setup: Setup) -> nn.ModuleList:
    dtype = torch.float32 if setup.master == "fp32" else torch.bfloat16
    stack: nn.ModuleList = copy.deepcopy(nn.ModuleList(blocks)).to(dtype)
    if setup.recipe is not None:
        settings = {"activations": setup.activations, "weight_codes": setup.codes, "param": setup.param}
        fp8.apply(stack, fp8.plan(stack, fp8.Policy(recipe=setup.recipe, **settings)))  # type: ignore[arg-type]
    fp8.activation_checkpointing(stack.named_children(), setup.recompute)
    if setup.offload == "activations":
        fp8.offload_activations(stack.named_children())
    return stack.train()


def _copy_attention(block: nn.Module, model: Any) -> None:
    """Make a copied block compute attention as its model does."""
    implementation = model.config.get_text_config()._attn_implementation
    for module in block.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = implementation


def _make_optimizer(stack: nn.Module, setup: Setup) -> torch.optim.Optimizer:
    if setup.states is None:
        return torch.optim.AdamW(stack.parameters(), lr=1e-6, fused=True)
    kind: Callable[..., fp8.AdamW] = OffloadedAdamW if setup.offload == "states" else fp8.AdamW
    return kind(stack.parameters(), lr=1e-6, states=setup.states, master=setup.master)


def _to_bf16(x: Any) -> Any:
    return x.to(torch.bfloat16) if isinstance(x, Tensor) and x.is_floating_point() else x
