"""Makes the micro-batch of a forward on fake tensors: rows of equal length with real ids, and fake pixels and sounds.

All images have the same size. Their number follows from the tokens of the encoder, and they are spread evenly over the
rows. Inputs whose values a model reads are real: ids, grids, image sizes and the number of images in a row.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo import models
from octavo.models.structure import anyres
from octavo.train.errors import TrainError
from octavo.train.setup.token_counts import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKEN_TYPE_INPUTS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
"""The names of the input that marks image tokens, which families use for positions, two-way attention or experts."""


def make_micro_batch(
    model: PreTrainedModel, family: models.Family, tokens: Tokens, mode: FakeTensorMode
) -> dict[str, Any]:
    """Return rows of equal length with real ids, fake pixels, and as many images as give the encoder's tokens."""
    ids = torch.zeros(tokens.rows, tokens.row, dtype=torch.int64)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    patches = tokens.counts.get("image_encoder", 0)
    if family.has_vision and patches and tokens.image:
        batch |= _add_images(model.config, ids, patches, tokens.image, family.image_token_id, mode)
    if family.has_audio and tokens.sound:
        batch |= _add_sounds(model.config, ids, tokens.counts["audio_encoder"], family.audio_token_id, mode)
    if family.has_vision:
        image_mask = (ids == _placeholder(family.image_token_id)).to(torch.int64)
        batch |= {
            name: image_mask for name in _TOKEN_TYPE_INPUTS if name in inspect.signature(model.forward).parameters
        }
    return batch


def _placeholder(token: int | None) -> int:
    assert token is not None, "a family with a tower has a placeholder token for it"
    return token


def _add_sounds(config: Any, ids: Tensor, places: int, token: int | None, mode: FakeTensorMode) -> dict[str, Tensor]:
    """Write the placeholders of sounds into ``ids``, and return the inputs of the tower.

    The number of sounds follows from the encoder's tokens. Each is as long as the rows allow; the tower pads every
    sound to the longest.
    """
    audio = models.audio_of(config)
    num_sounds = max(1, round(places / audio.positions))
    per_row = -(-num_sounds // len(ids))  # sounds per row
    length = min(audio.features, (ids.shape[1] - 1) // per_row - 1)
    if length < audio.least:
        raise TrainError(
            f"{places} audio_encoder tokens are {per_row} sounds in a row of {ids.shape[1]} tokens, and each sound "
            f"takes at least {audio.least} tokens. Give fewer tokens for audio_encoder, or more for foundation "
            "(train.seq_length)"
        )
    placeholder = _placeholder(token)
    for number in range(num_sounds):
        row, start = number // per_row, (number % per_row) * (length + 1) + 1
        ids[row, start : start + length] = placeholder
    with mode:
        features = torch.empty((num_sounds, audio.bins, audio.frames), dtype=torch.float32, device="cpu")
    mask = torch.zeros(num_sounds, audio.frames, dtype=torch.int64)
    mask[:, : audio.shortest(length)] = 1
    return {"input_features": features, "feature_attention_mask": mask}


class _Images(NamedTuple):
    """The images of a micro-batch.

    Every row has ``per_row`` images of ``length`` tokens. ``shape`` is the shape of `pixel_values`, and ``inputs`` are
    the other inputs of the tower.
    """

    per_row: int
    length: int
    shape: tuple[int, ...]
    inputs: dict[str, Tensor]


def _add_images(
    config: Any, ids: Tensor, patches: int, image: int, token: int | None, mode: FakeTensorMode
) -> dict[str, Tensor]:
    """Write the placeholders of evenly spread images into ``ids``, and return the inputs of the tower."""
    vision, rows = models.vision_of(config), len(ids)
    if vision.sized:
        layout = _anyres_images(config, vision, patches, rows)
    elif vision.kind == "tiles":
        layout = _tile_images(vision, patches, image, rows)
    else:
        layout = _whole_images(vision, patches, image, rows, ids.shape[1])
    per_row, length, shape, inputs = layout
    if per_row * (length + 1) > ids.shape[1]:
        raise TrainError(
            f"{patches} image patches are {per_row} x {length} tokens in each of {rows} rows, which have "
            f"{ids.shape[1]} tokens. Give fewer tokens for image_encoder, or more for foundation (train.seq_length)"
        )
    placeholder = _placeholder(token)
    for i in range(per_row):  # one text token between two images
        start = i * (length + 1)
        ids[:, start + 1 : start + 1 + length] = placeholder
    with mode:
        pixels = torch.empty(shape, dtype=torch.float32, device="cpu")
    return {"pixel_values": pixels, **inputs}


def _whole_images(vision: models.Vision, patches: int, image: int, rows: int, length: int) -> _Images:
    """Return the layout of whole, nearly square images, either in patches or as pixels.

    Their size is rounded up only as far as rows of `length` tokens have room.
    """
    per_row, merge = max(1, round(patches / image / rows)), vision.merge
    area = patches / (per_row * rows * merge * merge)
    side = max(1, int((patches / (per_row * rows)) ** 0.5) // merge)
    other_side = max(1, round(area / side))
    if side * other_side > length // per_row - 1 >= int(area):
        side = max(range(side // 2 + 1, side + 1), key=lambda tall: int(area / tall) * tall)
        other_side = int(area / side)
    count, (tall, wide) = per_row * rows, vision.patch
    if vision.kind == "patches":
        grid = torch.tensor([[1, side * merge, other_side * merge]]).repeat(count, 1)
        features = vision.channels * tall * wide
        return _Images(per_row, side * other_side, (int(grid.prod(-1).sum()), features), {"image_grid_thw": grid})
    size = (side * merge * tall, other_side * merge * wide)
    sizes = torch.tensor([size]).repeat(count, 1)
    return _Images(per_row, side * other_side, (count, vision.channels, *size), {"image_sizes": sizes})


def _tile_images(vision: models.Vision, patches: int, image: int, rows: int) -> _Images:
    """Return the layout of tiles, each a separate image; with several scales, images of the average size."""
    per_image = vision.cells + vision.prefix if not vision.scales else max(vision.cells, image)
    per_row = max(1, round(patches / per_image / rows))
    frames, count, inputs = 1, 1, {}
    if vision.scales:
        count = vision.features(round(image / vision.cells) * vision.cells) // vision.length or 1
        frames += -(-vision.smaller // count) if per_image > vision.cells * vision.smaller else 0
        inputs = {"image_grid_thw": torch.tensor([[frames, 1, count]]).repeat(per_row * rows, 1)}
    leading = (per_row * rows * frames * count, *(1,) * (vision.axes - 4))
    return _Images(per_row, count * vision.length + vision.ends, (*leading, vision.channels, *vision.tile), inputs)


def _anyres_images(config: Any, vision: models.Vision, patches: int, rows: int) -> _Images:
    """Return the layout of the smallest number of images with this many tiles.

    An image is cut into tiles if it is the only image of its row, or of its sample in a pack. A row with several
    images has one tile for each.
    """
    tiles = max(1, round(patches / vision.cells / rows))
    per_row, is_single = -(-tiles // vision.most), tiles > 1
    size = anyres.closest_grid(config, round(tiles / per_row)) if is_single else vision.tile
    length, count = anyres.count_tokens(config, size, is_single), anyres.count_tiles(config, size, is_single)
    inputs = {
        "image_sizes": torch.tensor([size]).repeat(per_row * rows, 1),
        "batch_num_images": torch.full((per_row * rows,), 1 if is_single else 2),
    }
    return _Images(per_row, length, (per_row * rows, count, vision.channels, *vision.tile), inputs)
