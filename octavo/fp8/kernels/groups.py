"""The layout of the rows of several experts in one matrix, computed on the device without synchronization.

Every (token, choice) pair of a mixture-of-experts layer is one row. Rows are sorted by expert into a matrix [R, K] in
which each expert's rows begin at a multiple of :data:`TILE` and the rows between two experts are zero. A tile of rows,
and a block of a cast along the rows, therefore belongs to one expert. R is an upper bound that depends only on the
numbers of pairs and experts (at most U = min(pairs, experts) experts have rows, each at most one partial tile), so that
no size is read back from the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import Quantized

TILE = 128


class Groups(NamedTuple):
    """The layout of the rows of E experts in a matrix of ``rows`` rows; all tensors int32 on the device.

    Attributes:
        sizes: [E], the number of rows of each expert without padding.
        starts: [E + 1], the first row of each expert, a multiple of :data:`TILE`, and the end of the last one.
        tiles: [rows / TILE], the expert of each tile, or -1.
        rows: the number of rows of the matrix, padding included.
    """

    sizes: Tensor
    starts: Tensor
    tiles: Tensor
    rows: int

    @property
    def experts(self) -> int:
        return self.sizes.shape[0]


class Routing(NamedTuple):
    """The groups of rows, and the assignment of pairs to rows.

    Attributes:
        groups: the layout of the rows.
        pair_of: [R], the pair in each row, or the number of pairs for a row of padding.
        row_of: [pairs], the row of each pair, or R for a pair without an expert.
    """

    groups: Groups
    pair_of: Tensor
    row_of: Tensor


def group_rows(chosen: Tensor, experts: int) -> Routing:
    """Assign a row to each pair, given its expert ``chosen`` [pairs] (an integer; not in 0..experts-1 for no expert).

    Pairs of one expert keep their order. Runs on the device of ``chosen`` without synchronization.
    """
    pairs, device = chosen.numel(), chosen.device
    # The upper bound of the rows: a full tile per TILE pairs, and one partial tile for each expert with rows.
    used = min(pairs, experts)
    rows = TILE * (used + (pairs - used) // TILE) if pairs else TILE
    valid = (chosen >= 0) & (chosen < experts)
    bucket = torch.where(valid, chosen, experts).long()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=device).scatter_add_(0, bucket, torch.ones_like(bucket))
    sizes = counts[:experts]
    ends = ((sizes + TILE - 1) // TILE * TILE).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    order = torch.argsort(bucket, stable=True)
    sorted_bucket = bucket[order]
    # The row of a pair is the start of its expert plus the rank of the pair within the expert.
    first = counts.cumsum(0) - counts  # of each bucket in the sorted pairs
    rank = torch.arange(pairs, device=device) - first[sorted_bucket]
    row = torch.where(sorted_bucket < experts, starts[sorted_bucket.clamp(max=experts)] + rank, rows)
    row_of = torch.empty_like(row).scatter_(0, order, row)
    pair_of = torch.full((rows + 1,), pairs, dtype=torch.int64, device=device).scatter_(0, row, order)[:rows]
    tile_rows = torch.arange(0, rows, TILE, device=device)
    expert = torch.searchsorted(ends, tile_rows, right=True)
    tiles = torch.where(tile_rows < ends[-1], expert, -1) if experts else torch.full_like(tile_rows, -1)
    groups = Groups(sizes.int(), starts.int(), tiles.int(), rows)
    return Routing(groups, pair_of, row_of)


def real_rows(groups: Groups) -> Tensor:
    """Return a bool mask [R] that is False for rows of padding, without synchronization."""
    expert = groups.tiles.clamp(min=0).long()
    ends = torch.where(groups.tiles >= 0, (groups.starts[:-1] + groups.sizes)[expert], 0)
    rows = torch.arange(groups.rows, device=ends.device).view(-1, TILE)
    return (rows < ends.unsqueeze(1)).view(-1)


def expert_spans(groups: Groups) -> Iterator[tuple[int, slice]]:
    """Yield (expert, its rows without padding) for every expert with rows. Reads the sizes, which synchronizes."""
    for expert, (size, start) in enumerate(zip(groups.sizes.tolist(), groups.starts.tolist(), strict=False)):
        if size:
            yield expert, slice(start, start + size)


def select_expert(q: Quantized, expert: int, span: slice) -> Quantized:
    """Return one expert's rows of a result of ``Backend.quantize_rows``, as views. They equal a cast of only these
    rows."""
    r = q.spec.block[0]
    if r == -1:
        scale = q.scale[expert : expert + 1]
    else:
        scale = q.scale[span.start // r : -(-span.stop // r)]
    return Quantized(q.data[span], scale, q.spec)
