"""One encoded conversation: its tokens and what is learned of them, and all that the model takes of its images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.data.encoding.inputs import Inputs
from octavo.data.skip_report import CONTROL, left_out

IGNORE = -100


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
    their names (:mod:`octavo.data.encoding.inputs`) · `places`: (start, end) in tokens of what stands for each image,
    marks and text around it included, where the processor tells; `films`: of each video that has tensors of its own,
    likewise.
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
    more: Inputs = field(default_factory=dict)
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
        arrays += [one.values for one in self.more.values()]
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def cut(self) -> bool:
        """Whether tokens were cut off to fit `seq_length`."""
        return self.length > len(self.input_ids)

    @property
    def notes(self) -> list[tuple[str, str]]:
        """(action, reason) of what is worth a line in `skipped.jsonl`, though the row is used."""
        found = [("cut", f"{self.length} tokens cut to {len(self.input_ids)}")] if self.cut else []
        return [*found, *spelling(self.control), *left_out(self.lost)]


def spelling(control: Sequence[str]) -> list[tuple[str, str]]:
    """(action, reason) of a row whose text spells control tokens; none for none."""
    spelt = ", ".join(map(repr, control))
    return [(CONTROL, f"its text spells {spelt}, which the tokenizer takes for a control token")] if control else []
