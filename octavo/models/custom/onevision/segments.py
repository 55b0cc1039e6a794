"""The boundaries of images and frames in the rows of the tower, and the positions of class tokens.

The patches of all images are concatenated. A frame (an image is one) of h x w patches is a segment: its patches attend
only to each other. Each segment begins with a class token, so segment i, which begins at patch p_i, begins at row
p_i + i of the tower:

    patches     a a a a b b            two frames, of 4 and of 2 patches
    rows      C a a a a C b b

Class tokens are inserted and removed segment by segment. The code that was published with the weights removes them at
p_i, ignoring the i class tokens before. This is correct only for a single image: with several, the projector receives
class tokens among the patches, and the last patches are lost. The code that trained those weights counts as above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """The rows of a tower. `patches`: patches of each segment, without class tokens; `edges`: the ends of segments with
    class tokens, int32 [segments + 1] on the device; `longest`: the maximum number of rows in a segment."""

    patches: tuple[int, ...]
    edges: Tensor
    longest: int

    @classmethod
    def from_grid(cls, grid: Sequence[Sequence[int]], device: torch.device) -> Segments:
        """Return the segments of images or videos with grids of (t frames, h, w patches): t segments each."""
        patches = tuple(h * w for t, h, w in grid for _ in range(t))
        edges = torch.tensor([0, *accumulate(count + 1 for count in patches)], dtype=torch.int32)
        return cls(patches, edges.to(device), max(patches) + 1)

    @property
    def rows(self) -> list[int]:
        """Rows of each segment."""
        return [count + 1 for count in self.patches]

    def with_class(self, x: Tensor, token: Tensor) -> Tensor:
        """Return [patches, C] with `token` [1, C] in front of each segment: [patches + segments, C]."""
        return torch.cat([part for segment in x.split(self.patches) for part in (token, segment)])

    def without_class(self, x: Tensor) -> Tensor:
        """Return [patches + segments, C] without the first row of each segment: [patches, C]."""
        return torch.cat([segment[1:] for segment in x.split(self.rows)])


def patch_positions(grid: Sequence[Sequence[int]], merge: int, device: torch.device) -> Tensor:
    """Return (row, column) of each patch in its image, int64 [patches, 2]. Patches are ordered in blocks of merge x
    merge, as the projector joins them; the frames of a video have the same positions."""
    frames = []
    for t, h, w in grid:
        at = torch.cartesian_prod(torch.arange(h, device=device), torch.arange(w, device=device))
        blocks = at.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
        frames.append(blocks.repeat(t, 1))
    return torch.cat(frames)
