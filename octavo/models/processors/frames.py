"""Videos of a batch as images: to a vision tower, a time step of a video is an image.

In the towers of Qwen3-VL and Qwen2.5-VL a step (the frames that share a patch) attends only to itself, it has an
image's rotary angles, and its features replace the embeddings of its tokens, independently of the placeholder. A video
of t steps is therefore passed as t images, and a batch of images and videos runs the tower once, like a batch of
images: all ranks gather its weights equally often, each layer's GEMMs are counted once, and images and steps are
distributed over ranks by the same code. Only the positions of tokens in time differ; they are computed before the
forward (:func:`octavo.models.forward.paged.prompt_positions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VIDEO = 2
"""Value of a video's placeholder in `mm_token_type_ids`."""
VIDEO_INPUTS = ("video_grid_thw", "second_per_grid_ts")
"""Inputs of videos that determine the positions of their tokens: grids in patches, and seconds of a time step."""


class _HasRopeIndex(Protocol):
    """A model that computes positions for rotary embeddings with three axes."""

    def get_rope_index(self, input_ids: Tensor, **media: Tensor) -> tuple[Tensor, Tensor]:
        """Return int64 [3, B, T] and the offset of the next position in each row."""


def as_images(batch: Mapping[str, Any], merge: int, image: int) -> dict[str, Any]:
    """Return a batch in host memory with its videos converted to images; a batch without videos is unchanged.

    merge: patches per token, in each direction · image: the placeholder token of an image. `pixel_values`,
    `image_grid_thw`, `input_ids` and `mm_token_type_ids` cover images and steps, in the order of their tokens.
    """
    if "video_grid_thw" not in batch:
        return dict(batch)
    video_grids = batch["video_grid_thw"]
    steps = video_grids.repeat_interleave(video_grids[:, 0], dim=0)
    steps[:, 0] = 1
    kinds, ids = batch["mm_token_type_ids"], batch["input_ids"]
    pixels, grid = batch["pixel_values_videos"], steps
    # The model fills placeholders in text order, so images and steps are sorted by their first tokens.
    if "image_grid_thw" in batch:
        grid = torch.cat([batch["image_grid_thw"], steps])
        first_tokens = [
            _first_tokens(kinds == 1, batch["image_grid_thw"], merge),
            _first_tokens(kinds == VIDEO, steps, merge),
        ]
        order = torch.cat(first_tokens).argsort()
        parts = [*batch["pixel_values"].split(batch["image_grid_thw"].prod(-1).tolist())]
        parts += pixels.split(steps.prod(-1).tolist())
        pixels, grid = torch.cat([parts[n] for n in order.tolist()]), grid[order]
    replaced = ("pixel_values_videos", *VIDEO_INPUTS)
    return {
        **{name: value for name, value in batch.items() if name not in replaced},
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "input_ids": torch.where(kinds == VIDEO, image, ids),
        "mm_token_type_ids": kinds.clamp(max=1),
    }


def _first_tokens(where: Tensor, grid: Tensor, merge: int) -> Tensor:
    """Return the first token of each image or step, counted over the whole batch."""
    counts = grid.prod(-1) // merge**2
    return where.flatten().nonzero().flatten()[counts.cumsum(0) - counts]


def batch_positions(model: PreTrainedModel, batch: Mapping[str, Any]) -> Tensor:
    """Return positions of the tokens of padded rows [B, T] with videos: int64 [3, B, T], from the model's
    ``get_rope_index`` and, in time, from :func:`set_times`."""
    return set_times(model, _stock_positions(model, batch), _kinds(batch), batch)


def why_not_stock_times(model: PreTrainedModel, batch: Mapping[str, Any]) -> str | None:
    """Return why transformers' forward would assign wrong timestamps to the videos of a batch [B, T], or None if it
    does not. Its positions are compared with :func:`batch_positions`, so the check works for every version."""
    if "second_per_grid_ts" not in batch:
        return None
    stock = _stock_positions(model, batch)
    if torch.equal(stock, set_times(model, stock, _kinds(batch), batch)):
        return None
    return (
        f"transformers {transformers.__version__} truncates the seconds of a video's time steps to an integer, and the "
        "model is trained with the exact seconds. Install a version that does not truncate: pip install --upgrade "
        "transformers"
    )


def _stock_positions(model: PreTrainedModel, batch: Mapping[str, Any]) -> Tensor:
    names = ("mm_token_type_ids", "image_grid_thw", *VIDEO_INPUTS, "attention_mask")
    positions, _ = cast(_HasRopeIndex, model.base_model).get_rope_index(
        input_ids=batch["input_ids"], **{name: batch[name] for name in names if name in batch}
    )
    return positions


def _kinds(batch: Mapping[str, Any]) -> Tensor:
    """Return the kinds of tokens [B, T], 0 for padding."""
    kinds: Tensor = batch["mm_token_type_ids"]
    return kinds * batch["attention_mask"].bool() if "attention_mask" in batch else kinds


def set_times(model: PreTrainedModel, positions: Tensor, kinds: Tensor, videos: Mapping[str, Any]) -> Tensor:
    """Return positions [3, B, T] with the times of Qwen2.5-VL's videos; unchanged for other families.

    The token of time step ``k`` is at ``start + floor(k * tokens_per_second * second_per_grid_ts)`` (Qwen2.5-VL,
    arXiv 2502.13923; transformers 5.23 and 5.24). transformers 5.17 truncates the seconds to an integer first, so all
    steps of a video with more than one step per second get the same time.

    kinds: int64 [B, T], 2 for placeholders of videos · videos: the inputs of :data:`VIDEO_INPUTS`
    """
    if "second_per_grid_ts" not in videos:
        return positions
    vision = model.config.vision_config
    rows, columns = (kinds == VIDEO).nonzero(as_tuple=True)
    first = 0
    positions = positions.clone()
    for grid, seconds in zip(videos["video_grid_thw"].tolist(), videos["second_per_grid_ts"], strict=True):
        steps, tokens = grid[0], grid[1] * grid[2] // vision.spatial_merge_size**2
        token_slice = slice(first, first := first + steps * tokens)
        row, column = rows[token_slice], columns[token_slice]
        interval = torch.as_tensor(seconds, dtype=torch.float32) * vision.tokens_per_second
        times = (torch.arange(steps) * interval).long().repeat_interleave(tokens).to(positions.device)
        # the height of a video's first token is the video's start
        positions[0, row, column] = positions[1, row[:1], column[:1]] + times
    return positions
