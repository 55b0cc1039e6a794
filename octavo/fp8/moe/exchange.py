"""Expert parallelism: rows are dispatched to the rank of their expert, and the results are combined on the source rank.

Rank r of n has the experts from r E / n on. A forward of a layer, with P pairs of a token and one of its experts::

    sort the pairs by expert (stable); exchange the number of rows per expert
    send the rows, receive rows of the local experts: by source rank, expert, token, choice  [P, H] -> [R, H]
    group them by expert (kernels/groups.py) and run the experts
    send the rows back, and restore the order of the pairs                                    [R, H] -> [P, H]

The rows of an expert have the order (source rank, token, choice), as in one process that has the tokens of all ranks in
turn. So casts, GEMMs and their padding are the same, bit for bit.

All ranks take part, including those without tokens or without rows for their experts; the backward sends the same rows
in the reverse direction. The number of received rows is read from the device once per forward, to allocate memory.
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
"""Key in the __dict__ of a module whose experts are distributed over ranks; the value is an :class:`Exchange`."""


class Dispatch(NamedTuple):
    """The routing of one forward. ``order`` [S]: the pair in each row that is sent; ``place`` [P]: the row of each
    pair, or S and more for a pair without an expert; ``sent`` and ``received``: rows to and from each rank; ``experts``
    [R]: the local index of each received row's expert; ``exchange``: performs the transfers."""

    order: Tensor
    place: Tensor
    sent: list[int]
    received: list[int]
    experts: Tensor
    exchange: Exchange

    def dispatch(self, hidden: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
        """Send hidden [M, H] of the local tokens; return the rows [R, H] of the local experts in ``dtype``."""
        rows = ToRows.apply(hidden, self.order, self.place, top_k, dtype)
        return _AllToAll.apply(rows, self.sent, self.received, self.exchange.group, self.exchange.rows, None)

    def combine(self, rows: Tensor) -> Tensor:
        """Send the results [R, H] of the local experts back; return [P, H] of the local pairs. The row of a pair
        without an expert is undefined."""
        results = _AllToAll.apply(rows, self.received, self.sent, self.exchange.group, None, self.exchange.gradients)
        return ToPairs.apply(results, self.order, self.place)


@dataclass(frozen=True)
class Exchange:
    """Transfers between the ranks of ``group`` (a process group), over which the experts of a layer are distributed.
    ``rows`` and ``gradients``: encoding of rows to experts, and of gradients of their results, or None to send them
    unchanged."""

    group: Any
    ranks: int
    rows: WireFormat | None = None
    gradients: WireFormat | None = None

    def with_codes(self, module: Any) -> Exchange:
        """Return an exchange that sends FP8 codes of tensors that the FP8 experts of ``module`` cast anyway."""
        up, down = (module._sites[name] for name in ("gate_up_proj", "down_proj"))
        width = module._parameters["gate_up_proj"].shape[1 if getattr(module, "is_transposed", False) else 2]
        return replace(
            self, rows=WireFormat.for_inputs(up.recipe, width), gradients=WireFormat.for_gradients(down.recipe, width)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        return self  # process groups cannot be copied

    def plan_dispatch(self, chosen: Tensor, experts: int) -> Dispatch:
        """Plan the dispatch of pairs with the experts ``chosen`` [P], out of ``experts``; other indices have no expert.

        Collective call; waits for the device."""
        valid = (chosen >= 0) & (chosen < experts)
        bucket = torch.where(valid, chosen, experts).long()
        order = torch.argsort(bucket, stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        send_counts = torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device)
        send_counts = send_counts.scatter_add_(0, bucket, torch.ones_like(bucket))[:experts].view(self.ranks, -1)
        receive_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(receive_counts, send_counts, group=self.group)
        sent, received = torch.stack([send_counts.sum(1), receive_counts.sum(1)]).tolist()
        local = torch.arange(send_counts.shape[1], device=chosen.device).repeat(self.ranks)
        expert_of_row = local.repeat_interleave(receive_counts.view(-1), output_size=sum(received))
        return Dispatch(order[: sum(sent)], place, sent, received, expert_of_row, self)


class _AllToAll(torch.autograd.Function):
    """All-to-all of rows [S, H]: ``sent`` and ``received`` rows per rank, with separate codings for rows and
    gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any, coding: WireFormat | None,
        backward: WireFormat | None,
    ) -> Tensor:  # fmt: skip
        ctx.reverse = received, sent, group, backward
        return _all_to_all(rows, sent, received, group, coding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(dy, *ctx.reverse), None, None, None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Any, coding: WireFormat | None) -> Tensor:
    message = rows.contiguous() if coding is None else coding.pack(rows)
    received_rows = message.new_empty(sum(received), message.shape[1])
    dist.all_to_all_single(received_rows, message, received, sent, group=group)
    return received_rows if coding is None else coding.unpack(received_rows, rows.shape[1], rows.dtype)


def local_parameter(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter of a module of experts, or None; with expert parallelism, the local experts."""
    value = module._parameters.get(name)
    return local_experts(value) if value is not None and EXCHANGE in module.__dict__ else value
