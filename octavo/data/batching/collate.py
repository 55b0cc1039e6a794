"""Samples to a batch: rows padded on the right to the longest, or samples behind each other in one row (a pack); images
joined in order over the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from octavo.data.encoding.sample import IGNORE, Sample, concatenate, concatenate_inputs

Place = tuple[int, int]  # (source, row)
Numbered = Sequence[tuple[int, Any]]  # (number in the stream, what was made of that row, or None where it is left out)
Gather = Callable[..., list[Any]]  # of numbered rows, a size and the padding token: what a step is
# Length of the row that stands for a micro-batch without samples: two tokens, so that one position predicts.
EMPTY_LENGTH = 2
MULTIPLE = 128  # of tokens that a pack is filled up to: GEMMs and FP8 blocks come in such pieces


@dataclass(frozen=True)
class Meta:
    """What the trainer wants to know of a batch and the model does not; `batch["meta"]`, taken out before the forward.

    One entry a sample, which in a padded batch is a row: `files`, `rows`, `ids`, `answers` ((start, end) in its own
    tokens), `images`, `sounds`, `videos`, `patches` (that its images have in the first dimension of `pixel_values`),
    `lengths` (tokens without padding), `loss_tokens` (labels that are not -100). A batch that stands for no samples has
    no entries.
    `inputs`: name -> what it counts, of the further tensors in the batch (:mod:`octavo.data.encoding.sample`).
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
        """Whether a video has tensors of its own here; frames that are images are images."""
        return any(per == "video" for per in self.inputs.values())

    @property
    def sees(self) -> bool:
        """Whether the vision tower has something to see."""
        return self.has_image or self.has_video

    @property
    def has_sound(self) -> bool:
        return any(self.sounds)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Boundaries:
    """Where the samples of a pack of T tokens begin; `batch["boundaries"]`, which the trainer takes out.

    `edges`: 0, the end of each sample, and where padding follows them T, its end. `samples`: how many there are; what
    is behind them is padding, a segment of its own. `plan`: a checksum of all packs of its step, as they were planned;
    ranks that find another one have other packs.
    """

    edges: tuple[int, ...]
    samples: int
    plan: int = 0

    @property
    def tokens(self) -> int:
        """Of samples, padding left out."""
        return self.edges[self.samples]

    @property
    def length(self) -> int:
        """T."""
        return self.edges[-1]


def collate(samples: Sequence[Sample], pad_id: int) -> dict[str, Any]:
    """A batch of B rows, T = the longest row.

    `input_ids`, `attention_mask`, `labels` [B, T] int64; where any row has an image also `pixel_values` (joined on the
    first dimension), `image_grid_thw`, `mm_token_type_ids` and further tensors where the processor gives them; `meta`.
    No samples
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
    batch |= _images(samples)
    batch |= {name: _padded(kinds, longest, 0) for name, kinds in _kinds(samples).items()}
    return {**batch, "meta": _meta(samples)}


def micro_batches(rows: Numbered, size: int, pad_id: int, collate: Callable[..., Any] = collate) -> list[Any]:
    """The rows of a step as batches of up to `size`; rows that are left out make theirs smaller."""
    pieces = (rows[first : first + size] for first in range(0, len(rows), size))
    return [collate([sample for _, sample in piece if sample is not None], pad_id) for piece in pieces]


def collate_pack(
    samples: Sequence[Sample], pad_id: int, capacity: int, plan: int = 0, ranks: int = 1
) -> dict[str, Any]:
    """A batch of one row of T tokens: the samples in order, and padding up to a multiple of 128, if that is no more
    than `capacity`; of a pack that several `ranks` share up to 128 each, whatever its capacity.

    As `collate`, [1, T], but for a mask, in whose place stand `boundaries`. Padding and the first token of each sample
    have no label: nothing in front of that predicts it. No samples give a row of padding alone. Raises ValueError for
    more tokens than `capacity`.
    """
    lengths = [len(sample.input_ids) for sample in samples]
    total = sum(lengths)
    if total > capacity:
        raise ValueError(f"samples of {lengths} tokens do not fit into a pack of {capacity}")
    whole = MULTIPLE * ranks
    longest = -(-total // whole) * whole if samples else EMPTY_LENGTH * ranks
    longest = min(longest, capacity) if ranks == 1 and samples else longest
    ends = [0, *accumulate(lengths)] + [longest] * (longest > total)

    def row(arrays: Sequence[np.ndarray], fill: int) -> torch.Tensor:
        return _padded([np.concatenate(arrays)] if arrays else [np.empty(0)], longest, fill)

    labels = row([s.labels for s in samples], IGNORE)
    labels[0, ends[:-1]] = IGNORE
    batch = {"input_ids": row([s.input_ids for s in samples], pad_id), "labels": labels, **_images(samples)}
    batch |= {name: row(kinds, 0) for name, kinds in _kinds(samples).items()}
    return {**batch, "boundaries": Boundaries(tuple(ends), len(samples), plan), "meta": _meta(samples)}


def _images(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    found: dict[str, np.ndarray] = {}
    if any(sample.images for sample in samples):
        found["pixel_values"] = concatenate(s.pixel_values for s in samples if s.pixel_values is not None)
    if any(s.image_grid_thw is not None for s in samples):
        found["image_grid_thw"] = concatenate(s.image_grid_thw for s in samples if s.image_grid_thw is not None)
    found |= concatenate_inputs([s.extra for s in samples])
    return {name: torch.from_numpy(values) for name, values in found.items()}


def _kinds(samples: Sequence[Sample]) -> dict[str, list[np.ndarray]]:
    """What kind of token each is, by the names under which the model takes it: where there are images or videos and the
    processor says it; 0 in samples without."""
    if not any(s.images or s.videos for s in samples):
        return {}
    given = [{} if s.mm_token_type_ids is None else {"mm_token_type_ids": s.mm_token_type_ids} for s in samples]
    for own, sample in zip(given, samples, strict=True):
        own |= {name: one.values for name, one in sample.extra.items() if one.per == "token"}
    names = dict.fromkeys(name for own in given for name in own)
    return {
        name: [own.get(name, np.zeros_like(s.input_ids)) for own, s in zip(given, samples, strict=True)]
        for name in names
    }


def _meta(samples: Sequence[Sample]) -> Meta:
    return Meta(
        files=tuple(s.file for s in samples),
        rows=tuple(s.row for s in samples),
        ids=tuple(s.id for s in samples),
        answers=tuple(s.answers for s in samples),
        images=tuple(s.images for s in samples),
        patches=tuple(0 if s.pixel_values is None else len(s.pixel_values) for s in samples),
        lengths=tuple(len(s.input_ids) for s in samples),
        loss_tokens=tuple(int((s.labels != IGNORE).sum()) for s in samples),
        inputs={name: one.per for s in samples for name, one in s.extra.items()},
        sounds=tuple(s.sounds for s in samples),
        videos=tuple(s.videos for s in samples),
    )


def _padded(rows: Sequence[np.ndarray], length: int, fill: int) -> torch.Tensor:
    out = np.full((len(rows), length), fill, dtype=np.int64)
    for number, row in enumerate(rows):
        out[number, : len(row)] = row
    return torch.from_numpy(out)
