"""Memory by kind, in bytes, counted on this rank: what tensors hold, not what an allocator reserves.

The kinds are those that `octavo plan` predicts (:mod:`octavo.train.estimate.memory`). Counting costs a slow step,
so it is done in few: the first, and those after a health step.
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
    """What a step holds. `forward()` surrounds the forward of a micro-batch, `report()` follows the backward.

    What is saved for backward is counted by its storages (:mod:`octavo.fp8.memory.accounting`), the largest micro-batch
    of the step: `activations`, and `logits` for what the head and the loss keep. Positions, masks and the batch itself
    are neither. While health figures are taken, FP8 layers also keep x in high precision, so the loop never asks for
    both.
    """

    def __init__(self, model: nn.Module, family: models.Family) -> None:
        self.model, self.family = model, family
        self.activations = self.logits = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        with count_saved(self.model, self.family.layers(self.model)) as saved:
            yield
        rows = [row for row in made_by_model(saved.report()) if row.kind == "activation"]
        logits = sum(row.bytes for row in rows if not row.module or self.family.component_of(row.module) == "lm_head")
        self.activations = max(self.activations, sum(row.bytes for row in rows) - logits)
        self.logits = max(self.logits, logits)

    def report(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """weights, master (what makes weights exact beside them), gradients, optimizer (moments), codes (FP8 codes of
        weights), activations, logits, peak_rss (of the process); on CUDA peak_cuda too, on another device that counts
        it peak_device. Phases that hold more add it: reference (weights of a frozen copy), kv_cache (what the rollout's
        sequences took, until it was released)."""
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
        device = accelerator.here()
        if (peak := accelerator.peak(device)) is not None:
            kinds["peak_cuda" if accelerator.is_gpu(device) else "peak_device"] = peak
        return kinds


def peak_rss() -> int:
    """Bytes that this process ever held at once.

    Linux counts them for the program itself (VmHWM). What getrusage tells there begins with the peak of the process
    that started this one, which may be far larger.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def weight_bytes(model: nn.Module) -> int:
    """Parameters of a model that nobody trains, and FP8 codes beside them."""
    return _bytes(model.parameters()) + fp8.weight_cache_bytes(model)


def made_by_model(saved: SavedBytes) -> Iterator[Row]:
    """Rows from the first module's on, as they were made: what comes before is the batch, on the model's device and in
    its dtype."""
    return itertools.dropwhile(lambda row: not row.module, saved.rows)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages on this rank, each once."""
    storages = {}
    for tensor in tensors:
        for part in _parts(tensor):
            storage = part.untyped_storage()
            storages[str(storage.device), storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """What holds a tensor's values on this rank: itself, or codes and scales of a frozen FP8 weight."""
    if not is_frozen(tensor):
        return (plain(tensor),)
    q = codes_of_frozen(tensor)
    return (q.data, q.scale)
