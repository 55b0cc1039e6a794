"""Memory by kind, in bytes, counted on this rank: what tensors hold, not what an allocator reserves.

Walking a model costs milliseconds, so this is done in few steps: the first, and those after a health step.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from octavo import fp8, models


class Kept:
    """What autograd keeps between forward and backward, and the other kinds.

    `forward()` surrounds a micro-batch's forward. Every tensor that it saves is counted once by its storage;
    parameters are not counted, nor what FSDP gathers of them. Under recomputation blocks keep only their inputs, which
    saved-tensor hooks cannot see; hooks on the blocks do. FP8 layers save codes and scales, which therefore count as
    what they are: one byte each. (While health figures are taken they also keep x in high precision, so the loop never
    asks for both in one step.)
    """

    def __init__(self, model: nn.Module, family: models.Family) -> None:
        self.model, self.family = model, family
        self.activations = 0
        self._owned = {_key(t) for t in [*model.parameters(), *model.buffers()]}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count what the forward inside keeps; the largest micro-batch is reported."""
        found: dict[tuple[str, int], int] = {}
        alive: list[Tensor] = []  # an address may be used again as soon as its tensor is gone

        def pack(tensor: Tensor) -> Tensor:
            key = _key(tensor)
            if key not in self._owned and key not in found and not any(key in group for group in gathered.values()):
                found[key] = tensor.untyped_storage().nbytes()
                alive.append(tensor.detach())
            return tensor

        def entered(block: nn.Module, args: tuple, kwargs: dict) -> None:
            for value in [*args, *kwargs.values()]:
                if isinstance(value, Tensor):
                    pack(value)

        # Under FSDP a group's weights are whole while its forward runs. They are forgotten after it: the address of
        # what was freed may be an activation's next.
        gathered: dict[nn.Module, set[tuple[str, int]]] = {}

        def gather(group: nn.Module, args: tuple) -> None:
            gathered[group] = {_key(p) for p in group.parameters()}

        def release(group: nn.Module, args: tuple, output: object) -> None:
            gathered.pop(group, None)

        recomputed = [b for _, b in self.family.layers(self.model) if getattr(b, "gradient_checkpointing", False)]
        hooks = [block.register_forward_pre_hook(entered, with_kwargs=True) for block in recomputed]
        for group in (module for module in self.model.modules() if isinstance(module, FSDPModule)):
            hooks += [group.register_forward_pre_hook(gather), group.register_forward_hook(release)]
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                yield
        finally:
            for hook in hooks:
                hook.remove()
        self.activations = max(self.activations, sum(found.values()))

    def report(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """weights, gradients, optimizer, codes (cached FP8 codes of weights), activations, peak_rss (of the process);
        on CUDA peak_cuda too."""
        weights = list(self.model.parameters())
        states = (v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
        kinds = {
            "weights": _bytes(weights),
            "gradients": _bytes(p.grad for p in weights if p.grad is not None),
            "optimizer": _bytes(states),
            "codes": fp8.code_bytes(self.model),
            "activations": self.activations,
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        }
        if torch.cuda.is_available():
            kinds["peak_cuda"] = torch.cuda.max_memory_allocated()
        return kinds


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _key(tensor: Tensor) -> tuple[str, int]:
    storage = _local(tensor).untyped_storage()
    return str(storage.device), storage.data_ptr()


def _bytes(tensors: Iterable[Tensor]) -> int:
    found = {_key(t): _local(t).untyped_storage().nbytes() for t in tensors}
    return sum(found.values())
