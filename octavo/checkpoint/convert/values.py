"""The tensors of a conversion: their bytes unchanged, or their values in BF16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from octavo import fp8
from octavo.checkpoint.convert.folder import Folder, map_tensor
from octavo.checkpoint.errors import CheckpointError
from octavo.models.folder.headers import DTYPES, Entry, Header, compose
from octavo.models.folder.quantization import Quantization
from octavo.models.weights.fp8_codes import check_codes, check_ones, decode_scales, pair_scales, scale_grid
from octavo.models.weights.shards import StoredTensor

OpenTensor = Callable[[Entry], AbstractContextManager[Tensor]]


def folder_opener(folder: Folder) -> OpenTensor:
    """Return a function that opens the tensors of a folder's shards, mapped into memory."""
    places = {entry.name: folder.place(shard, entry) for shard in folder.shards for entry in shard.entries}

    def opens(entry: Entry) -> AbstractContextManager[Tensor]:
        return map_tensor(places[entry.name], DTYPES[entry.dtype], entry.shape)

    return opens


def convert_to_bf16(
    shards: Iterable[Header], opens: OpenTensor, quantization: Quantization | None, where: Path
) -> tuple[tuple[Header, ...], OpenTensor]:
    """Return the shards with every floating-point tensor in BF16; FP8 weights are dequantized, and scales left out.

    Raises CheckpointError and ModelError for codes whose scales are missing, damaged or do not fit, naming tensor and
    file: codes cast without their scales would be garbage that looks like weights.
    """
    shards = tuple(shards)
    entries = {entry.name: entry for shard in shards for entry in shard.entries}
    scales = match_codes_and_scales(shards, quantization, where)
    dropped = {scale.name for _, scale in scales.values()}
    dropped |= {f"{name.removesuffix('.weight')}.input_scale" for name in scales}

    def written(entry: Entry) -> tuple[str, str, tuple[int, ...]]:
        return entry.name, "BF16" if DTYPES[entry.dtype].is_floating_point else entry.dtype, entry.shape

    headers = tuple(
        compose(shard.file, [written(entry) for entry in shard.entries if entry.name not in dropped])
        for shard in shards
    )

    @contextmanager
    def opens_bf16(entry: Entry) -> Iterator[Tensor]:
        with opens(entries[entry.name]) as tensor:
            if entry.name not in scales:
                yield tensor.to(DTYPES[entry.dtype])
                return
            assert quantization is not None
            codes, scale = scales[entry.name]
            with opens(entries[scale.name]) as read:
                check_codes(tensor, codes)
                values = decode_scales(read, scale, quantization)
                # Scales of 1 everywhere suggest that the codes were cast without scales.
                if bool((values == 1).all()):
                    check_ones(tensor, scale, codes)
                yield _dequantize(tensor, values, quantization)

    return tuple(shard for shard in headers if shard.entries), opens_bf16


def match_codes_and_scales(
    shards: Iterable[Header], quantization: Quantization | None, where: Path
) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """Return (codes, scales) by the codes' name. Only headers are read.

    Raises ModelError, naming tensor and file, for codes without scales or with scales that do not fit, and for a scale
    without codes; CheckpointError for codes in a layer that config.json lists as not quantized.
    """
    stored = {
        entry.name: StoredTensor(entry.name, where / shard.file, DTYPES[entry.dtype], entry.shape, entry.begin)
        for shard in shards
        for entry in shard.entries
    }
    scaled = {}
    for name, scale in pair_scales(stored.values(), quantization, where).scales.items():
        assert quantization is not None
        scale_grid(scale, stored[name], quantization)
        if not quantization.covers(name.removesuffix(".weight")):
            raise CheckpointError(
                f"{stored[name].file}: {name} is in FP8, but config.json lists that layer as not quantized. Correct "
                "the list, or write the folder again"
            )
        scaled[name] = stored[name], scale
    return scaled


def _dequantize(codes: Tensor, scales: Tensor, quantization: Quantization) -> Tensor:
    """Dequantize codes [N, K] or [E, N, K] with their scales, to BF16."""
    matrices = codes.reshape(-1, *codes.shape[-2:])
    scales = scales.reshape(-1, *quantization.grid(*codes.shape[-2:]))
    out = torch.empty(matrices.shape, dtype=torch.bfloat16)
    for index, (matrix, factor) in enumerate(zip(matrices, scales, strict=True)):
        out[index] = fp8.dequantize(fp8.Quantized(matrix, factor.contiguous(), quantization.spec), torch.bfloat16)
    return out.reshape(codes.shape)
