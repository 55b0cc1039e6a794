"""Truncates a sample to a length, but never inside an image or a video: one that does not fit is removed with its
pixels and the mark before it. Part of a video would only cost time, because text before it does not attend to it and no
text is left after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from octavo.data.encoding.processor_calls import true_runs
from octavo.data.encoding.sample import Sample, cut_inputs
from octavo.data.errors import Mismatch


def why_not_one_image(images: int) -> str:
    """Return the reason why a row of several images is not cut to one image."""
    return (
        f"one of its {images} images would be left, and this family splits an image into tiles only if the row has no "
        "other image"
    )


class Run(NamedTuple):
    """The tokens [start, stop) of an image or a video, and its number of rows in `pixel_values` or
    `pixel_values_videos`. `images` is the number of images that it counts as: several for a video whose frames are
    passed as images."""

    start: int
    stop: int
    pixels: int
    video: bool = False
    images: int = 1


def media_runs(sample: Sample, image_mask: np.ndarray, place: int | None, opening: int | None) -> list[Run]:
    """Return the images and videos of a sample, in order. `image_mask` [T] marks tokens of images, `place` is the token
    of an image feature, `opening` is the token at the start of each image's expansion, if there is one."""
    grids = sample.extra.get("video_grid_thw")
    patch_counts = () if grids is None else grids.values.prod(axis=1).tolist()
    video_runs = [Run(*span, patches, True) for span, patches in zip(sample.films, patch_counts, strict=True)]
    return sorted([*video_runs, *_image_runs(sample, image_mask, place, opening)])


def cut_position(runs: Sequence[Run], end: int) -> str:
    """Describe the image or video that a cut at `end` falls into, as the beginning of a sentence; "" for text."""
    hit = next((run for run in runs if run.start < end < run.stop), None)
    what = "a video" if hit and (hit.video or hit.images > 1) else "an image"
    return f"the cut falls into {what}, which is removed whole, and " if hit else ""


def _image_runs(sample: Sample, image_mask: np.ndarray, place: int | None, opening: int | None) -> list[Run]:
    if sample.pixel_values is None:
        return []
    ids, pixels, grid = sample.input_ids, len(sample.pixel_values), sample.image_grid_thw
    # Adjacent images form one run of image tokens. If each image begins with a mark, the marks separate them.
    spans = list(sample.places) or true_runs(image_mask, np.flatnonzero(image_mask & (ids == opening)))
    if grid is not None:
        rows = grid.prod(axis=1)
        if len(spans) != len(rows):  # no marks: divide the tokens in proportion to patches
            edges = np.cumsum([0, *(rows * int(image_mask.sum()) // rows.sum())])
            positions = np.flatnonzero(image_mask)
            spans = [(int(positions[a]), int(positions[b - 1]) + 1) for a, b in zip(edges, edges[1:], strict=False)]
    elif pixels == len(spans):
        rows = np.ones(pixels, dtype=np.int64)
    else:  # every tile of an image has the same number of tokens
        tokens = np.array([np.sum(ids[start:stop] == place) for start, stop in spans])
        rows = tokens * pixels // tokens.sum()
    images_per_run = (
        np.ones_like(rows) if sample.images == len(spans) else rows
    )  # otherwise videos, whose frames are passed as images
    runs = zip(spans, rows.tolist(), images_per_run.tolist(), strict=True)
    return [Run(start, stop, count, images=images) for (start, stop), count, images in runs]


def cut(sample: Sample, end: int, images: Sequence[Run], opening: int | None) -> Sample:
    """Return the first `end` tokens of a sample, or fewer. `opening` is the mark before an image, which is removed with
    the image. Raises Mismatch if one of several images would be left in a family that splits the only image of a row
    into tiles.
    """
    remaining, pixels, videos, patches = 0, 0, 0, 0
    spans = 0
    for run in images:
        if run.stop > end:
            end = min(end, run.start)
            if end and sample.input_ids[end - 1] == opening:  # models expect an image after each mark
                end -= 1
            break
        if run.video:
            videos, patches = videos + 1, patches + run.pixels
        else:
            remaining, pixels, spans = remaining + run.images, pixels + run.pixels, spans + 1
    extra = cut_inputs(sample.extra, end, remaining, pixels, videos, patches)
    if remaining == 1 < sample.images and any(tensor.per == "row" for tensor in extra.values()):
        raise Mismatch(why_not_one_image(sample.images))
    kinds, values, grid = sample.mm_token_type_ids, sample.pixel_values, sample.image_grid_thw
    return replace(
        sample,
        input_ids=sample.input_ids[:end],
        labels=sample.labels[:end],
        mm_token_type_ids=None if kinds is None else kinds[:end],
        pixel_values=values[:pixels].copy() if values is not None and remaining else None,
        image_grid_thw=grid[:remaining] if grid is not None and remaining else None,
        images=remaining,
        answers=tuple(span for span in sample.answers if span[1] <= end),  # only complete answers
        extra=extra,
        places=sample.places[:spans],
        videos=videos if sample.films else sample.videos,
        films=sample.films[:videos],
    )
