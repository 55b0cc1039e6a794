"""The FP8 weights of an export: names, pieces and orientation, so that scales are renamed as their weights are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.stock_model import EXPERTS, Stock
from octavo.fp8.policy import Row
from octavo.models.folder.quantization import FUSED

BLOCK = 128


def fused_group(name: str) -> str | None:
    """What layers of one fused GEMM have in common: of "a.q_proj", "a.q_proj|k_proj|v_proj". None for a layer alone."""
    parent, _, leaf = name.rpartition(".")
    return next((f"{parent}.{'|'.join(leaves)}" for leaves in FUSED if leaf in leaves), None)


@dataclass(frozen=True)
class Matrix:
    """One weight in FP8 on disk, and where its values are.

    name    on disk, ending in ".weight"
    parameter  that it is, or is a part of
    module  the module that it belongs to, by its name in memory
    shape   (N, K)
    slot    the expert, None for a linear layer
    rows    which of the parameter's N rows (of the expert's), as (first, behind the last)
    group   matrices of one group are all in FP8 or none: engines run them as one
    shares  in the tensor format, matrices with the same word here have one scale
    """

    name: str
    parameter: str
    module: str
    shape: tuple[int, int]
    slot: int | None
    rows: tuple[int, int]
    group: str
    shares: str


class Matrices(Stock):
    """A stock model, and what its rows of a plan are on disk in FP8."""

    def aliases(self, module: str) -> tuple[str, ...]:
        """The names under which loaders look for a module in a skip list: transformers by that in memory, vLLM by that
        on disk through its own mapping, others without the `model.` that precedes parts beside the language model."""
        names = {module, self.renamed(module)}
        parts = {name.removeprefix("model.") for name in names}
        names |= {name for name in parts if not name.startswith(("layers.", "language_model."))}
        return tuple(sorted(names))

    def groups(self, row: str) -> tuple[str, ...]:
        """What `Matrix.group` of a row's weights would be."""
        module = self.modules.get(row)
        if module is None:  # experts: a parameter, whose gate and up are in it
            return (row.rpartition(".")[0],)
        return (fused_group(self.renamed(row)) or self.renamed(row),)

    def matrices(self, row: Row) -> tuple[str | None, tuple[Matrix, ...]]:
        """(why a row cannot be written in FP8, its weights on disk)."""
        if row.kind == "experts":
            return None, tuple(self._experts(row))
        name, n, k = f"{row.name}.weight", *row.shape
        disk = self.disk[name]
        shared = [other for other, found in self.disk.items() if other != name and set(found) & set(disk)]
        if len(disk) != 1 or shared or not disk[0].endswith(".weight"):
            return "it is a part of another tensor on disk", ()
        group = fused_group(disk[0].removesuffix(".weight")) or disk[0].removesuffix(".weight")
        return None, (Matrix(disk[0], name, row.name, (n, k), None, (0, n), group, group),)

    def _experts(self, row: Row) -> Iterator[Matrix]:
        """Expert by expert; names by transformers' way back where it splits experts, else as Qwen writes them."""
        (n, k), count = row.shape, row.experts or 0
        leaves = EXPERTS.get(row.name.rpartition(".")[2], EXPERTS["down_proj"])
        halves, disk = len(leaves), self.disk[row.name]
        if len(disk) != halves * count:
            disk = tuple(f"{self.renamed(row.module)}.{e}.{leaf}.weight" for leaf in leaves for e in range(count))
        else:
            disk = self._ordered(row, disk, halves)
        size = n // halves
        for i, name in enumerate(disk):
            half, e = divmod(i, count)
            rows = (half * size, (half + 1) * size)
            yield Matrix(name, row.name, row.module, (size, k), e, rows, row.module, f"{row.name}.{e}")

    def _ordered(self, row: Row, disk: tuple[str, ...], halves: int) -> tuple[str, ...]:
        """The names of (half, expert) in that order, found by sending numbers through transformers' way back."""
        count = row.experts or 0
        numbers = torch.arange(halves * count).view(halves, count).T  # [E, halves]
        probe = numbers.repeat_interleave(row.shape[0] // halves, dim=1).unsqueeze(-1)  # [E, N, 1]
        probe = probe.mT.contiguous() if self.transposed(row.name) else probe
        found = self.revert({row.name: probe})
        order = {int(t.reshape(-1)[0]): name for name, t in found.items()}
        if sorted(order) != list(range(halves * count)):
            raise CheckpointError(f"the experts of {row.name} do not lie one by one on disk; write bf16")
        return tuple(order[i] for i in range(halves * count))

    def plain(self, parameters: set[str]) -> tuple[dict, dict[str, tuple[str, ...]]]:
        """Of parameters in high precision: names, dtypes and shapes on disk, and what is converted together."""
        users: dict[str, list[str]] = {}
        for name in self.weights:
            if name in parameters:
                for disk in self.disk[name]:
                    users.setdefault(disk, []).append(name)
        together = {n: tuple(users[self.disk[n][0]]) for n in self.weights if n in parameters}
        out: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
        for name, group in together.items():
            found = self.to_disk({n: self.weights[n] for n in group})
            out[name] = {disk: (self.dtype(name), tuple(t.shape)) for disk, t in found.items()}
        return out, together

    def to_disk(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters as they are written in high precision: `revert`, and published experts turned round."""
        found = self.revert({name: t for name, t in state.items() if name not in self.turned})
        for name in state:
            if name in self.turned:  # transformers, which goes by shapes, would turn it back
                ((disk, t),) = self.revert({name: state[name]}).items()
                found[disk] = t.mT
        return found

    @cached_property
    def turned(self) -> frozenset[str]:
        """The experts that are written the other way round than they are stored."""
        return frozenset(name for name in self.weights if self._turned(name))

    def dtype(self, name: str) -> torch.dtype:
        """What a parameter in high precision is written in."""
        if not self.weights[name].is_floating_point():
            return self.weights[name].dtype
        strict = getattr(self.model, "_keep_in_fp32_modules_strict", None) or ()
        return torch.float32 if any(re.search(part, name) for part in strict) else torch.bfloat16

    def _turned(self, name: str) -> bool:
        """Whether experts in one tensor are published as [E, K, N] where this transformers has them as [E, N, K].

        It saves them as it has them, and reads both by their shape. vLLM and SGLang read the published one alone; so
        that is written, unless a square one would keep transformers from telling which it is.
        """
        if self.weights[name].dim() != 3 or not _is_experts(self.modules.get(name.rpartition(".")[0])):
            return False
        if any(self.disk[other] == self.disk[name] for other in self.weights if other != name):
            return False  # it is split together with another (Ernie's experts for text and for images)
        if tuple(self.revert({name: self.weights[name]}).values())[0].shape != self.weights[name].shape:
            return False  # it is split, or turned already
        mapping = get_model_conversion_mapping(self.model, add_legacy=False)
        leaf = ".".join(name.split(".")[-2:])
        turns = any(
            any(type(op).__name__ == "Transpose" and op.check_dims for op in getattr(entry, "operations", ()))
            and any(pattern.endswith(leaf) for pattern in entry.target_patterns)
            for entry in mapping
        )
        return turns and self.weights[name].shape[1] != self.weights[name].shape[2]


def _is_experts(module: nn.Module | None) -> bool:
    return module is not None and all(
        (w := module._parameters.get(name)) is not None and w.dim() == 3 for name in ("gate_up_proj", "down_proj")
    )
