"""Rows of several experts in one matrix: how they lie, worked out on the device without waiting for it.

Every (token, choice) pair of a mixture-of-experts layer is one row. Rows are sorted by expert into a matrix [R, K] in
which each expert's rows begin at a multiple of :data:`TILE` and the rows between two experts are zero; so a tile of
rows, and a block of a cast along the rows, belongs to one expert. R depends on the number of pairs and experts alone
(the most that padding can cost), so that no size has to be read back from the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.fp8.kernels.layout import round_up

__all__ = ["TILE", "Groups", "Routing", "route"]

TILE = 128


class Groups(NamedTuple):
    """How the rows of E experts lie in a matrix of ``rows`` rows; all tensors int32 on the device.

    ``sizes`` [E] real rows of each expert; ``starts`` [E + 1] first row of each, multiples of :data:`TILE`, the last
    one past the end of the last expert; ``tiles`` [rows / TILE] expert of each tile, -1 for tiles of no expert.
    """

    sizes: Tensor
    starts: Tensor
    tiles: Tensor
    rows: int

    @property
    def experts(self) -> int:
        return self.sizes.shape[0]


class Routing(NamedTuple):
    """``groups``, with ``pair_of`` [R] (the pair in each row; the number of pairs where a row is padding) and
    ``row_of`` [pairs] (the row of each pair; R for a pair that belongs to no expert)."""

    groups: Groups
    pair_of: Tensor
    row_of: Tensor


def route(chosen: Tensor, experts: int) -> Routing:
    """Lay out the pairs whose experts are ``chosen`` [pairs] (integers; others than 0..experts-1 belong to nobody).

    Pairs of one expert keep their order. Runs on the device of ``chosen`` without synchronisation.
    """
    pairs, device = chosen.numel(), chosen.device
    rows = round_up(pairs + experts * (TILE - 1), TILE) if pairs else TILE
    valid = (chosen >= 0) & (chosen < experts)
    bucket = torch.where(valid, chosen, experts).long()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=device).scatter_add_(0, bucket, torch.ones_like(bucket))
    sizes = counts[:experts]
    ends = ((sizes + TILE - 1) // TILE * TILE).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    order = torch.argsort(bucket, stable=True)
    sorted_bucket = bucket[order]
    first = counts.cumsum(0) - counts  # of each bucket among the sorted pairs
    rank = torch.arange(pairs, device=device) - first[sorted_bucket]
    row = torch.where(sorted_bucket < experts, starts[sorted_bucket.clamp(max=experts)] + rank, rows)
    row_of = torch.empty_like(row).scatter_(0, order, row)
    pair_of = torch.full((rows + 1,), pairs, dtype=torch.int64, device=device).scatter_(0, row, order)[:rows]
    tile_rows = torch.arange(0, rows, TILE, device=device)
    owner = torch.searchsorted(ends, tile_rows, right=True)
    tiles = torch.where(tile_rows < ends[-1], owner, -1) if experts else torch.full_like(tile_rows, -1)
    groups = Groups(sizes.int(), starts.int(), tiles.int(), rows)
    return Routing(groups, pair_of, row_of)
