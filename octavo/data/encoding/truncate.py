"""A sample cut to a length: never inside an image or a video; one that does not fit goes, with its pixels and the mark
before. A part of a video would cost and teach nothing: what is learned before it does not see it, and nothing is left
behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from octavo.data.encoding.processor_calls import true_runs
from octavo.data.encoding.sample import Sample, cut_inputs
from octavo.data.errors import Mismatch


def why_not_one_image(images: int) -> str:
    """Why a row of several images is not cut to one, by a family that counts the images of a row."""
    return (
        f"one of its {images} images would be left, and this family makes tiles of the only image of a row and of no "
        "other"
    )


class Run(NamedTuple):
    """Where the tokens of an image or a video stand, and how many rows of `pixel_values`, or of
    `pixel_values_videos`, are its own; `images`: how many it is, a video of frames that are images being several."""

    start: int
    stop: int
    pixels: int
    video: bool = False
    images: int = 1


def media_runs(sample: Sample, image_mask: np.ndarray, place: int | None, opening: int | None) -> list[Run]:
    """The images of a sample. `image_mask` [T]: tokens of images; `place`: the token that stands for a feature,
    `opening`: one that opens each image and grew with it."""
    grids = sample.extra.get("video_grid_thw")
    of_video = () if grids is None else grids.values.prod(axis=1).tolist()
    films = [Run(*film, patches, True) for film, patches in zip(sample.films, of_video, strict=True)]
    return sorted([*films, *_of_images(sample, image_mask, place, opening)])


def cut_position(runs: Sequence[Run], end: int) -> str:
    """What a cut at `end` falls into, as the beginning of a sentence; "" where that is text."""
    hit = next((run for run in runs if run.start < end < run.stop), None)
    what = "a video" if hit and (hit.video or hit.images > 1) else "an image"
    return f"the cut falls into {what}, which goes whole, and " if hit else ""


def _of_images(sample: Sample, image_mask: np.ndarray, place: int | None, opening: int | None) -> list[Run]:
    if sample.pixel_values is None:
        return []
    ids, pixels, grid = sample.input_ids, len(sample.pixel_values), sample.image_grid_thw
    # Images that touch are one stretch of image tokens. Where they open with a mark of their own it parts them ...
    found = list(sample.places) or true_runs(image_mask, np.flatnonzero(image_mask & (ids == opening)))
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
    each = np.ones_like(rows) if sample.images == len(found) else rows  # else videos whose frames are images
    runs = zip(found, rows.tolist(), each.tolist(), strict=True)
    return [Run(start, stop, count, images=images) for (start, stop), count, images in runs]


def cut(sample: Sample, end: int, images: Sequence[Run], opening: int | None) -> Sample:
    """The first `end` tokens of a sample, or fewer. `opening`: the mark in front of an image, which goes with it.

    Raises Mismatch where one of several images would be left to a family that cuts the only image of a row into tiles.
    """
    kept, pixels, videos, patches = 0, 0, 0, 0
    spans = 0
    for run in images:
        if run.stop > end:
            end = min(end, run.start)
            if end and sample.input_ids[end - 1] == opening:  # models look for an image behind each
                end -= 1
            break
        if run.video:
            videos, patches = videos + 1, patches + run.pixels
        else:
            kept, pixels, spans = kept + run.images, pixels + run.pixels, spans + 1
    more = cut_inputs(sample.extra, end, kept, pixels, videos, patches)
    if kept == 1 < sample.images and any(one.per == "row" for one in more.values()):
        raise Mismatch(why_not_one_image(sample.images))
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
        extra=more,
        places=sample.places[:spans],
        videos=videos if sample.films else sample.videos,
        films=sample.films[:videos],
    )
