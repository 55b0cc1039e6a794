"""Groups of 128 that are split over ranks: the ranks exchange the extrema of a group before they encode it.

FSDP2 shards a parameter by rows, and the border between two rows need not be a border between groups of the flattened
parameter, for instance with rows of 1176 or 40 elements, or 64 weights of a norm over four ranks. A group can be on two
or more ranks, and some ranks have no elements. Each rank steps its own elements; only the extrema of a group are
shared, because they scale its codes. They are exchanged for all cut groups of a call together, in int32: one all-reduce
of the extrema of v (and of m, for coat), and one of the largest |r|, which needs the new codes of v (only fp8). Codes,
scales and weights then equal a single process's, bit for bit.

Which groups are cut follows from shapes and the number of ranks, so all ranks know it without communication, and
nothing is exchanged if no group is cut. Ranks without elements of a cut group take part as well, because collectives
are matched by order. The exchange does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.fp8.arithmetic.adamw import Hyper, Piece
from octavo.fp8.arithmetic.adamw import find_edges as edges_of
from octavo.fp8.arithmetic.moments import GROUP
from octavo.fp8.optim.engine import Engine
from octavo.fp8.weights.shards import is_dtensor, shard_borders, sharded_over

# Rows of each exchange: the extrema as (-lo, hi) of v, for coat first of m and then of v; then the largest |r|.
_ROUNDS = {"fp8": (2, 1), "coat": (4,), "bf16": (), "fp32": ()}
_NEUTRAL = -(1 << 31)  # below every mark


def is_cut(parameter: Tensor, states: str) -> bool:
    """Return True if a step of `parameter` in this format needs :func:`step`; the same on all ranks."""
    return bool(_ROUNDS[states] and cut_groups(parameter))


def cut_groups(parameter: Tensor) -> tuple[int, ...]:
    """Return the groups of the flattened whole parameter that are split over ranks; the same on all ranks."""
    if not is_dtensor(parameter) or not parameter.numel():
        return ()
    return _groups_cut_at(shard_borders(parameter), parameter.shape[1:].numel())


def _groups_cut_at(rows: Sequence[int], row: int) -> tuple[int, ...]:
    """Return the groups in which one of these rows, with ``row`` elements each, begins."""
    return tuple(sorted({first * row // GROUP for first in rows if first * row % GROUP}))


def _process_groups(parameter: Any) -> tuple[Any, ...]:
    """Return the process groups that share the rows of a DTensor; reducing over each in turn covers all ranks."""
    return tuple(parameter.device_mesh.get_group(dim) for dim in sharded_over(parameter))


def step(work: Sequence[tuple[Tensor, Piece]], hyper: Hyper, factor: float | Tensor | None, run: Engine) -> None:
    """Run ``run`` for parameters with cut groups, each with its piece on this rank.

    Collective call: all ranks pass the same parameters in the same order, with an empty piece for those that they have
    no elements of.
    """
    if not work:
        return
    pieces = [piece for _, piece in work if piece.weight.numel()]
    edges = [(edge.piece.index, edge.group) for edge in edges_of(pieces)]
    agree = Agreement([(p, piece.index) for p, piece in work], edges, work[0][1].weight.device)
    if pieces:
        run(pieces, hyper, factor, agree)
    agree.finish(hyper.states)


class Agreement:
    """Computes the elementwise maximum of marks of edges over the ranks that share them, for `moments.encode`.

    parameters: (parameter, index) pairs, the same on all ranks and in the same order.
    edges: (index of the parameter, group) for each column of the marks; columns that are not cut groups, such as the
        ragged end of a parameter, keep their marks.
    """

    def __init__(
        self, parameters: Sequence[tuple[Tensor, int]], edges: Sequence[tuple[int, int]], device: torch.device
    ) -> None:
        self._device = device
        self._calls = 0
        slots: dict[tuple[int, int], tuple[Any, int]] = {}  # (parameter's number, group) -> (ranks, slot)
        self._sizes: dict[Any, int] = {}  # by process groups, in the order of the parameters
        for parameter, index in parameters:
            ranks = _process_groups(parameter)
            for group in cut_groups(parameter):
                slot = self._sizes.get(ranks, 0)
                slots[index, group] = (ranks, slot)
                self._sizes[ranks] = slot + 1
        columns: dict[Any, list[int]] = {ranks: [] for ranks in self._sizes}
        places: dict[Any, list[int]] = {ranks: [] for ranks in self._sizes}
        for column, edge in enumerate(edges):
            if edge in slots:
                ranks, slot = slots[edge]
                columns[ranks].append(column)
                places[ranks].append(slot)
        self._columns = {ranks: self._index(numbers) for ranks, numbers in columns.items()}
        self._places = {ranks: self._index(numbers) for ranks, numbers in places.items()}

    def _index(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._device, non_blocking=True)

    def __call__(self, marks: Tensor) -> Tensor:
        """Reduce marks, int32 [K, edges], over the ranks of each group."""
        self._calls += 1
        agreed = marks.clone()
        for ranks, size in self._sizes.items():
            columns, places = self._columns[ranks], self._places[ranks]
            shared = marks.new_full((len(marks), size), _NEUTRAL)
            if len(columns):  # torch raises for an empty selection
                shared.index_copy_(1, places, marks.index_select(1, columns))
            for group in ranks:
                torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=group)
            if len(columns):
                agreed.index_copy_(1, columns, shared.index_select(1, places))
        return agreed

    def finish(self, states: str) -> None:
        """Take part in the remaining exchanges of a format, on a rank without edges."""
        for count in _ROUNDS[states][self._calls :]:
            self(torch.empty((count, 0), dtype=torch.int32, device=self._device))
