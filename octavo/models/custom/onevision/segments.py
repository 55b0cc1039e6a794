"""Where images and frames begin and end in the rows of a tower, and where their class tokens stand.

The patches of all images lie behind each other. A frame (an image is one) of h x w patches is a segment: its patches
see each other and no others. In front of each stands a class token, so that segment i, which begins at patch p_i,
begins at row p_i + i of the tower:

    patches     a a a a b b            two frames, of 4 and of 2 patches
    rows      C a a a a C b b

Tokens are put in and taken out segment by segment. The code that was published with the weights takes them out by p_i
alone, without the i class tokens before it: of one image that is right; from the second on, the projector gets class
tokens among the patches, and the last patches are lost. The code that trained those weights has the count above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """The rows of a tower: `patches` of each segment, class tokens not counted; `edges`, int32 [segments + 1] on the
    device, where segments end, with them; `longest`: the most rows of one."""

    patches: tuple[int, ...]
    edges: Tensor
    longest: int

    @classmethod
    def of(cls, grid: Sequence[Sequence[int]], device: torch.device) -> Segments:
        """Those of images or videos of (t frames, h, w patches): t segments each."""
        patches = tuple(h * w for t, h, w in grid for _ in range(t))
        edges = torch.tensor([0, *accumulate(count + 1 for count in patches)], dtype=torch.int32)
        return cls(patches, edges.to(device), max(patches) + 1)

    @property
    def rows(self) -> list[int]:
        """Rows of each segment."""
        return [count + 1 for count in self.patches]

    def with_class(self, x: Tensor, token: Tensor) -> Tensor:
        """[patches, C] with `token` [1, C] in front of each segment: [patches + segments, C]."""
        return torch.cat([part for segment in x.split(self.patches) for part in (token, segment)])

    def without_class(self, x: Tensor) -> Tensor:
        """[patches + segments, C] without the first row of each segment: [patches, C]."""
        return torch.cat([segment[1:] for segment in x.split(self.rows)])


def places(grid: Sequence[Sequence[int]], merge: int, device: torch.device) -> Tensor:
    """(row, column) of each patch in its image, int64 [patches, 2]. Patches come block by block of merge x merge, as
    the projector joins them; frames of a video repeat."""
    found = []
    for t, h, w in grid:
        at = torch.cartesian_prod(torch.arange(h, device=device), torch.arange(w, device=device))
        blocks = at.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
        found.append(blocks.repeat(t, 1))
    return torch.cat(found)
