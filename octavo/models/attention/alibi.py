"""ALiBi: a linear penalty on distance, with one slope for each head, instead of positions (Press et al., 2022).

    score(i, j) = q_i k_j * scale - slope_h * (i - j)        for j <= i

Only distances matter, so a sample of a packed row needs only its own length. Distances are measured from the query, not
from the end of the row: nearby keys have small distances, which 16-bit formats represent exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def slopes(heads: int, largest: float = 8, device: torch.device | str | None = None) -> Tensor:
    """Return slopes, fp32 [heads]: 2^(-largest * n / N) for n = 1 ... N, where N is `heads` rounded up to a power of
    two. If N is larger than `heads`, slopes with even n come first, then slopes with odd n, cut to `heads`, as in
    MPT."""
    power = 2 ** math.ceil(math.log2(heads))
    values = torch.pow(2.0, -torch.arange(1, power + 1, dtype=torch.float32, device=device) * (largest / power))
    return values if power == heads else torch.cat([values[1::2], values[::2]])[:heads]


def causal(
    slope: Tensor, first: int, queries: int, keys: int, dtype: torch.dtype, mask: Tensor | None = None
) -> Tensor:
    """Return the bias to add to scores, [1 or B, H, queries, keys]; the minimum of the dtype where a key is masked.

    ``slope``: fp32 [H]. ``first``: the position of the first query among the keys.

    ``mask``: boolean (True: visible) or additive, [B, 1, queries, keys], or None for a causal mask.
    """
    query = torch.arange(first, first + queries, device=slope.device)[:, None]
    away = query - torch.arange(keys, device=slope.device)[None]
    bias = (-slope[:, None, None] * away)[None].to(dtype)
    lowest = torch.finfo(dtype).min
    if mask is None or mask.dtype == torch.bool:
        return bias.masked_fill(~(away >= 0 if mask is None else mask), lowest)
    return (bias + mask).clamp(min=lowest).to(dtype)
