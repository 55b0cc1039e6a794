"""Tiles, images of one size that a tower takes one by one: what becomes of one, told from the configuration alone."""

from __future__ import annotations

from typing import Any, NamedTuple


class Tile(NamedTuple):
    """`patches` of a tile that go through the tower (a class token counts), tokens out of the `projector`, and the
    `places` that it takes in the text, with what ends it there."""

    patches: int
    projector: int
    places: int


def tile(config: Any, size: tuple[int, int] | None = None) -> Tile:
    """A tile of `size` (height, width) in pixels, or of the one that the model was made for."""
    (height, width), (tall, wide) = size or pair(config.vision_config.image_size), pair(config.vision_config.patch_size)
    rows, columns = height // tall, width // wide
    if hasattr(config, "downsample_ratio"):  # InternVL, whose tower has a class token
        tokens = int(rows * columns * config.downsample_ratio**2)
        return Tile(rows * columns + 1, tokens, tokens)
    tokens = config.tile_tokens(rows, columns)
    return Tile(rows * columns, tokens, tokens + config.newlines)


def smallest(config: Any) -> tuple[int, int]:
    """(height, width) in pixels of the smallest tile: one that becomes one token."""
    side = round(1 / config.downsample_ratio) if hasattr(config, "downsample_ratio") else config.merge
    tall, wide = pair(config.vision_config.patch_size)
    return side * tall, side * wide


def pair(of: Any) -> tuple[int, int]:
    """(height, width), which some configurations give as one number."""
    return (int(of[0]), int(of[1])) if isinstance(of, list | tuple) else (int(of), int(of))
