"""Pairs FP8 codes on disk with their scales by name, and reads and checks the scales.

Some libraries have written codes without scales, scales without codes, scales of a wrong shape, NaN and zero. Each of
these gives a model that runs with wrong results, so they are errors with the names of file and tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.models.errors import ModelError
from octavo.models.folder.quantization import Quantization, is_cache_scale
from octavo.models.weights.name_mapping import Piece
from octavo.models.weights.shards import Shards, StoredTensor

# Fixed scales of activations: Octavo computes the scales of activations from the current tokens.
_UNUSED = (".input_scale", ".output_scale")
_SUFFIXES = ("_scale_inv", "_scale")
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class PairedWeights:
    """The tensors of a folder: `weights` (all tensors except scales), and the scales by the names of their weights."""

    weights: tuple[StoredTensor, ...]
    scales: Mapping[str, StoredTensor]
    notes: tuple[str, ...] = ()


def pair_scales(stored: Iterable[StoredTensor], quantization: Quantization | None, folder: Path) -> PairedWeights:
    """Pair codes with their scales. Raises ModelError for codes without scales, scales without codes, and codes in a
    folder without a quantization_config."""
    # Every tensor is a code with its scale, an unused scale or a weight; anything else is an error.
    by_name = {entry.name: entry for entry in stored}
    codes = [entry for entry in by_name.values() if entry.is_codes]
    if quantization is None:
        if codes:
            raise ModelError(
                f"{folder}: {_describe_first(codes)} has FP8 codes, but config.json has no quantization_config that "
                "describes their scales (transformers' save_pretrained omits it after loading such a folder on a CPU). "
                "Take config.json from the checkpoint that these weights come from."
            )
        cached = [entry for entry in by_name.values() if is_cache_scale(entry.name)]
        weights = tuple(entry for entry in by_name.values() if not is_cache_scale(entry.name))
        return PairedWeights(weights, {}, _unused_note(cached))
    if wrong := [entry for entry in codes if entry.dtype is not torch.float8_e4m3fn]:
        raise ModelError(f"{folder}: {_describe_first(wrong)} has codes in {wrong[0].dtype}; Octavo reads only e4m3.")
    suffix = quantization.scale_suffix
    scales = {c.name: by_name[c.name + suffix] for c in codes if c.name + suffix in by_name}
    if bare := [entry for entry in codes if entry.name not in scales]:
        other = next((s for s in _SUFFIXES if s != suffix and bare[0].name + s in by_name), None)
        hint = f" (there is {bare[0].name}{other}, the name in another method)" if other else ""
        raise ModelError(
            f"{folder}: {_describe_first(bare)} has FP8 codes without scales: {bare[0].name}{suffix} is "
            f"missing{hint}. Codes without scales are not the weight; write the checkpoint again, with scales."
        )
    used = {entry.name for entry in scales.values()}
    fixed = _UNUSED if quantization.activations == "static" and quantization.method == "compressed-tensors" else ()
    unused = [e for e in by_name.values() if e.name.endswith(fixed) or is_cache_scale(e.name)]
    used |= {entry.name for entry in unused}
    rest = tuple(entry for entry in by_name.values() if entry.name not in used)
    if lone := [entry for entry in rest if _weight_name(entry.name) in by_name]:
        base = by_name[_weight_name(lone[0].name)]
        raise ModelError(
            f"{folder}: {_describe_first(lone)} is a scale, but {base} is {base.dtype} and has no FP8 codes. Either "
            "the codes were overwritten by values, or the scale should have been removed; write the checkpoint again."
        )
    if orphans := [entry for entry in rest if entry.name.endswith((".weight_scale_inv", ".weight_scale"))]:
        raise ModelError(
            f"{folder}: {_describe_first(orphans)} is a scale without codes: {_weight_name(orphans[0].name)} is "
            "missing. Write the checkpoint again, or download it again."
        )
    return PairedWeights(rest, scales, _unused_note(unused))


def _unused_note(unused: list[StoredTensor]) -> tuple[str, ...]:
    if not unused:
        return ()
    return (
        f"{len(unused)} fixed scales of activations or of the KV cache are not used (first {unused[0].name}): "
        "Octavo computes the scales of activations from the current tokens",
    )


def _weight_name(name: str) -> str:
    """Return the name of the weight of a scale, or "" if `name` is not a scale."""
    return next((name.removesuffix(s) for s in _SUFFIXES if name.endswith(s)), "")


def _describe_first(entries: list[StoredTensor]) -> str:
    count = f" ({len(entries)} such tensors)" if len(entries) > 1 else ""
    return f"{entries[0]}{count}"


def read_scale(shards: Shards, scale: StoredTensor, piece: Piece, quantization: Quantization) -> Tensor:
    """Read the scales of a piece, fp32 [row blocks, column blocks] in GEMM orientation.

    Raises ModelError for a wrong dtype or shape, for a scale that is NaN, infinite, zero or negative, and for scales
    that are all 1 unless all codes are zero.
    """
    grid = scale_grid(scale, piece.stored, quantization, piece.turned)
    mine = None if piece.at is None else (piece.at, piece.at + 1)
    values = decode_scales(shards.read(scale, mine), scale, quantization)
    values = values.view(grid if mine is not None else (*piece.stored.shape[:-2], *grid))
    if bool((values == 1).all()):
        check_ones(shards.read(piece.stored, mine), scale, piece.stored)
    return values.mT.contiguous() if piece.turned else values


def scale_grid(
    scale: StoredTensor, codes: StoredTensor, quantization: Quantization, turned: bool = False
) -> tuple[int, int]:
    """Return the shape of the scales of a matrix, [row blocks, column blocks]. Raises ModelError if it differs on disk.

    turned: the codes are stored as [K, N]
    """
    if len(codes.shape) not in (2, 3):
        raise ModelError(
            f"{codes} has FP8 codes of shape {list(codes.shape)}; they must be matrices or stacks of matrices."
        )
    rows, columns = codes.shape[-2:]
    grid = quantization.grid(rows, columns)
    if turned and quantization.kind == "row":
        grid = (1, columns)  # one scale for each output channel, which is a column on disk
    front = codes.shape[:-2]
    allowed = {(*front, *grid)}
    if 1 in grid and quantization.kind != "block":
        allowed |= {(*front, max(grid))} if max(grid) > 1 else {front, (*front, 1)}
    if scale.shape not in allowed:
        transposed = " They look transposed." if (*front, *reversed(grid)) == scale.shape else ""
        raise ModelError(
            f"{scale} has shape {list(scale.shape)}; codes {list(codes.shape)} in {quantization} have scales of shape "
            f"{[*front, *grid]}.{transposed} Write the checkpoint again, or check the block size in config.json."
        )
    return grid


def decode_scales(read: Tensor, scale: StoredTensor, quantization: Quantization) -> Tensor:
    """Return scales in fp32. Raises ModelError for an unsupported dtype, and for values that are not finite and above
    0."""
    if scale.dtype is torch.uint8 and quantization.scale_format == "ue8m0":
        read = read.view(torch.float8_e8m0fnu)
    elif scale.dtype not in _SCALES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SCALES)
        raise ModelError(f"{scale} is {scale.dtype}; scales must be {names}. Write the checkpoint again.")
    values = read.float()
    good = torch.isfinite(values) & (values > 0)
    if not bool(good.all()):
        raise ModelError(
            f"{scale} has the scale {values[~good][0].item()}; scales must be finite and above 0. The block was zero "
            "or damaged when it was quantized; write the checkpoint again."
        )
    return values


def check_ones(codes: Tensor, scale: StoredTensor, stored: StoredTensor) -> None:
    """Raise ModelError unless all codes are zero; their scales are all 1."""
    if any(bool((part & 0x7F).any()) for part in codes.reshape(-1).view(torch.uint8).split(1 << 22)):
        raise ModelError(
            f"{scale} is all 1, but {stored} is not zero: the weight was cast without scales, or they were lost. "
            "Write the checkpoint again, with scales."
        )


def check_codes(codes: Tensor, entry: StoredTensor) -> None:
    """Raise ModelError if codes contain NaN (0x7F, 0xFF)."""
    for part in codes.view(torch.uint8).flatten().split(1 << 22):
        if bool(((part & 0x7F) == 0x7F).any()):
            raise ModelError(f"{entry} has a NaN code: the original weight was damaged. Write it again.")


def common_block_rows(
    quantization: Quantization, heights: list[int], turned: bool, scales: Iterable[list[Tensor]]
) -> int:
    """Return the number of rows that share a scale when pieces are concatenated by rows: the height of the format's
    blocks if every piece begins with a new block, else the largest common divisor of the starts; -1 for a single block.

    heights: rows of the pieces; scales: the scales of each slot's pieces, to recognize a single scale for a whole
    tensor.
    """
    height = (
        1 if quantization.kind == "row" else -1 if quantization.kind == "tensor" else quantization.spec.block[turned]
    )
    starts = [sum(heights[:i]) for i in range(1, len(heights))]
    if height == 1 or not starts:
        return height
    if height == -1:
        if all(torch.equal(piece, slot[0]) for slot in scales for piece in slot):
            return -1
        height = sum(heights)
    return math.gcd(height, *starts)


def repeat_scales(scale: Tensor, rows: int, height: int, wanted: int) -> Tensor:
    """Return the scales of a piece of `rows` rows in blocks of `height` rows (-1: all), repeated for blocks of `wanted`
    rows."""
    if wanted in (height, -1):
        return scale
    height = rows if height == -1 else height
    return scale[torch.arange(-(-rows // wanted)) * wanted // height]
