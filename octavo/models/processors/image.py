"""Checks that the image processor of a model folder agrees with config.json, and limits of image sizes.

The record of a family (:mod:`octavo.base.model_families`) defines how its images are cut; the processors are in
:mod:`octavo.models.processors.stock`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.models.errors import ForeignTokenizerError, ModelError
from octavo.models.folder.folder import find_file, read_json, wrap_errors
from octavo.models.folder.processor_base import ProcessorTraits
from octavo.models.structure.skeleton import stock_config
from octavo.models.structure.vision_shapes import vision_of

_MAX_TOKENS = 1 << 16  # limit of tokens of a small image, in addition to the decoder's number of positions
#: name of a size in Qwen's vision configuration -> its name in the image processor
_SIZE_NAMES = {
    "patch_size": "patch_size",
    "spatial_merge_size": "merge_size",
    "temporal_patch_size": "temporal_patch_size",
}


def settings_file(folder: Path) -> Path:
    """Return the file from which transformers takes the settings of the image processor."""
    whole = find_file(folder, "processor_config.json")
    if whole.exists() and "image_processor" in read_json(whole):
        return whole
    return find_file(folder, "preprocessor_config.json")


def check_small_image(
    folder: Path, raw: Mapping[str, Any], image_processor: Any, batch: Mapping[str, Any], image_cut: str
) -> None:
    """Raise ModelError if a small image, processed to `batch`, has more tokens than the model has positions, or another
    size than the only tile that the vision tower takes."""
    file = settings_file(folder)
    if image_cut == "one_tile":
        size, tile = tuple(np.asarray(batch["pixel_values"]).shape[-2:]), vision_of(stock_config(folder)).tile
        if size != tile:
            sizes = [f"{tall} x {wide}" for tall, wide in (size, tile)]
            raise ModelError(
                f"{file} makes images of {sizes[0]} pixels, but the vision tower of config.json takes {sizes[1]}. Copy "
                "both files from one model."
            )
    if "image_grid_thw" in batch:
        tokens = int(torch.as_tensor(batch["image_grid_thw"][0]).prod()) // image_processor.merge_size**2
        text = raw.get("text_config")
        positions = text.get("max_position_embeddings", _MAX_TOKENS) if isinstance(text, dict) else _MAX_TOKENS
        if tokens > min(positions, _MAX_TOKENS):
            raise ModelError(
                f"{file} makes {tokens} tokens of an image of 64 x 64 pixels, and {min(positions, _MAX_TOKENS)} are "
                "the most here. Correct its sizes (min_pixels, size)."
            )


def check_agreement(folder: Path, raw: Mapping[str, Any], processor: Any, image_cut: str) -> None:
    """Raise ModelError, naming both files, unless images are cut for the vision encoder of config.json and have the
    placeholders that it expects. Only values that are in both files are compared."""
    image, file, vision = processor.image_processor, "preprocessor_config.json", raw.get("vision_config") or {}
    check_media_ids(folder, raw, processor)
    stated: list[tuple[str, Any, str, Any]] = []
    if image_cut in _AREA_LIMITS:
        video = folder / "video_preprocessor_config.json"
        of_video = read_json(video) if video.exists() else {}
        for config_value, processor_value in _SIZE_NAMES.items():
            stated += [
                (config_value, vision.get(config_value), file, getattr(image, processor_value)),
                (config_value, vision.get(config_value), video.name, of_video.get(processor_value)),
            ]
    elif all(key in vision for key in ("patch_size", "image_size")) and "downsample_ratio" in raw:
        with wrap_errors(f"{folder}/config.json: the tokens of a tile cannot be counted"):
            tall, wide = vision["patch_size"] if isinstance(vision["patch_size"], list) else [vision["patch_size"]] * 2
            ratio = raw["downsample_ratio"]
            tokens = int(image.size["height"] // tall * ratio) * int(image.size["width"] // wide * ratio)
        stated.append(("image_seq_length by its sizes", tokens, "processor_config.json", processor.image_seq_length))
    for key, config_value, name, processor_value in stated:
        if None not in (config_value, processor_value) and config_value != processor_value:
            raise ModelError(
                f"{folder}: {key} is {config_value!r:.80} in config.json but {processor_value!r:.80} in {name}: the "
                "model could not use its images. Copy both files from one model."
            )


#: keys of config.json for the tokens that features of images and videos replace
_MEDIA_ID_KEYS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


def check_media_ids(folder: Path, raw: Mapping[str, Any], processor: Any) -> None:
    """Raise ModelError, naming the key and both ids, unless config.json has the tokenizer's ids for the tokens of
    media. Missing keys have the defaults of the model's class, which are the ids of one published vocabulary. With a
    wrong id a model ignores its images without an error.
    """
    config = stock_config(folder).to_dict()
    for key in _MEDIA_ID_KEYS:
        config_value, processor_value = config.get(key), _token_id(processor, key)
        if config_value is None or processor_value in (None, config_value):
            continue
        if raw.get(key) is None:
            raise ForeignTokenizerError(
                f"{folder}: config.json has no {key}; the default of the model's class is {config_value}, but the "
                f"tokenizer has {processor_value}: the model could not find its images. Add the key to config.json."
            )
        raise ForeignTokenizerError(
            f"{folder}: {key} is {config_value!r:.80} in config.json but {processor_value!r:.80} in "
            "tokenizer_config.json: the model could not use its images. Copy both files from one model."
        )


def _token_id(processor: Any, key: str) -> int | None:
    """Return the tokenizer's id of the token of a key of config.json, or None if it is unknown."""
    if key.startswith("image"):
        return getattr(processor, "feature_id", processor.image_token_id)
    text = getattr(processor, "video_token", None)
    return processor.tokenizer.get_vocab().get(text) if isinstance(text, str) else None


def computed_options(folder: Path, processor_class: type) -> dict[str, Any]:
    """Return the arguments of `processor_class` other than image processor and tokenizer, computed from config.json.
    Raises ModelError if processor_config.json contradicts them."""
    if not issubclass(processor_class, ProcessorTraits):
        return {}
    config = stock_config(folder)
    with wrap_errors(f"{folder}/config.json: the options of its processor cannot be computed"):
        wanted = processor_class.options(config)
    file = folder / "processor_config.json"
    _require(folder, file.name, wanted, read_json(file) if file.exists() else {})
    return wanted


def check_image_options(folder: Path, processor_class: type, image_processor: Any) -> None:
    """Raise ModelError unless the image sizes that the model also uses agree with config.json."""
    if issubclass(processor_class, ProcessorTraits):
        wanted = processor_class.image_options(stock_config(folder))
        stated = {key: getattr(image_processor, key, None) for key in wanted}
        stated = {key: dict(value) if isinstance(value, Mapping) else value for key, value in stated.items()}
        _require(folder, "preprocessor_config.json", wanted, stated)


def _require(folder: Path, name: str, wanted: Mapping[str, Any], stated: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if stated.get(key, value) != value:
            raise ModelError(
                f"{folder}/{name} has {key} {stated[key]!r:.80}, but config.json requires {value!r:.80}: the model "
                "could not use its images. Copy both files from one model."
            )


def set_size_limits(image_processor: Any, image_cut: str, limits: Mapping[str, int]) -> None:
    """Limit the size of each image to `min_pixels` and `max_pixels` of `limits`, as described in `load_processor`.
    Raises ModelError for invalid limits."""
    if not limits:
        return
    low, high = limits.get("min_pixels"), limits.get("max_pixels")
    if low is not None and high is not None and low > high:
        raise ModelError(f"min_pixels {low} is larger than max_pixels {high}. Swap them or remove one.")
    by_edge = image_cut in _EDGE_UNITS
    # No image can be smaller than `unit`, the pixels of one token or tile.
    if image_cut in _AREA_LIMITS:
        unit, unit_name, apply = (
            (image_processor.patch_size * image_processor.merge_size) ** 2,
            "token",
            _AREA_LIMITS[image_cut],
        )
    elif image_cut in _TILE_CUTS:
        unit, unit_name, apply = image_processor.size["height"] * image_processor.size["width"], "tile", _limit_tiles
    elif by_edge and low is None:
        unit, unit_name, apply = _EDGE_UNITS[image_cut](image_processor) ** 2, "token or tile", _limit_edge
    else:
        why = "has a fixed rule for enlarging images" if by_edge else "resizes images to one of fixed sizes"
        raise ModelError(
            f"{' and '.join(limits)} cannot be applied to {type(image_processor).__name__}: this family {why}. "
            "Remove it."
        )
    for key, value in limits.items():
        if value < unit:
            raise ModelError(f"{key} {value} is smaller than one {unit_name} of this model. Use at least {unit}.")
    apply(image_processor, low, high, unit)


def _limit_area(image_processor: Any, low: int | None, high: int | None, unit: int) -> None:
    size = dict(image_processor.size)
    if high is not None:
        size |= {"longest_edge": high, "shortest_edge": min(size["shortest_edge"], high)}
    if low is not None:
        size |= {"shortest_edge": low, "longest_edge": max(size["longest_edge"], low)}
    image_processor.size = type(image_processor.size)(**size)


def _limit_area_of_frames(image_processor: Any, low: int | None, high: int | None, unit: int) -> None:
    frames = image_processor.temporal_patch_size
    low, high = (None if area is None else area * frames for area in (low, high))
    _limit_area(image_processor, low, high, unit)


def _limit_tiles(image_processor: Any, low: int | None, high: int | None, unit: int) -> None:
    if high is not None:
        image_processor.max_patches = high // unit
        image_processor.min_patches = min(image_processor.min_patches, image_processor.max_patches)
    if low is not None:
        image_processor.min_patches = -(-low // unit)
        image_processor.max_patches = max(image_processor.max_patches, image_processor.min_patches)


def _limit_edge(image_processor: Any, low: int | None, high: int | None, unit: int) -> None:
    assert high is not None
    side = math.isqrt(unit)
    longest = min(math.isqrt(high) // side * side, image_processor.size["longest_edge"])
    image_processor.size = type(image_processor.size)(longest_edge=longest)


def _patch_edge(image_processor: Any) -> int:
    patch = image_processor.patch_size
    return patch if isinstance(patch, int) else patch["height"]


_AREA_LIMITS = {"patches": _limit_area, "paired_patches": _limit_area_of_frames}
"""Cuts with a limited area, rounded to whole tokens -> the function that sets the limit."""
_TILE_CUTS = ("shuffled_tiles", "scaled_tiles")
"""Cuts with a limited number of tiles."""
_EDGE_UNITS = {
    "whole": _patch_edge,
    "stacked_tiles": lambda image_processor: image_processor.max_image_size["longest_edge"],
}
"""Cuts with a limited longest edge -> pixels of a patch or tile, in each direction."""
