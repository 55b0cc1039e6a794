"""Collation: padding, images of several rows, and empty batches."""

import numpy as np
import torch

from octavo.data import Sample, collate


def sample(length, images=0, row=0, grid=True):
    ids = np.arange(1, length + 1)
    labels = np.where(ids > length - 2, ids, -100)
    pixels = np.full((4 * images, 3), row, dtype=np.float32) if images else None
    return Sample(
        ids, labels, (ids < 3).astype(np.int64) if grid else None, pixels,
        np.tile([[1, 2, 2]], (images, 1)) if images and grid else None,
        images=images, answers=((length - 2, length),), length=length, file="f", row=row,
    )  # fmt: skip


def test_collate_handles_rows_with_and_without_images():
    batch = collate([sample(5, 1, 1), sample(3, 0, 2), sample(4, 2, 3)], pad_id=9)
    meta = batch.pop("meta")
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 9, 9], [1, 2, 3, 4, 9]]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    assert batch["labels"].tolist()[1] == [-100, 2, 3, -100, -100]
    assert batch["mm_token_type_ids"].tolist()[1] == [1, 1, 0, 0, 0]
    assert batch["pixel_values"][:, 0].tolist() == [1.0] * 4 + [3.0] * 8 and batch["image_grid_thw"].shape == (3, 3)
    assert meta.rows == (1, 2, 3) and meta.images == (1, 0, 2) and meta.has_image and meta.samples == 3
    assert meta.lengths == (5, 3, 4) and meta.tokens == 12 and meta.loss_tokens == (2, 2, 2)
    assert meta.answers[1] == ((1, 3),)


def test_batch_without_images_has_no_pixel_keys():
    batch = collate([sample(5), sample(3)], pad_id=0)
    assert set(batch) == {"input_ids", "attention_mask", "labels", "meta"} and not batch["meta"].has_image


def test_missing_token_types_are_zero_in_batches_with_images():
    batch = collate([sample(4, 1), sample(4, grid=False)], pad_id=0)
    assert batch["mm_token_type_ids"].tolist()[1] == [0] * 4
    assert "image_grid_thw" not in collate([sample(4, 1, grid=False)], pad_id=0)


def test_collate_of_no_samples_is_one_masked_row():
    batch = collate([], pad_id=7)
    assert batch["input_ids"].tolist() == [[7, 7]] and batch["attention_mask"].tolist() == [[1, 1]]
    assert (batch["labels"] == -100).all() and batch["labels"].dtype == torch.int64
    assert batch["meta"].samples == 0 and not batch["meta"].has_image
