"""What the tensors of a conversion are made of: bytes as they are, or values in BF16 where that was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from octavo import fp8
from octavo.checkpoint.convert.folder import DTYPES, Entry, Folder, Shard, make_shard, mapped
from octavo.checkpoint.errors import CheckpointError
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
    shards: Iterable[Shard], opens: Opens, quantization: Quantization | None, where: Path
) -> tuple[tuple[Shard, ...], Opens]:
    """The same shards with every floating-point tensor in BF16: FP8 codes times their scales, which then go.

    Raises CheckpointError for codes whose scales are missing or do not fit, naming tensor and file: to cast codes
    without them would be garbage that looks like weights.
    """
    shards = tuple(shards)
    there = {entry.name: entry for shard in shards for entry in shard.entries}
    scale_of: dict[str, Entry] = {}
    gone: set[str] = set()
    for shard in shards:
        for entry in shard.entries:
            if entry.dtype in _CODES:
                scale_of[entry.name] = _scale(entry, there, quantization, where / shard.file)
                gone |= {scale_of[entry.name].name, f"{entry.name.removesuffix('.weight')}.input_scale"}

    def written(entry: Entry) -> tuple[str, str, tuple[int, ...]]:
        return entry.name, "BF16" if entry.dtype in (*_FLOATS, *_CODES) else entry.dtype, entry.shape

    made = tuple(
        make_shard(shard.file, [written(entry) for entry in shard.entries if entry.name not in gone])
        for shard in shards
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
                yield _values(tensor, scale, quantization)

    return tuple(shard for shard in made if shard.entries), opens_bf16


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
    if len(entry.shape) not in (2, 3) or _count(scale.shape) != _count(entry.shape[:-2]) * _count(wanted):
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


def index_of(shards: Iterable[Shard]) -> str:
    """model.safetensors.index.json for these shards."""
    shards = tuple(shards)
    said = {
        "metadata": {"total_size": sum(shard.size for shard in shards)},
        "weight_map": dict(sorted((e.name, shard.file) for shard in shards for e in shard.entries)),
    }
    return json.dumps(said, indent=2) + "\n"
