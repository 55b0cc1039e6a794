"""What a model takes of images beside `pixel_values` and `image_grid_thw`: further tensors, by their own names.

The processor of a family says in `inputs` which it gives, and what the first dimension of each counts:

    token    tokens of the row: kinds of tokens; padded as tokens are, with 0
    image    images: their sizes
    pixels   rows of `pixel_values`: masks of tiles
    sound    sounds: what they are, and where padding begins
    video    videos: their sizes in patches
    patch    patches of videos
    row      conversations with images: how many images each has

All but those of tokens are joined on the first dimension, over samples in order. Behind it they may differ, as images
of several sizes do, and are filled up with zeros to the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from octavo.data.errors import DataError

COUNTED = ("token", "image", "pixels", "sound", "video", "patch", "row")


class Input(NamedTuple):
    """A further tensor of one row: `per` says what its first dimension counts, one of `COUNTED`."""

    per: str
    values: np.ndarray


Inputs = Mapping[str, Input]


def further(processor: Any) -> Mapping[str, str]:
    """Name -> what it counts, of what a processor gives beside the tensors that all families know."""
    return getattr(processor, "inputs", {})


def of_row(outputs: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Input]:
    """The further tensors among what a processor made of one row: int64, or float32 where it gave floats."""
    found = {name: np.asarray(outputs[name]) for name in names if outputs.get(name) is not None}
    return {
        name: Input(names[name], np.ascontiguousarray(x, np.float32 if x.dtype.kind == "f" else np.int64))
        for name, x in found.items()
    }


def of_processor(processor: Any, batch: Mapping[str, Any]) -> dict[str, Input]:
    """The further tensors among what a processor made of one row as a batch, [1, T] where they count tokens."""
    names = further(processor)
    there = {name: batch[name][0] if names[name] == "token" else batch[name] for name in names if name in batch}
    return of_row(there, names)


def check_lengths(outputs: Mapping[str, Any], names: Mapping[str, str], counts: Mapping[str, int]) -> None:
    """That tensors count what their processor says. Raises DataError, naming the first that does not."""
    for name, per in names.items():
        if (there := outputs.get(name)) is not None and per in counts and len(there) != counts[per]:
            raise DataError(
                f"the processor gives {name} of {len(there)} for {counts[per]} ({per}), so that rows would take each "
                "other's; this version of transformers is not the one that the family was taught with"
            )


def cut(inputs: Inputs, tokens: int, images: int, pixels: int, videos: int = 0, patches: int = 0) -> dict[str, Input]:
    """What is left of a row's tensors when it is cut to so many tokens, images and rows of `pixel_values`, videos and
    rows of `pixel_values_videos`."""
    ends = {"token": tokens, "image": images, "pixels": pixels, "video": videos, "patch": patches, "row": 1}
    there = {"video": videos, "patch": videos, "token": 1}
    kept = {name: one for name, one in inputs.items() if there.get(one.per, images)}
    return {name: Input(per, values[: ends[per]].copy()) for name, (per, values) in kept.items()}


def answered(inputs: Inputs, start: int, tokens: int) -> dict[str, Input]:
    """A row's tensors where behind its first `start` tokens stand so many others, of text."""
    return {
        name: Input(per, np.pad(values[:start], (0, tokens))) if per == "token" else Input(per, values)
        for name, (per, values) in inputs.items()
    }


def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Arrays behind each other on the first dimension, the others filled up with zeros to the largest."""
    found = list(arrays)
    if len({array.shape[1:] for array in found}) == 1:
        return np.concatenate(found)
    rest = np.max([array.shape[1:] for array in found], axis=0)
    ends = [0, *accumulate(len(array) for array in found)]
    out = np.zeros((ends[-1], *rest), dtype=found[0].dtype)
    for start, array in zip(ends, found, strict=False):
        out[(slice(start, start + len(array)), *(slice(size) for size in array.shape[1:]))] = array
    return out


def joined_inputs(inputs: Sequence[Inputs]) -> dict[str, np.ndarray]:
    """The tensors of several rows joined, but for those that count tokens."""
    names = dict.fromkeys(name for row in inputs for name, one in row.items() if one.per != "token")
    return {name: joined(row[name].values for row in inputs if name in row) for name in names}
