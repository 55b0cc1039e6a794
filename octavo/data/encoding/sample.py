"""One encoded conversation: its tokens and what is learned of them, and all that the model takes of its images.

A model may take of them further tensors than `pixel_values` and `image_grid_thw`, by their own names. The processor of
a family says in `inputs` which it gives, and what the first dimension of each counts:

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
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from octavo.data.errors import DataError
from octavo.data.skip_report import CONTROL, left_out

IGNORE = -100
COUNTED = ("token", "image", "pixels", "sound", "video", "patch", "row")


class Input(NamedTuple):
    """A further tensor of one row: `per` says what its first dimension counts, one of `COUNTED`."""

    per: str
    values: np.ndarray


Inputs = Mapping[str, Input]


@dataclass(frozen=True)
class Sample:
    """One encoded conversation of T tokens. NumPy arrays, so that workers send it without shared memory.

    `input_ids` [T] int64 · `labels` [T] int64: the token itself where it is trained on, else -100 (not shifted:
    the model shifts) · `mm_token_type_ids` [T] int64 or None · `pixel_values` float32, [patches, features] or
    [tiles, channels, height, width], or None · `image_grid_thw` [images, 3] int64 or None · `images`, `sounds`,
    `videos`: how many; `images` counts the frames of videos that are images to the model · `answers`: (start, end) in
    tokens of what is learned of each assistant turn, end-of-turn token included; (0, 0) of one that is context ·
    `length`: the tokens before a cut · `control`: the control tokens that its text spells out · `lost`: how many
    answers are not learned, since the template left their reasoning out · `more`: further tensors for the model, by
    their names · `places`: (start, end) in tokens of what stands for each image, marks and
    text around it included, where the processor tells; `films`: of each video that has tensors of its own, likewise.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    mm_token_type_ids: np.ndarray | None = None
    pixel_values: np.ndarray | None = None
    image_grid_thw: np.ndarray | None = None
    images: int = 0
    answers: tuple[tuple[int, int], ...] = ()
    length: int = 0
    control: tuple[str, ...] = ()
    lost: int = 0
    extra: Inputs = field(default_factory=dict)
    places: tuple[tuple[int, int], ...] = ()
    file: str = ""
    row: int = -1
    id: str | None = None
    sounds: int = 0
    videos: int = 0
    films: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory of the arrays in bytes."""
        arrays = [self.input_ids, self.labels, self.mm_token_type_ids, self.pixel_values, self.image_grid_thw]
        arrays += [one.values for one in self.extra.values()]
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def cut(self) -> bool:
        """Whether tokens were cut off to fit `seq_length`."""
        return self.length > len(self.input_ids)

    @property
    def notes(self) -> list[tuple[str, str]]:
        """(action, reason) of what is worth a line in `skipped.jsonl`, though the row is used."""
        found = [("cut", f"{self.length} tokens cut to {len(self.input_ids)}")] if self.cut else []
        return [*found, *control_notes(self.control), *(left_out(self.lost) if self.lost else [])]


def control_notes(control: Sequence[str]) -> list[tuple[str, str]]:
    """(action, reason) of a row whose text spells control tokens; none for none."""
    spelt = ", ".join(map(repr, control))
    return [(CONTROL, f"its text spells {spelt}, which the tokenizer takes for a control token")] if control else []


def extra_inputs(processor: Any) -> Mapping[str, str]:
    """Name -> what it counts, of what a processor gives beside the tensors that all families know."""
    return getattr(processor, "inputs", {})


def inputs_of_row(outputs: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Input]:
    """The further tensors among what a processor made of one row: int64, or float32 where it gave floats."""
    found = {name: np.asarray(outputs[name]) for name in names if outputs.get(name) is not None}
    return {
        name: Input(names[name], np.ascontiguousarray(x, np.float32 if x.dtype.kind == "f" else np.int64))
        for name, x in found.items()
    }


def inputs_of_processor(processor: Any, batch: Mapping[str, Any]) -> dict[str, Input]:
    """The further tensors among what a processor made of one row as a batch, [1, T] where they count tokens."""
    names = extra_inputs(processor)
    there = {name: batch[name][0] if names[name] == "token" else batch[name] for name in names if name in batch}
    return inputs_of_row(there, names)


def check_lengths(outputs: Mapping[str, Any], names: Mapping[str, str], counts: Mapping[str, int]) -> None:
    """That tensors count what their processor says. Raises DataError, naming the first that does not."""
    for name, per in names.items():
        if (there := outputs.get(name)) is not None and per in counts and len(there) != counts[per]:
            raise DataError(
                f"the processor gives {name} of {len(there)} for {counts[per]} ({per}), so that rows would take each "
                "other's; this version of transformers is not the one that the family was taught with"
            )


def cut_inputs(
    inputs: Inputs, tokens: int, images: int, pixels: int, videos: int = 0, patches: int = 0
) -> dict[str, Input]:
    """What is left of a row's tensors when it is cut to so many tokens, images and rows of `pixel_values`, videos and
    rows of `pixel_values_videos`."""
    ends = {"token": tokens, "image": images, "pixels": pixels, "video": videos, "patch": patches, "row": 1}
    there = {"video": videos, "patch": videos, "token": 1}
    kept = {name: one for name, one in inputs.items() if there.get(one.per, images)}
    return {name: Input(per, values[: ends[per]].copy()) for name, (per, values) in kept.items()}


def with_answer_tokens(inputs: Inputs, start: int, tokens: int) -> dict[str, Input]:
    """A row's tensors where behind its first `start` tokens stand so many others, of text."""
    return {
        name: Input(per, np.pad(values[:start], (0, tokens))) if per == "token" else Input(per, values)
        for name, (per, values) in inputs.items()
    }


def concatenate(arrays: Iterable[np.ndarray]) -> np.ndarray:
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


def concatenate_inputs(inputs: Sequence[Inputs]) -> dict[str, np.ndarray]:
    """The tensors of several rows joined, but for those that count tokens."""
    names = dict.fromkeys(name for row in inputs for name, one in row.items() if one.per != "token")
    return {name: concatenate(row[name].values for row in inputs if name in row) for name in names}
