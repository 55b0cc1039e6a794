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
from octavo.models.folder.headers import DTYPES, Entry, Header, compose
from octavo.models.folder.quantization import Quantization
from octavo.models.weights.fp8_codes import check_codes, check_ones, grid_of, pair, scale_values
from octavo.models.weights.shards import Stored

Opens = Callable[[Entry], AbstractContextManager[Tensor]]


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

    Raises CheckpointError and ModelError for codes whose scales are missing, damaged or do not fit, naming tensor and
    file: to cast codes without them would be garbage that looks like weights.
    """
    shards = tuple(shards)
    there = {entry.name: entry for shard in shards for entry in shard.entries}
    scales = scales_of(shards, quantization, where)
    gone = {scale.name for _, scale in scales.values()}
    gone |= {f"{name.removesuffix('.weight')}.input_scale" for name in scales}

    def written(entry: Entry) -> tuple[str, str, tuple[int, ...]]:
        return entry.name, "BF16" if DTYPES[entry.dtype].is_floating_point else entry.dtype, entry.shape

    made = tuple(
        compose(shard.file, [written(entry) for entry in shard.entries if entry.name not in gone]) for shard in shards
    )

    @contextmanager
    def opens_bf16(entry: Entry) -> Iterator[Tensor]:
        with opens(there[entry.name]) as tensor:
            if entry.name not in scales:
                yield tensor.to(DTYPES[entry.dtype])
                return
            assert quantization is not None
            codes, scale = scales[entry.name]
            with opens(there[scale.name]) as read:
                check_codes(tensor, codes)
                values = scale_values(read, scale, quantization)
                if bool((values == 1).all()):
                    check_ones(tensor, scale, codes)
                yield _decoded(tensor, values, quantization)

    return tuple(shard for shard in made if shard.entries), opens_bf16


def scales_of(
    shards: Iterable[Header], quantization: Quantization | None, where: Path
) -> dict[str, tuple[Stored, Stored]]:
    """Codes and their scales, by the codes' name; from headers alone.

    Raises ModelError, naming tensor and file, where codes have no scales or scales that do not fit, and where a scale
    stands beside no codes; CheckpointError where the skip list of config.json says that codes are values.
    """
    stored = {
        entry.name: Stored(entry.name, where / shard.file, DTYPES[entry.dtype], entry.shape, entry.begin)
        for shard in shards
        for entry in shard.entries
    }
    found = {}
    for name, scale in pair(stored.values(), quantization, where).scales.items():
        assert quantization is not None
        grid_of(scale, stored[name], quantization)
        if not quantization.covers(name.removesuffix(".weight")):
            raise CheckpointError(
                f"{stored[name].file}: {name} is in FP8, and by config.json that layer is not quantized. Correct the "
                "list, or make the folder again"
            )
        found[name] = stored[name], scale
    return found


def _decoded(codes: Tensor, scales: Tensor, quantization: Quantization) -> Tensor:
    """codes [N, K] or [E, N, K] times their scales, in BF16."""
    matrices = codes.reshape(-1, *codes.shape[-2:])
    scales = scales.reshape(-1, *quantization.grid(*codes.shape[-2:]))
    out = torch.empty(matrices.shape, dtype=torch.bfloat16)
    for one, (matrix, factor) in enumerate(zip(matrices, scales, strict=True)):
        out[one] = fp8.dequantize(fp8.Quantized(matrix, factor.contiguous(), quantization.spec), torch.bfloat16)
    return out.reshape(codes.shape)
