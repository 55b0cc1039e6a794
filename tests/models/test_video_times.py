"""Timestamps of Qwen2.5-VL's video tokens match the formula in every version of transformers."""

from __future__ import annotations

import math

import pytest
import torch

from octavo import models
from octavo.models.forward import paged
from octavo.models.processors import frames
from octavo.models.tiny import tiny

SECONDS = [1.0, 0.5, 0.3, 2.0, 1 / 3, 0.04, 7.25]  # a time step, of videos from 1/4 to 50 frames a second
MERGE = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    folder = tiny.write("qwen2_5_vl", tmp_path_factory.mktemp("qwen"), size="mini")
    return models.load(folder)


def batch_of(rows: list[list[tuple[str, tuple[int, int, int] | int]]], seconds: list[float]) -> dict:
    """Build padded rows of ("text", tokens), ("image", grid) and ("video", grid), with the seconds of each video's
    step."""
    kinds, images, videos = [], [], []
    for row in rows:
        of_row = []
        for what, size in row:
            if what == "text":
                of_row += [0] * size
                continue
            of_row += [1 if what == "image" else 2] * (math.prod(size) // MERGE**2)
            (images if what == "image" else videos).append(size)
        kinds.append(of_row)
    longest = max(map(len, kinds))
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in kinds]
    types = torch.tensor([row + [0] * (longest - len(row)) for row in kinds])
    batch = {
        "input_ids": torch.full_like(types, 5),
        "mm_token_type_ids": types,
        "attention_mask": torch.tensor(mask),
        "second_per_grid_ts": torch.tensor(seconds),
        "video_grid_thw": torch.tensor(videos),
    }
    return batch | ({"image_grid_thw": torch.tensor(images)} if images else {})


def by_the_formula(model, row: list, seconds: list[float]) -> list[list[int]]:
    """Compute the three positions of each token of a row by Qwen2.5-VL's rule."""
    rate = model.config.vision_config.tokens_per_second
    positions, start, left = [], 0, list(seconds)
    for what, size in row:
        if what == "text":
            positions += [[start + n] * 3 for n in range(size)]
            start += size
            continue
        steps, height, width = size[0], size[1] // MERGE, size[2] // MERGE
        interval = 1.0 if what == "image" else float(torch.tensor(left.pop(0)) * rate)
        for step in range(steps):
            time = start + math.floor(step * interval)
            positions += [[time, start + y, start + x] for y in range(height) for x in range(width)]
        start += max(height, width)
    return positions


ROWS = [
    [("text", 3), ("video", (4, 4, 6)), ("text", 2)],
    [("image", (1, 4, 4)), ("text", 1), ("video", (3, 2, 4)), ("text", 4), ("video", (2, 6, 2)), ("text", 1)],
]


@pytest.mark.parametrize("shift", range(len(SECONDS)))
def test_positions_match_the_formula(model, shift: int) -> None:
    seconds = [SECONDS[(shift + n) % len(SECONDS)] for n in range(3)]
    batch = batch_of(ROWS, seconds)
    positions = models.batch_positions(model, batch)
    assert positions.dtype == torch.int64
    for number, (row, of_row) in enumerate(zip(ROWS, (seconds[:1], seconds[1:]), strict=True)):
        expected = by_the_formula(model, row, of_row)
        assert positions[:, number, : len(expected)].T.tolist() == expected
        # a sample of a pack is placed by itself
        kinds = batch["mm_token_type_ids"][number, : len(expected)]
        first = sum(what == "video" for what, _ in ROWS[0]) * number
        own = {name: batch[name][first : first + len(of_row)] for name in models.VIDEO_INPUTS}
        grid = batch["image_grid_thw"] if number else None
        ids = batch["input_ids"][number, : len(expected)]
        alone, next_one = paged.prompt_positions(model, models.describe(model.config), ids, kinds, grid, own)
        assert alone.T.tolist() == expected and next_one == max(map(max, expected)) + 1


def test_transformers_version_that_truncates_seconds_is_rejected(model, monkeypatch) -> None:
    """With the behavior of 5.17, positions in training do not change, and generation with its forward is an error."""
    batch = batch_of(ROWS[:1], [0.5])
    expected = models.batch_positions(model, batch)
    own = model.base_model.get_rope_index

    def cutting(*, second_per_grid_ts, **rest):
        return own(second_per_grid_ts=second_per_grid_ts.int(), **rest)

    monkeypatch.setattr(model.base_model, "get_rope_index", cutting)
    assert torch.equal(models.batch_positions(model, batch), expected)
    assert "truncates the seconds" in frames.why_not_stock_times(model, batch)
    whole = batch_of(ROWS[:1], [2.0])
    assert frames.why_not_stock_times(model, whole) is None
    assert frames.why_not_stock_times(model, {"input_ids": batch["input_ids"]}) is None
