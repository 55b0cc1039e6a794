"""Collates samples into a batch: rows padded on the right to the longest, or several samples in one row (a pack).
Images are concatenated in the order of the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from octavo.data.encoding.sample import IGNORE, Sample, concatenate, concatenate_inputs

Place = tuple[int, int]  # (source, row)
NumberedRows = Sequence[tuple[int, Any]]  # (number in the stream, encoded row, or None for a row that is left out)
Gather = Callable[..., list[Any]]  # (numbered rows, size, padding token) -> the micro-batches of a step
# Length of the row of a micro-batch without samples: two tokens, so that one position has a prediction.
EMPTY_LENGTH = 2
PACK_MULTIPLE = 128  # packs are padded to a multiple of it, because GEMMs and FP8 blocks have tiles of this size


@dataclass(frozen=True)
class Meta:
    """Metadata of a batch for the trainer, not for the model: `batch["meta"]`, removed before the forward.

    One entry for each sample, which in a padded batch is a row: `files`, `rows`, `ids`, `answers` ((start, end) in the
    tokens of the sample), `images`, `sounds`, `videos`, `patches` (of its images, in the first dimension of
    `pixel_values`), `lengths` (tokens without padding), `loss_tokens` (labels that are not -100). An empty batch has no
    entries.
    `inputs`: name -> what its first dimension counts, for the further tensors in the batch
    (:mod:`octavo.data.encoding.sample`).
    """

    files: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    ids: tuple[str | None, ...] = ()
    answers: tuple[tuple[tuple[int, int], ...], ...] = ()
    images: tuple[int, ...] = ()
    patches: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    loss_tokens: tuple[int, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    sounds: tuple[int, ...] = ()
    videos: tuple[int, ...] = ()

    @property
    def samples(self) -> int:
        return len(self.rows)

    @property
    def has_image(self) -> bool:
        return any(self.images)

    @property
    def has_video(self) -> bool:
        """True if a video has separate tensors here; frames that are passed as images count as images."""
        return any(per == "video" for per in self.inputs.values())

    @property
    def sees(self) -> bool:
        """True if the vision tower has any input."""
        return self.has_image or self.has_video

    @property
    def has_audio(self) -> bool:
        return any(self.sounds)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Boundaries:
    """The boundaries of the samples in a pack of T tokens: `batch["boundaries"]`, removed by the trainer.

    `edges`: 0, the end of each sample, and T where padding follows. `samples`: their number; padding after them is a
    separate segment. `packing_checksum`: a checksum of all packs of the step, as they were planned; ranks
    whose checksums differ have different packs.
    """

    edges: tuple[int, ...]
    samples: int
    packing_checksum: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the samples, without padding."""
        return self.edges[self.samples]

    @property
    def length(self) -> int:
        """T."""
        return self.edges[-1]


def collate(samples: Sequence[Sample], pad_id: int) -> dict[str, Any]:
    """Collate samples to a batch of B rows of length T, the length of the longest sample.

    `input_ids`, `attention_mask`, `labels` [B, T] int64; if any row has an image also `pixel_values` (joined on the
    first dimension), `image_grid_thw`, `mm_token_type_ids` and further tensors that the processor returns; `meta`.
    Without samples it is one row of padding that is attended and has no labels: a cheap forward with no gradient.
    """
    if not samples:
        ids = torch.full((1, EMPTY_LENGTH), pad_id, dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full_like(ids, IGNORE),
                "meta": Meta()}  # fmt: skip
    longest = max(len(sample.input_ids) for sample in samples)
    batch: dict[str, Any] = {
        "input_ids": _pad([s.input_ids for s in samples], longest, pad_id),
        "attention_mask": _pad([np.ones_like(s.input_ids) for s in samples], longest, 0),
        "labels": _pad([s.labels for s in samples], longest, IGNORE),
    }
    batch |= _media_tensors(samples)
    batch |= {name: _pad(kinds, longest, 0) for name, kinds in _token_types(samples).items()}
    return {**batch, "meta": _make_meta(samples)}


def make_micro_batches(rows: NumberedRows, size: int, pad_id: int, collate: Callable[..., Any] = collate) -> list[Any]:
    """Collate the rows of a step to batches of up to `size` rows; a row that is left out makes its batch smaller."""
    pieces = (rows[first : first + size] for first in range(0, len(rows), size))
    return [collate([sample for _, sample in piece if sample is not None], pad_id) for piece in pieces]


def collate_pack(
    samples: Sequence[Sample], pad_id: int, capacity: int, packing_checksum: int = 0, ranks: int = 1
) -> dict[str, Any]:
    """Collate samples to a batch of one row of T tokens: the samples in order, padded to a multiple of 128, but not
    beyond `capacity`; a pack that several `ranks` share is padded to a multiple of 128 for each rank, for any capacity.

    As `collate` with shapes [1, T], and with `boundaries` in place of the mask. Padding and the first token of each
    sample have no label, because no token of the same sample precedes it. Without samples the row is only padding.
    Raises ValueError for more tokens than `capacity`.
    """
    lengths = [len(sample.input_ids) for sample in samples]
    total = sum(lengths)
    if total > capacity:
        raise ValueError(f"samples of {lengths} tokens do not fit into a pack of {capacity}")
    multiple = PACK_MULTIPLE * ranks
    longest = -(-total // multiple) * multiple if samples else EMPTY_LENGTH * ranks
    longest = min(longest, capacity) if ranks == 1 and samples else longest
    ends = [0, *accumulate(lengths)] + [longest] * (longest > total)

    def row(arrays: Sequence[np.ndarray], fill: int) -> torch.Tensor:
        return _pad([np.concatenate(arrays)] if arrays else [np.empty(0)], longest, fill)

    labels = row([s.labels for s in samples], IGNORE)
    labels[0, ends[:-1]] = IGNORE
    batch = {"input_ids": row([s.input_ids for s in samples], pad_id), "labels": labels, **_media_tensors(samples)}
    batch |= {name: row(kinds, 0) for name, kinds in _token_types(samples).items()}
    return {**batch, "boundaries": Boundaries(tuple(ends), len(samples), packing_checksum), "meta": _make_meta(samples)}


def _media_tensors(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    arrays: dict[str, np.ndarray] = {}
    if any(sample.images for sample in samples):
        arrays["pixel_values"] = concatenate(s.pixel_values for s in samples if s.pixel_values is not None)
    if any(s.image_grid_thw is not None for s in samples):
        arrays["image_grid_thw"] = concatenate(s.image_grid_thw for s in samples if s.image_grid_thw is not None)
    arrays |= concatenate_inputs([s.extra for s in samples])
    return {name: torch.from_numpy(values) for name, values in arrays.items()}


def _token_types(samples: Sequence[Sample]) -> dict[str, list[np.ndarray]]:
    """Name -> token types of each sample, as the model takes them: if there are images or videos and the processor
    returns token types; 0 in samples without."""
    if not any(s.images or s.videos for s in samples):
        return {}
    by_sample = [{} if s.mm_token_type_ids is None else {"mm_token_type_ids": s.mm_token_type_ids} for s in samples]
    for token_types, sample in zip(by_sample, samples, strict=True):
        token_types |= {name: tensor.values for name, tensor in sample.extra.items() if tensor.per == "token"}
    names = dict.fromkeys(name for token_types in by_sample for name in token_types)
    return {
        name: [
            token_types.get(name, np.zeros_like(s.input_ids)) for token_types, s in zip(by_sample, samples, strict=True)
        ]
        for name in names
    }


def _make_meta(samples: Sequence[Sample]) -> Meta:
    return Meta(
        files=tuple(s.file for s in samples),
        rows=tuple(s.row for s in samples),
        ids=tuple(s.id for s in samples),
        answers=tuple(s.answers for s in samples),
        images=tuple(s.images for s in samples),
        patches=tuple(0 if s.pixel_values is None else len(s.pixel_values) for s in samples),
        lengths=tuple(len(s.input_ids) for s in samples),
        loss_tokens=tuple(int((s.labels != IGNORE).sum()) for s in samples),
        inputs={name: tensor.per for s in samples for name, tensor in s.extra.items()},
        sounds=tuple(s.sounds for s in samples),
        videos=tuple(s.videos for s in samples),
    )


def _pad(rows: Sequence[np.ndarray], length: int, fill: int) -> torch.Tensor:
    out = np.full((len(rows), length), fill, dtype=np.int64)
    for number, row in enumerate(rows):
        out[number, : len(row)] = row
    return torch.from_numpy(out)
