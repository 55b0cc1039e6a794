"""Memory by kind on this rank: bytes of tensors, not bytes that an allocator reserves.

The kinds are those that `octavo plan` predicts (:mod:`octavo.train.estimate.memory`). Counting slows a step down, so
only few steps do it: the first, and those after a health step.
"""

from __future__ import annotations

import itertools
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from octavo import fp8, models
from octavo.base import accelerator
from octavo.fp8.memory import Row, SavedBytes, count_saved
from octavo.fp8.weights import codes_of_frozen, is_frozen, plain

MASTERS = ("master", "master_low")


class Memory:
    """Counts the memory of a step. `forward()` is the context of a micro-batch's forward, `report()` follows backward.

    Tensors saved for backward are counted by their storages (:mod:`octavo.fp8.memory.accounting`), for the largest
    micro-batch of the step: `activations`, and `logits` for what the head and the loss keep. Positions, masks and the
    batch itself are excluded. With health figures FP8 layers also keep x in high precision, so the loop never requests
    both.
    """

    def __init__(self, model: nn.Module, family: models.Family) -> None:
        self.model, self.family = model, family
        self.activations = self.logits = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        with count_saved(self.model, self.family.layers(self.model)) as saved:
            yield
        rows = [row for row in rows_of_model(saved.report()) if row.kind == "activation"]
        logits = sum(row.bytes for row in rows if not row.module or self.family.component_of(row.module) == "lm_head")
        self.activations = max(self.activations, sum(row.bytes for row in rows) - logits)
        self.logits = max(self.logits, logits)

    def report(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """Return the bytes by kind: weights, master (the fp32 values or lower bits of weights), gradients, optimizer
        (moments), codes (FP8 codes of weights), activations, logits, peak_rss (of the process); on CUDA also peak_cuda,
        on another device that counts it peak_device. Phases add reference (weights of a frozen copy) and kv_cache (of
        the rollout, until it is released)."""
        weights = list(self.model.parameters())
        states = [(key, v) for s in optimizer.state.values() for key, v in s.items() if isinstance(v, Tensor)]
        kinds = {
            "weights": _bytes(weights),
            "master": _bytes(v for key, v in states if key in MASTERS),
            "gradients": _bytes(p.grad for p in weights if p.grad is not None),
            "optimizer": _bytes(v for key, v in states if key not in MASTERS),
            "codes": fp8.weight_cache_bytes(self.model),
            "activations": self.activations,
            "logits": self.logits,
            "peak_rss": peak_rss(),
        }
        device = accelerator.default_device()
        if (peak := accelerator.peak_bytes(device)) is not None:
            kinds["peak_cuda" if accelerator.is_gpu(device) else "peak_device"] = peak
        return kinds


def peak_rss() -> int:
    """Return the peak resident memory of this process, in bytes.

    On Linux it is VmHWM, because getrusage there starts with the peak of the parent process, which may be far larger.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a frozen model's parameters and their cached FP8 codes."""
    return _bytes(model.parameters()) + fp8.weight_cache_bytes(model)


def rows_of_model(saved: SavedBytes) -> Iterator[Row]:
    """Return the rows in the order of creation, from the first row of a module on. Earlier rows are the batch, moved to
    the model's device and dtype."""
    return itertools.dropwhile(lambda row: not row.module, saved.rows)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct storages on this rank."""
    storages = {}
    for tensor in tensors:
        for part in _parts(tensor):
            storage = part.untyped_storage()
            storages[str(storage.device), storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with values on this rank: the tensor itself, or codes and scales of a frozen FP8 weight."""
    if not is_frozen(tensor):
        return (plain(tensor),)
    q = codes_of_frozen(tensor)
    return (q.data, q.scale)
