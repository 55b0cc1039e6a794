"""One encoded conversation: its tokens, its labels, and the tensors of its images, sounds and videos.

A model may take further tensors than `pixel_values` and `image_grid_thw`. The attribute `inputs` of a family's
processor names those that it returns, and what the first dimension of each counts:

    token    tokens of the row: token types; padded with 0
    image    images: their sizes
    pixels   rows of `pixel_values`: masks of tiles
    sound    sounds: their features, and the start of padding
    video    videos: their sizes in patches
    patch    patches of videos
    row      conversations with images: the number of images of each

All except per-token tensors are concatenated on the first dimension, in the order of the samples. Their other
dimensions may differ, for example for images of several sizes, and are padded with zeros to the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from octavo.data.errors import DataError
from octavo.data.skip_report import CONTROL_TOKENS, reasoning_notes

IGNORE = -100
COUNTED = ("token", "image", "pixels", "sound", "video", "patch", "row")
IMAGE_MARKS = (
    ("<|vision_start|>", "<|vision_end|>"),  # Qwen
    ("<|begin_of_image|>", "<|end_of_image|>"),  # GLM
    ("<|IMAGE_START|>", "<|IMAGE_END|>"),  # Ernie
)
"""Tokens that templates write around an image placeholder."""
_IMAGE_TOKENS = ("image_token_id", "start_image_token_id", "end_image_token_id", "audio_token_id")


class Input(NamedTuple):
    """An additional tensor of one row. `per` names what its first dimension counts, one of `COUNTED`."""

    per: str
    values: np.ndarray


Inputs = Mapping[str, Input]


@dataclass(frozen=True)
class Sample:
    """One encoded conversation of T tokens. NumPy arrays, so that workers send it without shared memory.

    `input_ids` [T] int64 · `labels` [T] int64: the token itself where it is trained on, else -100 (not shifted:
    the model shifts) · `mm_token_type_ids` [T] int64 or None · `pixel_values` float32, [patches, features] or
    [tiles, channels, height, width], or None · `image_grid_thw` [images, 3] int64 or None · `images`, `sounds`,
    `videos`: their numbers; `images` includes frames of videos that the model takes as images · `answers`: (start, end)
    in tokens of the learned part of each assistant turn, including its end-of-turn token; (0, 0) for an answer that is
    context · `length`: the tokens before a cut · `control`: the control tokens that its text spells · `lost`: the
    number of answers that are not learned because the template left their reasoning out · `extra`: further tensors for
    the model, by name · `places`: (start, end) in tokens of the expansion of each image, with marks and text around it,
    if the processor reports it; `films`: the same for each video with separate tensors.
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
        arrays += [tensor.values for tensor in self.extra.values()]
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def cut(self) -> bool:
        """True if tokens were cut off to fit `seq_length`."""
        return self.length > len(self.input_ids)

    @property
    def notes(self) -> list[tuple[str, str]]:
        """The (action, reason) of each line for `skipped.jsonl` about a row that is used."""
        cut = [("cut", f"{self.length} tokens cut to {len(self.input_ids)}")] if self.cut else []
        return [*cut, *control_notes(self.control), *(reasoning_notes(self.lost) if self.lost else [])]


def control_notes(control: Sequence[str]) -> list[tuple[str, str]]:
    """Return the (action, reason) notes for a row whose text contains control tokens; [] if there are none."""
    tokens = ", ".join(map(repr, control))
    return (
        [(CONTROL_TOKENS, f"its text contains {tokens}, which the tokenizer reads as a control token")]
        if control
        else []
    )


def extra_inputs(processor: Any) -> Mapping[str, str]:
    """Return name -> what its first dimension counts, for the tensors that a processor returns in addition to the
    common ones."""
    return getattr(processor, "inputs", {})


def inputs_of_row(outputs: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Input]:
    """Return the additional tensors in the outputs of a processor for one row: float32 for floats, else int64."""
    arrays = {name: np.asarray(outputs[name]) for name in names if outputs.get(name) is not None}
    return {
        name: Input(names[name], np.ascontiguousarray(x, np.float32 if x.dtype.kind == "f" else np.int64))
        for name, x in arrays.items()
    }


def inputs_of_processor(processor: Any, batch: Mapping[str, Any]) -> dict[str, Input]:
    """Return the additional tensors in a batch of one row, whose per-token tensors have the shape [1, T]."""
    names = extra_inputs(processor)
    row = {name: batch[name][0] if names[name] == "token" else batch[name] for name in names if name in batch}
    return inputs_of_row(row, names)


def check_lengths(outputs: Mapping[str, Any], names: Mapping[str, str], counts: Mapping[str, int]) -> None:
    """Check that the first dimension of tensors has the expected length. Raises DataError for the first wrong
    tensor."""
    for name, per in names.items():
        if (values := outputs.get(name)) is not None and per in counts and len(values) != counts[per]:
            raise DataError(
                f"the processor returns {name} of length {len(values)} for {counts[per]} ({per}), so rows would get "
                "each other's values; this family was not tested with this version of transformers"
            )


def cut_inputs(
    inputs: Inputs, tokens: int, images: int, pixels: int, videos: int = 0, patches: int = 0
) -> dict[str, Input]:
    """Return the tensors of a row that is cut to these numbers of tokens, images, rows of `pixel_values` (`pixels`),
    videos and rows of `pixel_values_videos` (`patches`)."""
    ends = {"token": tokens, "image": images, "pixels": pixels, "video": videos, "patch": patches, "row": 1}
    remaining = {"video": videos, "patch": videos, "token": 1}
    remaining_inputs = {name: tensor for name, tensor in inputs.items() if remaining.get(tensor.per, images)}
    return {name: Input(per, values[: ends[per]].copy()) for name, (per, values) in remaining_inputs.items()}


def with_answer_tokens(inputs: Inputs, start: int, tokens: int) -> dict[str, Input]:
    """Return the tensors of a row whose first `start` tokens are followed by `tokens` tokens of text."""
    return {
        name: Input(per, np.pad(values[:start], (0, tokens))) if per == "token" else Input(per, values)
        for name, (per, values) in inputs.items()
    }


def concatenate(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Concatenate arrays on the first dimension; the other dimensions are padded with zeros to the largest."""
    listed = list(arrays)
    if len({array.shape[1:] for array in listed}) == 1:
        return np.concatenate(listed)
    rest = np.max([array.shape[1:] for array in listed], axis=0)
    ends = [0, *accumulate(len(array) for array in listed)]
    out = np.zeros((ends[-1], *rest), dtype=listed[0].dtype)
    for start, array in zip(ends, listed, strict=False):
        out[(slice(start, start + len(array)), *(slice(size) for size in array.shape[1:]))] = array
    return out


def concatenate_inputs(inputs: Sequence[Inputs]) -> dict[str, np.ndarray]:
    """Concatenate the tensors of several rows by name, except per-token tensors."""
    names = dict.fromkeys(name for row in inputs for name, tensor in row.items() if tensor.per != "token")
    return {name: concatenate(row[name].values for row in inputs if name in row) for name in names}


def image_token_ids(processor: Any) -> frozenset[int]:
    """Return every token that a placeholder can expand to, including the marks around it that are part of the
    expansion."""
    ids = set(getattr(processor, "image_token_ids", None) or [])
    ids |= {getattr(processor, name, None) for name in _IMAGE_TOKENS}
    return frozenset(int(i) for i in ids if i is not None)
