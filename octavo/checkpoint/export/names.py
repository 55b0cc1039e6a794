"""The FP8 weights of an export: names, pieces and orientation, which their scales share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.stock_model import EXPERTS, StockModel
from octavo.fp8.policy import Row
from octavo.models.folder.quantization import FUSED

BLOCK = 128


def fused_group(name: str) -> str | None:
    """Return the name of a layer's fused GEMM, "a.q_proj|k_proj|v_proj" for "a.q_proj"; or None if it is not fused."""
    parent, _, leaf = name.rpartition(".")
    return next((f"{parent}.{'|'.join(leaves)}" for leaves in FUSED if leaf in leaves), None)


@dataclass(frozen=True)
class Matrix:
    """One FP8 weight on disk, and the position of its values in the model.

    name    name on disk, ending in ".weight"
    parameter  the parameter that it is, or is a part of
    module  the module of the parameter, by its name in memory
    shape   (N, K)
    slot    index of the expert; None for a linear layer
    rows    its rows of the parameter (of the expert), as (first, last + 1)
    group   matrices of the same group are all in FP8 or none, because engines run them as one GEMM
    shares  in the tensor format, matrices with the same value share one scale
    """

    name: str
    parameter: str
    module: str
    shape: tuple[int, int]
    slot: int | None
    rows: tuple[int, int]
    group: str
    shares: str


class Matrices(StockModel):
    """A stock model, and the FP8 weights on disk for its rows of a plan."""

    def aliases(self, module: str) -> tuple[str, ...]:
        """Return the names under which loaders look for a module in a skip list: transformers uses the name in memory,
        vLLM the name on disk through its own mapping, others omit the `model.` before parts other than the language
        model."""
        names = {module, self.disk_name(module)}
        parts = {name.removeprefix("model.") for name in names}
        names |= {name for name in parts if not name.startswith(("layers.", "language_model."))}
        return tuple(sorted(names))

    def groups(self, row: str) -> tuple[str, ...]:
        """Return the possible `Matrix.group` of a row's weights."""
        module = self.modules.get(row)
        if module is None:  # experts: a parameter, whose gate and up are in it
            return (row.rpartition(".")[0],)
        return (fused_group(self.disk_name(row)) or self.disk_name(row),)

    def matrices(self, row: Row) -> tuple[str | None, tuple[Matrix, ...]]:
        """Return (why a row cannot be written in FP8 or None, its weights on disk)."""
        if row.kind == "experts":
            return None, tuple(self._experts(row))
        name, n, k = f"{row.name}.weight", *row.shape
        disk = self.disk[name]
        shared = [other for other, other_disk in self.disk.items() if other != name and set(other_disk) & set(disk)]
        if len(disk) != 1 or shared or not disk[0].endswith(".weight"):
            return "it is part of another tensor on disk", ()
        group = fused_group(disk[0].removesuffix(".weight")) or disk[0].removesuffix(".weight")
        return None, (Matrix(disk[0], name, row.name, (n, k), None, (0, n), group, group),)

    def _experts(self, row: Row) -> Iterator[Matrix]:
        """Yield the matrices of stacked experts, with transformers' names if it splits experts, else with Qwen's."""
        (n, k), count = row.shape, row.experts or 0
        leaves = EXPERTS.get(row.name.rpartition(".")[2], EXPERTS["down_proj"])
        halves, disk = len(leaves), self.disk[row.name]
        if len(disk) != halves * count:
            module = self.disk_name(row.module)
            disk = tuple(f"{module}.{e}.{leaf}.weight" for leaf in leaves for e in range(count))
        else:
            disk = self._order_names(row, disk, halves)
        size = n // halves
        for i, name in enumerate(disk):
            half, e = divmod(i, count)
            rows = (half * size, (half + 1) * size)
            yield Matrix(name, row.name, row.module, (size, k), e, rows, row.module, f"{row.name}.{e}")

    def _order_names(self, row: Row, disk: tuple[str, ...], halves: int) -> tuple[str, ...]:
        """Return the names of (half, expert) in that order, found by converting a tensor of numbers."""
        count = row.experts or 0
        numbers = torch.arange(halves * count).view(halves, count).T  # [E, halves]
        probe = numbers.repeat_interleave(row.shape[0] // halves, dim=1).unsqueeze(-1)  # [E, N, 1]
        probe = probe.mT.contiguous() if self.is_transposed(row.name) else probe
        on_disk = self.revert({row.name: probe})
        order = {int(t.reshape(-1)[0]): name for name, t in on_disk.items()}
        if sorted(order) != list(range(halves * count)):
            raise CheckpointError(f"the experts of {row.name} are not stored one by one on disk; export in bf16")
        return tuple(order[i] for i in range(halves * count))

    def plain(
        self, parameters: set[str]
    ) -> tuple[dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]], dict[str, tuple[str, ...]]]:
        """Return, for parameters in high precision, (parameter -> name on disk -> dtype and shape, parameter -> the
        parameters that are converted together with it)."""
        users: dict[str, list[str]] = {}
        for name in self.weights:
            if name in parameters:
                for disk in self.disk[name]:
                    users.setdefault(disk, []).append(name)
        together = {n: tuple(users[self.disk[n][0]]) for n in self.weights if n in parameters}
        out: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
        for name, group in together.items():
            on_disk = self.to_disk({n: self.weights[n] for n in group})
            out[name] = {disk: (self.dtype(name), tuple(t.shape)) for disk, t in on_disk.items()}
        return out, together

    def to_disk(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters as they are written in high precision: `revert`, with published experts transposed."""
        on_disk = self.revert({name: t for name, t in state.items() if name not in self.written_transposed})
        for name in state:
            if (
                name in self.written_transposed
            ):  # transposed here: transformers decides by shape, and would transpose it back
                ((disk, t),) = self.revert({name: state[name]}).items()
                on_disk[disk] = t.mT
        return on_disk

    @cached_property
    def written_transposed(self) -> frozenset[str]:
        """The parameters of experts that are written transposed."""
        return frozenset(name for name in self.weights if self._is_written_transposed(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a parameter in high precision is written."""
        if not self.weights[name].is_floating_point():
            return self.weights[name].dtype
        strict = getattr(self.model, "_keep_in_fp32_modules_strict", None) or ()
        return torch.float32 if any(re.search(part, name) for part in strict) else torch.bfloat16

    def _is_written_transposed(self, name: str) -> bool:
        """Return whether experts in one tensor are published as [E, K, N] while this transformers stores them as [E, N,
        K].

        transformers saves them as it stores them, and reads both forms by their shape. vLLM and SGLang read only the
        published form, so that is written, unless the matrix is square and transformers could not tell the forms apart.
        """
        if self.weights[name].dim() != 3 or not _is_experts(self.modules.get(name.rpartition(".")[0])):
            return False
        if any(self.disk[other] == self.disk[name] for other in self.weights if other != name):
            return False  # it is converted together with another (Ernie's experts for text and for images)
        if tuple(self.revert({name: self.weights[name]}).values())[0].shape != self.weights[name].shape:
            return False  # it is split, or already transposed
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
