"""Experts dealt to ranks: each row goes to the rank that has its expert, and what the expert makes of it comes back.

Rank r of n has the experts from r E / n on. A forward of a layer, with P pairs of a token and one of its experts::

    sort the pairs by expert (stable); tell every rank how many rows each of its experts gets
    send the rows, receive those of the own experts: by source rank, expert, token, choice    [P, H] -> [R, H]
    lay them out by expert (kernels/groups.py) and run the experts
    send the rows back, put them where the pairs were                                         [R, H] -> [P, H]

Within an expert, rows lie in the order (source rank, token, choice). That is the order which one process has that is
given the tokens of the ranks one after the other: so casts, GEMMs and their padding are its own, bit for bit.

Every rank takes part, also one without a token or without a row for its experts; the backward sends the same rows the
other way. How many rows come is read from the device once a forward, because a receiver must make room for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.fp8.dense.wire import WireFormat
from octavo.fp8.moe.rows import ToPairs, ToRows
from octavo.fp8.weights.shards import local_experts

EXCHANGE = "_exchange"
"""In the __dict__ of a module of experts that are dealt to ranks: an :class:`Exchange`."""


class Dispatch(NamedTuple):
    """The pairs of one forward, dealt out. ``order`` [S]: the pair in each row that is sent; ``place`` [P]: the row of
    each pair, S or more for one without an expert; ``sent`` and ``received``: rows to and from each rank; ``experts``
    [R]: the expert of each received row, counted from the first one here; ``by``: the exchange that moves them."""

    order: Tensor
    place: Tensor
    sent: list[int]
    received: list[int]
    experts: Tensor
    by: Exchange

    def dispatch(self, hidden: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
        """hidden [M, H] of the tokens here -> [R, H] in ``dtype``: the rows of the experts here."""
        rows = ToRows.apply(hidden, self.order, self.place, top_k, dtype)
        return _AllToAll.apply(rows, self.sent, self.received, self.by.group, self.by.rows, None)

    def combine(self, rows: Tensor) -> Tensor:
        """What the experts here made of received rows [R, H] -> [P, H] of the pairs here; of one without an expert some
        row or other."""
        back = _AllToAll.apply(rows, self.received, self.sent, self.by.group, None, self.by.gradients)
        return ToPairs.apply(back, self.order, self.place)


@dataclass(frozen=True)
class Exchange:
    """Between the ranks of ``group`` (a process group), among which the experts of a layer are dealt. ``rows`` and
    ``gradients``: how rows travel to experts, and the gradients of their results (None: as they are)."""

    group: Any
    ranks: int
    rows: WireFormat | None = None
    gradients: WireFormat | None = None

    def with_codes(self, module: Any) -> Exchange:
        """The same, with codes for what the FP8 layers of a module of experts (:class:`octavo.fp8.moe.Experts`) cast
        anyway."""
        up, down = (module._sites[name] for name in ("gate_up_proj", "down_proj"))
        width = module._parameters["gate_up_proj"].shape[1 if getattr(module, "is_transposed", False) else 2]
        return replace(
            self, rows=WireFormat.for_inputs(up.recipe, width), gradients=WireFormat.for_gradients(down.recipe, width)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        return self  # a group is no value

    def plan_dispatch(self, chosen: Tensor, experts: int) -> Dispatch:
        """Deal the pairs whose experts are ``chosen`` [P] (of ``experts`` in all; other numbers belong to no rank).

        A collective; waits for the device."""
        valid = (chosen >= 0) & (chosen < experts)
        bucket = torch.where(valid, chosen, experts).long()
        order = torch.argsort(bucket, stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        mine = torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device)
        mine = mine.scatter_add_(0, bucket, torch.ones_like(bucket))[:experts].view(self.ranks, -1)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        sent, received = torch.stack([mine.sum(1), theirs.sum(1)]).tolist()
        here = torch.arange(mine.shape[1], device=chosen.device).repeat(self.ranks)
        expert_of_row = here.repeat_interleave(theirs.view(-1), output_size=sum(received))
        return Dispatch(order[: sum(sent)], place, sent, received, expert_of_row, self)


class _AllToAll(torch.autograd.Function):
    """Rows [S, H], ``sent`` of them to each rank in turn, for those that were ``received`` from each, by one coding and
    their gradients by another."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any, coding: WireFormat | None,
        backward: WireFormat | None,
    ) -> Tensor:  # fmt: skip
        ctx.back = received, sent, group, backward
        return _all_to_all(rows, sent, received, group, coding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(dy, *ctx.back), None, None, None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Any, coding: WireFormat | None) -> Tensor:
    message = rows.contiguous() if coding is None else coding.pack(rows)
    received_rows = message.new_empty(sum(received), message.shape[1])
    dist.all_to_all_single(received_rows, message, received, sent, group=group)
    return received_rows if coding is None else coding.unpack(received_rows, rows.shape[1], rows.dtype)


def local_parameter(module: nn.Module, name: str) -> Tensor | None:
    """A parameter of a module of experts, or a None; of experts that are dealt to ranks, those here."""
    value = module._parameters.get(name)
    return local_experts(value) if value is not None and EXCHANGE in module.__dict__ else value
