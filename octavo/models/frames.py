"""To a vision tower a time step of a video is an image: videos of a batch as images, in front of the model.

A step (frames that share a patch) attends to itself alone in the towers of Qwen3-VL and Qwen2.5-VL, its angles are an
image's, and its features replace the embeddings of its tokens, whichever placeholder these are. So a video of t steps
is t images of one step, and a batch of images and videos runs the tower once, as one of images alone: ranks gather
its weights as often as each other, each layer's GEMMs are counted once, and what deals images to ranks deals steps.
Only where tokens stand in time differs; that is worked out in front (:func:`octavo.models.paged.positions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

VIDEO = 2
"""Kind of a token that stands for a video, in `mm_token_type_ids`."""
OF_VIDEOS = ("video_grid_thw", "second_per_grid_ts")
"""What of videos decides where their tokens stand: their sizes in patches, and seconds a step of time."""


def as_images(batch: Mapping[str, Any], merge: int, image: int) -> dict[str, Any]:
    """A batch, in host memory, whose videos have become images; itself where there is none.

    merge: patches of a token, in each direction · image: the token that stands for an image. `pixel_values`,
    `image_grid_thw`, `input_ids` and `mm_token_type_ids` are those of images and steps, in the order of their tokens.
    """
    if "video_grid_thw" not in batch:
        return dict(batch)
    of_videos = batch["video_grid_thw"]
    steps = of_videos.repeat_interleave(of_videos[:, 0], dim=0)
    steps[:, 0] = 1
    kinds, ids = batch["mm_token_type_ids"], batch["input_ids"]
    pixels, grid = batch["pixel_values_videos"], steps
    if "image_grid_thw" in batch:
        grid = torch.cat([batch["image_grid_thw"], steps])
        stand = [_first(kinds == 1, batch["image_grid_thw"], merge), _first(kinds == VIDEO, steps, merge)]
        order = torch.cat(stand).argsort()
        parts = [*batch["pixel_values"].split(batch["image_grid_thw"].prod(-1).tolist())]
        parts += pixels.split(steps.prod(-1).tolist())
        pixels, grid = torch.cat([parts[n] for n in order.tolist()]), grid[order]
    gone = ("pixel_values_videos", *OF_VIDEOS)
    return {
        **{name: value for name, value in batch.items() if name not in gone},
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "input_ids": torch.where(kinds == VIDEO, image, ids),
        "mm_token_type_ids": kinds.clamp(max=1),
    }


def _first(where: Tensor, grid: Tensor, merge: int) -> Tensor:
    """The first token of each image or step, counted over the whole batch."""
    counts = grid.prod(-1) // merge**2
    return where.flatten().nonzero().flatten()[counts.cumsum(0) - counts]


def positions_of_rows(model: PreTrainedModel, batch: Mapping[str, Any]) -> Tensor:
    """Where the tokens of padded rows [B, T] with videos stand: [3, B, T], by the model's own ``get_rope_index``."""
    names = ("mm_token_type_ids", "image_grid_thw", *OF_VIDEOS, "attention_mask")
    found, _ = model.base_model.get_rope_index(
        input_ids=batch["input_ids"], **{name: batch[name] for name in names if name in batch}
    )
    return found  # type: ignore[no-any-return]
