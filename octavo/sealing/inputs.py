"""Seals model inputs: token ids, pixels within their patches, frequency bins of sounds; and the token ids in
configurations: `image_token_id`, `eos_token_id`, lists of suppressed tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.sealing.draw import invert
from octavo.sealing.errors import SealError

_KEYS = re.compile(r"(^|_)(token_ids?|token_index|suppress_tokens|bad_words_ids|force_words_ids)$|^forced_decoder_ids$")


def permute_token_ids(ids: np.ndarray, vocab: np.ndarray, back: bool = False) -> np.ndarray:
    """Convert token ids to the sealed vocabulary (`back`: to the plain one). Negative ids, which are not tokens, and
    ids beyond the embedding table, which are only placeholders of media, are unchanged."""
    to = np.asarray(vocab if back else invert(vocab))
    inside = (ids >= 0) & (ids < len(to))
    return np.where(inside, to[np.where(inside, ids, 0)], ids)


def permute_pixels(values: np.ndarray, order: np.ndarray, patch: tuple[int, int]) -> np.ndarray:
    """Permute the values of each patch of pixels.

    values  [patches, features], or [..., C, H, W], where pixels at the right and bottom outside all patches become zero
    order   of the features of a patch, C x (frames) x height x width
    """
    if values.ndim == 2:
        if values.shape[1] != len(order):
            raise SealError(f"patches have {values.shape[1]} values, but the model's embedding takes {len(order)}")
        return np.ascontiguousarray(values[:, order])
    (patch_height, patch_width), (channels, height, width) = patch, values.shape[-3:]
    rows, columns = height // patch_height, width // patch_width
    if channels * patch_height * patch_width != len(order):
        raise SealError(
            f"{channels} channels of {patch_height} x {patch_width} patches, but the embedding takes {len(order)} "
            "values"
        )
    lead = values.shape[:-3]
    cut = values[..., : rows * patch_height, : columns * patch_width]
    cells = cut.reshape(*lead, channels, rows, patch_height, columns, patch_width)
    cells = np.moveaxis(cells, (-4, -2), (-5, -4))  # [..., rows, columns, C, patch_height, patch_width]
    moved = cells.reshape(*lead, rows, columns, -1)[..., order].reshape(cells.shape)
    out = np.zeros_like(values)
    back = np.moveaxis(moved, (-5, -4), (-4, -2))
    out[..., : rows * patch_height, : columns * patch_width] = back.reshape(cut.shape)
    return out


def permute_bins(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Permute the bins of [sounds, bins, frames]."""
    return np.ascontiguousarray(values[:, order])


def seal_batch(
    inputs: Mapping[str, Any], orders: Mapping[str, np.ndarray], patch: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Return the outputs of a processor, sealed, as arrays by name."""
    out = {name: np.asarray(values) for name, values in inputs.items()}
    for name in ("input_ids", "labels"):
        if name in out:
            out[name] = permute_token_ids(out[name], orders["vocab"])
    if "pixel_values" in out:
        out["pixel_values"] = permute_pixels(out["pixel_values"], orders["patch"], patch)
    if "input_features" in out:
        out["input_features"] = permute_bins(out["input_features"], orders["bins"])
    return out


def replace_token_ids(raw: Any, vocab: np.ndarray, back: bool = False, key: str = "") -> Any:
    """Return the JSON of a configuration with its token ids in the sealed vocabulary."""
    if isinstance(raw, dict):
        return {name: replace_token_ids(value, vocab, back, str(name)) for name, value in raw.items()}
    if isinstance(raw, list):
        return [replace_token_ids(value, vocab, back, key) for value in raw]
    if _KEYS.search(key) and type(raw) is int:
        return int(permute_token_ids(np.asarray([raw]), vocab, back)[0])
    return raw


def find_token_ids(raw: Any, key: str = "") -> set[int]:
    """Return the token ids in a configuration."""
    if isinstance(raw, dict):
        return set().union(*(find_token_ids(value, str(name)) for name, value in raw.items()))
    if isinstance(raw, list):
        return set().union(*(find_token_ids(value, key) for value in raw))
    return {raw} if _KEYS.search(key) and type(raw) is int and raw >= 0 else set()
