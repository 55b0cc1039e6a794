"""Samples to a batch: rows padded on the right to the longest, images joined in order over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.data.encode import IGNORE, Sample

# Length of the row that stands for a micro-batch without samples: two tokens, so that one position predicts.
EMPTY_LENGTH = 2


@dataclass(frozen=True)
class Meta:
    """What the trainer wants to know of a batch and the model does not; `batch["meta"]`, taken out before the forward.

    One entry a row: `files`, `rows`, `ids`, `answers` ((start, end) token spans), `images`, `patches` (that its images
    have in the first dimension of `pixel_values`), `lengths` (tokens without padding), `loss_tokens` (labels that are
    not -100). A batch that stands for no samples has no entries.
    """

    files: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    ids: tuple[str | None, ...] = ()
    answers: tuple[tuple[tuple[int, int], ...], ...] = ()
    images: tuple[int, ...] = ()
    patches: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    loss_tokens: tuple[int, ...] = ()

    @property
    def samples(self) -> int:
        return len(self.rows)

    @property
    def has_image(self) -> bool:
        return any(self.images)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def collate(samples: Sequence[Sample], pad_id: int) -> dict[str, Any]:
    """A batch of B rows, T = the longest row.

    `input_ids`, `attention_mask`, `labels` [B, T] int64; where any row has an image also `pixel_values` (joined on the
    first dimension), `image_grid_thw` and `mm_token_type_ids` where the processor gives them; `meta`. No samples
    give one row of padding that is attended and has no labels: a forward that costs little and teaches nothing.
    """
    if not samples:
        ids = torch.full((1, EMPTY_LENGTH), pad_id, dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full_like(ids, IGNORE),
                "meta": Meta()}  # fmt: skip
    longest = max(len(sample.input_ids) for sample in samples)
    batch: dict[str, Any] = {
        "input_ids": _padded([s.input_ids for s in samples], longest, pad_id),
        "attention_mask": _padded([np.ones_like(s.input_ids) for s in samples], longest, 0),
        "labels": _padded([s.labels for s in samples], longest, IGNORE),
    }
    if any(sample.images for sample in samples):
        batch["pixel_values"] = _concatenated([s.pixel_values for s in samples])
        if any(s.image_grid_thw is not None for s in samples):
            batch["image_grid_thw"] = _concatenated([s.image_grid_thw for s in samples])
        if any(s.mm_token_type_ids is not None for s in samples):
            kinds = [
                np.zeros_like(s.input_ids) if s.mm_token_type_ids is None else s.mm_token_type_ids for s in samples
            ]
            batch["mm_token_type_ids"] = _padded(kinds, longest, 0)
    batch["meta"] = Meta(
        files=tuple(s.file for s in samples),
        rows=tuple(s.row for s in samples),
        ids=tuple(s.id for s in samples),
        answers=tuple(s.answers for s in samples),
        images=tuple(s.images for s in samples),
        patches=tuple(0 if s.pixel_values is None else len(s.pixel_values) for s in samples),
        lengths=tuple(len(s.input_ids) for s in samples),
        loss_tokens=tuple(int((s.labels != IGNORE).sum()) for s in samples),
    )
    return batch


def _padded(rows: Sequence[np.ndarray], length: int, fill: int) -> torch.Tensor:
    out = np.full((len(rows), length), fill, dtype=np.int64)
    for number, row in enumerate(rows):
        out[number, : len(row)] = row
    return torch.from_numpy(out)


def _concatenated(arrays: Sequence[np.ndarray | None]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([array for array in arrays if array is not None]))
