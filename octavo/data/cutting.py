"""A sample cut to a length: never inside an image; one that does not fit goes, with its pixels and the mark before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from octavo.data import inputs
from octavo.data.expansion import Mismatch, stretches
from octavo.data.sample import Sample


def lone(images: int) -> str:
    """Why a row of several images is not cut to one, by a family that counts the images of a row."""
    return (
        f"one of its {images} images would be left, and this family makes tiles of the only image of a row and of no "
        "other"
    )


class Run(NamedTuple):
    """Where an image's tokens stand, and how many rows of `pixel_values` are its own."""

    start: int
    stop: int
    pixels: int


def runs(sample: Sample, image_mask: np.ndarray, place: int | None, opening: int | None) -> list[Run]:
    """The images of a sample. `image_mask` [T]: tokens of images; `place`: the token that stands for a feature,
    `opening`: one that opens each image and grew with it."""
    if sample.pixel_values is None:
        return []
    ids, pixels, grid = sample.input_ids, len(sample.pixel_values), sample.image_grid_thw
    # Images that touch are one stretch of image tokens. Where they open with a mark of their own it parts them ...
    found = list(sample.places) or stretches(image_mask, np.flatnonzero(image_mask & (ids == opening)))
    if grid is not None:
        rows = grid.prod(axis=1)
        if len(found) != len(rows):  # ... where they do not, tokens are shared out by patches.
            edges = np.cumsum([0, *(rows * int(image_mask.sum()) // rows.sum())])
            where = np.flatnonzero(image_mask)
            found = [(int(where[a]), int(where[b - 1]) + 1) for a, b in zip(edges, edges[1:], strict=False)]
    elif pixels == len(found):
        rows = np.ones(pixels, dtype=np.int64)
    else:  # every tile of an image takes as many tokens
        tokens = np.array([np.sum(ids[start:stop] == place) for start, stop in found])
        rows = tokens * pixels // tokens.sum()
    return [Run(start, stop, int(count)) for (start, stop), count in zip(found, rows, strict=True)]


def cut(sample: Sample, end: int, images: Sequence[Run], opening: int | None) -> Sample:
    """The first `end` tokens of a sample, or fewer. `opening`: the mark in front of an image, which goes with it.

    Raises Mismatch where one of several images would be left to a family that cuts the only image of a row into tiles.
    """
    kept, pixels = 0, 0
    for run in images:
        if run.stop > end:
            end = min(end, run.start)
            if end and sample.input_ids[end - 1] == opening:  # models look for an image behind each
                end -= 1
            break
        kept, pixels = kept + 1, pixels + run.pixels
    more = inputs.cut(sample.more, end, kept, pixels)
    if kept == 1 < sample.images and any(one.per == "row" for one in more.values()):
        raise Mismatch(lone(sample.images))
    kinds, values, grid = sample.mm_token_type_ids, sample.pixel_values, sample.image_grid_thw
    return replace(
        sample,
        input_ids=sample.input_ids[:end],
        labels=sample.labels[:end],
        mm_token_type_ids=None if kinds is None else kinds[:end],
        pixel_values=values[:pixels].copy() if values is not None and kept else None,
        image_grid_thw=grid[:kept] if grid is not None and kept else None,
        images=kept,
        answers=tuple(span for span in sample.answers if span[1] <= end),  # whole ones
        more=more,
        places=sample.places[:kept],
    )
