"""What the tensors of a conversion are made of: bytes as they are, or values in BF16 where that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from octavo import fp8
from octavo.checkpoint.convert.folder import Folder, mapped
from octavo.checkpoint.errors import CheckpointError
from octavo.models.headers import DTYPES, Entry, Header, compose
from octavo.models.quantization import Quantization

Opens = Callable[[Entry], AbstractContextManager[Tensor]]
_FLOATS = ("F64", "F32", "F16", "BF16")
_CODES = ("F8_E4M3", "F8_E5M2")


def of_folder(folder: Folder) -> Opens:
    """The tensors of a folder's shards, their bytes mapped."""
    places = {entry.name: folder.place(shard, entry) for shard in folder.shards for entry in shard.entries}

    def opens(entry: Entry) -> AbstractContextManager[Tensor]:
        return mapped(places[entry.name], DTYPES[entry.dtype], entry.shape)

    return opens


def in_bf16(
    shards: Iterable[Header], opens: Opens, quantization: Quantization | None, where: Path
) -> tuple[tuple[Header, ...], Opens]:
    """The same shards with every floating-point tensor in BF16: FP8 codes times their scales, which then go.

    Raises CheckpointError for codes whose scales are missing or do not fit, naming tensor and file: to cast codes
    without them would be garbage that looks like weights.
    """
    shards = tuple(shards)
    there = {entry.name: entry for shard in shards for entry in shard.entries}
    file_of = {entry.name: where / shard.file for shard in shards for entry in shard.entries}
    scale_of = scales_of(shards, quantization, where)
    gone = {scale.name for scale in scale_of.values()}
    gone |= {f"{name.removesuffix('.weight')}.input_scale" for name in scale_of}

    def written(entry: Entry) -> tuple[str, str, tuple[int, ...]]:
        return entry.name, "BF16" if entry.dtype in (*_FLOATS, *_CODES) else entry.dtype, entry.shape

    made = tuple(
        compose(shard.file, [written(entry) for entry in shard.entries if entry.name not in gone]) for shard in shards
    )

    @contextmanager
    def opens_bf16(entry: Entry) -> Iterator[Tensor]:
        source = there[entry.name]
        with opens(source) as tensor:
            if entry.name not in scale_of:
                yield tensor.to(DTYPES[entry.dtype])
                return
            assert quantization is not None
            with opens(scale_of[entry.name]) as scale:
                why = _damaged(tensor, scale)
                if why is not None:
                    raise CheckpointError(
                        f"{file_of[entry.name]}: {entry.name} {why}; it has no values to write. Make the folder again"
                    )
                yield _values(tensor, scale, quantization)

    return tuple(shard for shard in made if shard.entries), opens_bf16


def scales_of(shards: Iterable[Header], quantization: Quantization | None, where: Path) -> dict[str, Entry]:
    """The scale of every tensor of codes, by the codes' name; from headers alone.

    Raises CheckpointError, naming tensor and file, where codes have no scales or scales that do not fit, where the skip
    list of config.json says that they are values, and where a scale stands beside no codes.
    """
    shards = tuple(shards)
    there = {entry.name: entry for shard in shards for entry in shard.entries}
    found: dict[str, Entry] = {}
    for shard in shards:
        for entry in shard.entries:
            if entry.dtype not in _CODES:
                continue
            found[entry.name] = _scale(entry, there, quantization, where / shard.file)
            if quantization is not None and not quantization.covers(entry.name.removesuffix(".weight")):
                raise CheckpointError(
                    f"{where / shard.file}: {entry.name} is in FP8, and by config.json that layer is not quantized. "
                    "Correct the list, or make the folder again"
                )
    used = {scale.name for scale in found.values()}
    for shard in shards if quantization is not None else ():
        for entry in shard.entries:
            if entry.name.endswith((".weight_scale_inv", ".weight_scale")) and entry.name not in used:
                weight = there.get(entry.name.rpartition("_scale")[0])
                holds = "and there is no such weight" if weight is None else f"which is in {weight.dtype} and no codes"
                raise CheckpointError(
                    f"{where / shard.file}: {entry.name} scales {entry.name.rpartition('_scale')[0]}, {holds}. Make "
                    "the folder again"
                )
    return found


def _damaged(codes: Tensor, scale: Tensor) -> str | None:
    """What is wrong with codes and scales that fit each other by shape."""
    scales = scale.float()
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        return f"has the scale {scales[~(torch.isfinite(scales) & (scales > 0))][0].item()}"
    parts = codes.reshape(-1).view(torch.uint8).split(1 << 22)
    if any(bool(((part & 0x7F) == 0x7F).any()) for part in parts):
        return "holds the code of NaN"
    if bool((scales == 1).all()) and any(bool((part & 0x7F).any()) for part in parts):
        return "has no scale but 1, as if it had been cast without scales"
    return None


def _scale(entry: Entry, there: dict[str, Entry], quantization: Quantization | None, file: Path) -> Entry:
    if entry.dtype != "F8_E4M3":
        raise CheckpointError(f"{file}: {entry.name} is in {entry.dtype}; Octavo reads weights in F8_E4M3")
    if quantization is None:
        raise CheckpointError(
            f"{file}: {entry.name} is in FP8, and config.json has no quantization_config that says how to scale it. "
            "Take config.json from where the model came"
        )
    scale = there.get(entry.name + quantization.scale_suffix)
    if scale is None:
        raise CheckpointError(
            f"{file}: {entry.name} is in FP8 and has no {entry.name + quantization.scale_suffix} beside it: its values "
            "are lost. Download the folder again"
        )
    matrix = entry.shape[-2:]
    wanted = quantization.grid(*matrix) if len(matrix) == 2 else ()
    turned = scale.shape == tuple(reversed(wanted)) != wanted and len(entry.shape) == 2
    blocks = quantization.kind == "block" and scale.shape != (*entry.shape[:-2], *wanted)
    count = _count(entry.shape[:-2]) * _count(wanted)
    if len(entry.shape) not in (2, 3) or turned or blocks or _count(scale.shape) != count:
        raise CheckpointError(
            f"{file}: {entry.name} {list(entry.shape)} has scales of shape {list(scale.shape)}; "
            f"{quantization} wants {list(wanted)} a matrix"
        )
    return scale


def _count(shape: Iterable[int]) -> int:
    return torch.Size(tuple(shape)).numel()


def _values(codes: Tensor, scale: Tensor, quantization: Quantization) -> Tensor:
    """codes [N, K] or [E, N, K] times their scales, in BF16."""
    grid = quantization.grid(*codes.shape[-2:])
    matrices = codes.reshape(-1, *codes.shape[-2:])
    scales = scale.to(torch.float32).reshape(-1, *grid)
    out = torch.empty(matrices.shape, dtype=torch.bfloat16)
    for one, (matrix, factor) in enumerate(zip(matrices, scales, strict=True)):
        out[one] = fp8.dequantize(fp8.Quantized(matrix, factor.contiguous(), quantization.spec), torch.bfloat16)
    return out.reshape(codes.shape)
