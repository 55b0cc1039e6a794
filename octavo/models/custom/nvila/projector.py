"""Projects patches to tokens: each block of k x k neighboring patches becomes one vector, then an MLP.

    2 x 2    downsample, LayerNorm(4C), Linear(4C, H), GELU, Linear(H, H)
    3 x 3    downsample, LayerNorm(9C), Linear(9C, 3C), GELU, LayerNorm(3C), Linear(3C, H), GELU, Linear(H, H)

The channels of a token are the concatenated channels of its patches, in row order within the block.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Downsample(nn.Module):
    """[n, h, w, C] -> [n, ceil(h / k), ceil(w / k), k k C]; padded with zeros on the right and at the bottom."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, patches: Tensor) -> Tensor:
        k = self.side
        patches = F.pad(patches, (0, 0, 0, -patches.shape[2] % k, 0, -patches.shape[1] % k))
        n, h, w, c = patches.shape
        blocks = patches.reshape(n, h // k, k, w // k, k, c).transpose(2, 3)
        return blocks.reshape(n, h // k, w // k, k * k * c)

    def extra_repr(self) -> str:
        return f"{self.side}x{self.side}"


class Projector(nn.Module):
    """[n, h, w, C] -> [n, tokens, H], row by row. The indices in `layers` are part of the names in checkpoints."""

    def __init__(self, side: int, channels: int, hidden: int) -> None:
        super().__init__()
        wide = side * side * channels
        layers: list[nn.Module] = [Downsample(side), nn.LayerNorm(wide)]
        if side == 3:
            layers += [nn.Linear(wide, 3 * channels), nn.GELU(), nn.LayerNorm(3 * channels)]
            wide = 3 * channels
        self.layers = nn.Sequential(*layers, nn.Linear(wide, hidden), nn.GELU(), nn.Linear(hidden, hidden))

    def forward(self, patches: Tensor) -> Tensor:
        tokens: Tensor = self.layers(patches)
        return tokens.flatten(1, 2)
