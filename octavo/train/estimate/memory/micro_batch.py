"""The micro-batch of a forward without values: rows of equal length with real ids, but fake pixels and sounds.

All images have the same size. Their number follows from the tokens of the encoder, and they are spread evenly over the
rows. Whatever a model reads is real: ids, grids, image sizes and the number of images in a row.
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

_KINDS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
"""By what names families ask which tokens are an image's: for positions, two-way attention, experts."""


def micro_batch(model: PreTrainedModel, family: models.Family, tokens: Tokens, mode: FakeTensorMode) -> dict[str, Any]:
    """Return rows of equal length with real ids, fake pixels, and as many images as the encoder's tokens make up."""
    ids = torch.zeros(tokens.rows, tokens.row, dtype=torch.int64)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    patches = tokens.counts.get("image_encoder", 0)
    if family.has_vision and patches and tokens.image:
        batch |= _images(model.config, ids, patches, tokens.image, family.image_token_id, mode)
    if family.has_audio and tokens.sound:
        batch |= _sounds(model.config, ids, tokens.counts["audio_encoder"], family.audio_token_id, mode)
    if family.has_vision:
        of_image = (ids == _placeholder(family.image_token_id)).to(torch.int64)
        batch |= {name: of_image for name in _KINDS if name in inspect.signature(model.forward).parameters}
    return batch


def _placeholder(token: int | None) -> int:
    assert token is not None, "a family with a tower has a placeholder for what the tower encodes"
    return token


def _sounds(config: Any, ids: Tensor, places: int, token: int | None, mode: FakeTensorMode) -> dict[str, Tensor]:
    """Return as many sounds as the encoder's tokens make up, each as long as the rows of ``ids`` allow.

    The tower pads every sound to the longest.
    """
    hearing = models.audio_of(config)
    many = max(1, round(places / hearing.positions))
    each = -(-many // len(ids))  # the number in one row
    length = min(hearing.features, (ids.shape[1] - 1) // each - 1)
    if length < hearing.least:
        raise TrainError(
            f"{places} places of sounds are {each} sounds in a row of {ids.shape[1]} tokens, and each takes "
            f"{hearing.least} or more. Give fewer tokens for audio_encoder, or more for foundation (train.seq_length)"
        )
    placeholder = _placeholder(token)
    for number in range(many):
        row, start = number // each, (number % each) * (length + 1) + 1
        ids[row, start : start + length] = placeholder
    with mode:
        heard = torch.empty((many, hearing.bins, hearing.frames), dtype=torch.float32, device="cpu")
    mask = torch.zeros(many, hearing.frames, dtype=torch.int64)
    mask[:, : hearing.shortest(length)] = 1
    return {"input_features": heard, "feature_attention_mask": mask}


class _Images(NamedTuple):
    """The images of a micro-batch.

    Every row has ``each`` images of ``length`` tokens. ``shape`` is the shape of `pixel_values`, and ``inputs`` are
    further inputs of the tower.
    """

    each: int
    length: int
    shape: tuple[int, ...]
    inputs: dict[str, Tensor]


def _images(
    config: Any, ids: Tensor, patches: int, image: int, token: int | None, mode: FakeTensorMode
) -> dict[str, Tensor]:
    """Spread images evenly over the rows of ``ids``, write their placeholders, and return the inputs of the tower."""
    vision, rows = models.vision_of(config), len(ids)
    if vision.sized:
        layout = _cut_alone(config, vision, patches, rows)
    elif vision.kind == "tiles":
        layout = _tiles(vision, patches, image, rows)
    else:
        layout = _whole(vision, patches, image, rows, ids.shape[1])
    each, length, shape, inputs = layout
    if each * (length + 1) > ids.shape[1]:
        raise TrainError(
            f"{patches} patches of images become {each} x {length} tokens in each of {rows} rows, which have "
            f"{ids.shape[1]} tokens. Give fewer tokens for image_encoder, or more for foundation (train.seq_length)"
        )
    placeholder = _placeholder(token)
    for i in range(each):  # a token of text between two images
        start = i * (length + 1)
        ids[:, start + 1 : start + 1 + length] = placeholder
    with mode:
        pixels = torch.empty(shape, dtype=torch.float32, device="cpu")
    return {"pixel_values": pixels, **inputs}


def _whole(vision: models.Vision, patches: int, image: int, rows: int, length: int) -> _Images:
    """Whole, nearly square images, either in patches or as pixels.

    Their size is rounded up only as far as rows of `length` tokens have room.
    """
    each, merge = max(1, round(patches / image / rows)), vision.merge
    area = patches / (each * rows * merge * merge)
    side = max(1, int((patches / (each * rows)) ** 0.5) // merge)
    other = max(1, round(area / side))
    if side * other > length // each - 1 >= int(area):
        side = max(range(side // 2 + 1, side + 1), key=lambda tall: int(area / tall) * tall)
        other = int(area / side)
    count, (tall, wide) = each * rows, vision.patch
    if vision.kind == "patches":
        grid = torch.tensor([[1, side * merge, other * merge]]).repeat(count, 1)
        features = vision.channels * tall * wide
        return _Images(each, side * other, (int(grid.prod(-1).sum()), features), {"image_grid_thw": grid})
    size = (side * merge * tall, other * merge * wide)
    sizes = torch.tensor([size]).repeat(count, 1)
    return _Images(each, side * other, (count, vision.channels, *size), {"image_sizes": sizes})


def _tiles(vision: models.Vision, patches: int, image: int, rows: int) -> _Images:
    """Tiles, each an image by itself; with several scales, images of the average size."""
    of_one = vision.cells + vision.prefix if not vision.scales else max(vision.cells, image)
    each = max(1, round(patches / of_one / rows))
    frames, count, inputs = 1, 1, {}
    if vision.scales:
        count = vision.features(round(image / vision.cells) * vision.cells) // vision.length or 1
        frames += -(-vision.smaller // count) if of_one > vision.cells * vision.smaller else 0
        inputs = {"image_grid_thw": torch.tensor([[frames, 1, count]]).repeat(each * rows, 1)}
    lead = (each * rows * frames * count, *(1,) * (vision.axes - 4))
    return _Images(each, count * vision.length + vision.ends, (*lead, vision.channels, *vision.tile), inputs)


def _cut_alone(config: Any, vision: models.Vision, patches: int, rows: int) -> _Images:
    """The smallest number of images with this many tiles.

    An image is cut into tiles where it is the only one of its row, or of its sample in a pack. A row with several
    images has one tile for each.
    """
    tiles = max(1, round(patches / vision.cells / rows))
    each, alone = -(-tiles // vision.most), tiles > 1
    size = anyres.closest_grid(config, round(tiles / each)) if alone else vision.tile
    length, count = anyres.count_tokens(config, size, alone), anyres.count_tiles(config, size, alone)
    inputs = {
        "image_sizes": torch.tensor([size]).repeat(each * rows, 1),
        "batch_num_images": torch.full((each * rows,), 1 if alone else 2),
    }
    return _Images(each, length, (each * rows, count, vision.channels, *vision.tile), inputs)
