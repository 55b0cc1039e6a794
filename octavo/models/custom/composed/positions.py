"""Positions on three axes (time, row, column), for decoders whose rotary embedding has them (mrope, of Qwen3.5)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedConfig

Size = tuple[int, int, int]
"""Frames, rows and columns of the tokens of an image."""


def has_three_axes(text: PreTrainedConfig) -> bool:
    """Return whether a decoder's rotary embedding has three axes."""
    return bool((getattr(text, "rope_parameters", None) or {}).get("mrope_section"))


def positions_of_rows(is_image: Tensor, sizes: Iterator[Size], mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return positions [3, B, T] and, for each row, by how much later ones differ from a count of tokens [B, 1].

    A token of text has the same position on all axes, the one after the largest before it. The tokens of an image have
    their frame, row and column, counted from there, and text continues after the larger of rows and columns: as
    `get_rope_index` of transformers' Qwen3.5 does it. The positions of padding are 0.

    is_image [B, T] bool · sizes: of all images, in order · mask [B, T]: 0 for padding. Raises ValueError if the numbers
    of tokens and sizes differ.
    """
    positions = torch.zeros(3, *is_image.shape, dtype=torch.long, device=is_image.device)
    offsets = torch.zeros(len(is_image), 1, dtype=torch.long, device=is_image.device)
    for number, row in enumerate(is_image):
        is_token = torch.ones_like(row) if mask is None else mask[number].bool()
        counted, after = _positions(row[is_token].tolist(), sizes)
        positions[:, number, is_token] = counted.to(positions.device)
        offsets[number] = after - counted.shape[1]
    return positions, offsets


def _positions(is_image: list[bool], sizes: Iterator[Size]) -> tuple[Tensor, int]:
    """Return the positions [3, T] of a row without padding, and the position of the token after it."""
    parts, first, start = [torch.zeros(3, 0, dtype=torch.long)], 0, 0
    while first < len(is_image):
        if is_image[first]:
            if (size := next(sizes, None)) is None:
                raise ValueError("there are more image tokens than images")
            length = size[0] * size[1] * size[2]
            if is_image[first : first + length] != [True] * length:
                raise ValueError(f"an image of {size[1]} x {size[2]} tokens has fewer image tokens")
            axes = torch.meshgrid([torch.arange(count) for count in size], indexing="ij")
            parts.append(torch.stack(axes).flatten(1) + start)
            start += max(size[1:])
        else:
            later = is_image[first:]
            length = later.index(True) if True in later else len(later)
            parts.append(torch.arange(start, start + length).expand(3, -1))
            start += length
        first += length
    return torch.cat(parts, 1), start
