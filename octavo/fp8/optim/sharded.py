"""Groups of 128 that a shard's border cuts: their ranks agree on what the group shares before any of them encodes.

FSDP2 gives each rank rows of a parameter, and a border between two rows need not be one between two groups of the
flattened parameter: rows of 1176 or 40 elements, a norm's 64 weights over four ranks. A group may lie on two ranks, on
three or more, and some ranks hold nothing at all. Each rank steps its own elements; only the group's extrema are the
business of all, because they scale its codes. So they are exchanged: one all-reduce of the extrema of v (and of m, for
coat), one of the largest |r|, which needs v's new codes (only fp8), each for all cut groups of a call together, in
int32. Codes, figures and weights then equal those of one process, bit for bit.

Which groups are cut follows from shapes and the number of ranks, so that all ranks know without communicating, and
nothing is exchanged where nothing is cut. A rank that holds nothing of a cut group takes part all the same: collectives
are matched by order. The exchange waits for no device.
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

# Rows of each exchange: the extrema as (-lo, hi) of v, for coat before it those of m; then the largest |r|.
_ROUNDS = {"fp8": (2, 1), "coat": (4,), "bf16": (), "fp32": ()}
_NEUTRAL = -(1 << 31)  # below every mark


def is_cut(parameter: Tensor, states: str) -> bool:
    """Whether a step of `parameter` in this format needs :func:`step`; the same on every rank."""
    return bool(_ROUNDS[states] and cut_groups(parameter))


def cut_groups(parameter: Tensor) -> tuple[int, ...]:
    """The groups of the flattened whole parameter of which no rank holds all; the same on every rank."""
    if not is_dtensor(parameter) or not parameter.numel():
        return ()
    return _groups_cut_at(shard_borders(parameter), parameter.shape[1:].numel())


def _groups_cut_at(rows: Sequence[int], row: int) -> tuple[int, ...]:
    """Groups inside which one of these rows, of so many elements, begins."""
    return tuple(sorted({first * row // GROUP for first in rows if first * row % GROUP}))


def _process_groups(parameter: Any) -> tuple[Any, ...]:
    """The process groups that share the rows of a DTensor: a maximum over each in turn is one over all ranks."""
    return tuple(parameter.device_mesh.get_group(dim) for dim in sharded_over(parameter))


def step(work: Sequence[tuple[Tensor, Piece]], hyper: Hyper, factor: float | Tensor | None, run: Engine) -> None:
    """Let ``run`` step parameters that have cut groups, each with its piece on this rank; nothing where there are none.

    A collective: every rank gives the same parameters in the same order, also those of which it holds nothing, with a
    piece of no elements.
    """
    if not work:
        return
    held = [piece for _, piece in work if piece.weight.numel()]
    edges = [(edge.piece.index, edge.group) for edge in edges_of(held)]
    agree = Agreement([(p, piece.index) for p, piece in work], edges, work[0][1].weight.device)
    if held:
        run(held, hyper, factor, agree)
    agree.finish(hyper.states)


class Agreement:
    """Gives marks of edges the elementwise maximum over the ranks that share them: what `moments.encode` asks for.

    parameters: each with a number of its own; the same on every rank, in the same order.
    edges: for each column of the marks the number of its parameter and its group in it; those that are no cut group (a
        parameter's own ragged end) keep their marks.
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
        """int32 [K, edges] -> the same of the whole groups."""
        self._calls += 1
        agreed = marks.clone()
        for ranks, size in self._sizes.items():
            columns, places = self._columns[ranks], self._places[ranks]
            shared = marks.new_full((len(marks), size), _NEUTRAL)
            if len(columns):  # torch selects nothing from nothing only by raising
                shared.index_copy_(1, places, marks.index_select(1, columns))
            for group in ranks:
                torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=group)
            if len(columns):
                agreed.index_copy_(1, columns, shared.index_select(1, places))
        return agreed

    def finish(self, states: str) -> None:
        """Take part in the exchanges of a format that this rank, without an edge of its own, did not ask for."""
        for count in _ROUNDS[states][self._calls :]:
            self(torch.empty((count, 0), dtype=torch.int32, device=self._device))
