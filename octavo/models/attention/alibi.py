"""ALiBi: attention that falls off with distance, a slope a head, in place of positions (Press et al., 2022).

    score(i, j) = q_i k_j * scale - slope_h * (i - j)        for j <= i

Only distances count, so a sample of a packed row needs nothing but its own length. Distances are taken from the query,
not from the end of the row: the nearest keys have the small numbers, which 16 bits hold exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def slopes(heads: int, largest: float = 8, device: torch.device | str | None = None) -> Tensor:
    """fp32 [heads]: 2^(-largest * n / N) for n = 1 ... N, the next power of two; of more than there are heads every
    second one, those at even places first, as MPT takes them."""
    power = 2 ** math.ceil(math.log2(heads))
    made = torch.pow(2.0, -torch.arange(1, power + 1, dtype=torch.float32, device=device) * (largest / power))
    return made if power == heads else torch.cat([made[1::2], made[::2]])[:heads]


def causal(
    slope: Tensor, first: int, queries: int, keys: int, dtype: torch.dtype, mask: Tensor | None = None
) -> Tensor:
    """What is added to scores, [1 or B, H, queries, keys]: the bias of queries that stand from `first` on among the
    keys, and the lowest number of the dtype where a key is not seen.

    ``mask``: boolean (True: seen) or additive, [B, 1, queries, keys]; None: causal.
    """
    query = torch.arange(first, first + queries, device=slope.device)[:, None]
    away = query - torch.arange(keys, device=slope.device)[None]
    bias = (-slope[:, None, None] * away)[None].to(dtype)
    lowest = torch.finfo(dtype).min
    if mask is None or mask.dtype == torch.bool:
        return bias.masked_fill(~(away >= 0 if mask is None else mask), lowest)
    return (bias + mask).clamp(min=lowest).to(dtype)
