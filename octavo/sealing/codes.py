"""Seals FP8 weights as stored: codes are permuted like their weights, and scales with their blocks.

This is exact because permutations exchange whole blocks, or positions within one block (:mod:`octavo.sealing.draw`). So
nothing is cast, and `unseal` restores the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo import fp8, models
from octavo.checkpoint.export.names import Matrices, Matrix
from octavo.checkpoint.export.values import regrid, select_matrix
from octavo.models.folder.quantization import Quantization, read_quantization
from octavo.models.weights.shards import open_weights
from octavo.sealing.errors import SealError
from octavo.sealing.permute import Layout, Orders
from octavo.sealing.structure import UNCONSTRAINED, Structure

Permute = Callable[..., Tensor]
_HOW_TO_REQUANTIZE = (
    "Seal its values (`octavo export DIR VALUES --format bf16`): model.load_in_fp8 quantizes them again, in the blocks "
    "of the plain model"
)


@dataclass(frozen=True)
class Fp8Weights:
    """The FP8 weights of a folder.

    matrices  parameter -> its tensors on disk
    scales    name of a weight's scales -> dtype and shape
    """

    matrices: Mapping[str, tuple[Matrix, ...]]
    scales: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    quantization: Quantization | None = None

    def tensors(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Yield (name, dtype, shape) of their tensors on disk."""
        for m in (m for pieces in self.matrices.values() for m in pieces):
            yield m.name, torch.float8_e4m3fn, m.shape
            yield _scale_name(m, self.quantization), *self.scales[_scale_name(m, self.quantization)]

    def permute(
        self, name: str, value: fp8.Quantized, layout: Layout, orders: Orders, move: Permute, transposed: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name on disk, tensor) of permuted codes [N, K] or [E, N, K] and their scales. `transposed`: the layout
        is of a parameter that is stored as [E, K, N]."""
        assert self.quantization is not None
        if transposed:
            layout = Layout(layout.axes, each=tuple(axes[::-1] for axes in layout.each))
        height, width = value.spec.block
        data = move(value.data.view(torch.uint8), layout, orders).view(value.data.dtype)
        rows = value.scale.repeat_interleave(data.shape[-2] if height == -1 else height, -2)[..., : data.shape[-2], :]
        try:
            scale = move(rows, layout, orders, width)
        except SealError as error:
            raise SealError(f"{name}: {error}. {_HOW_TO_REQUANTIZE}") from error
        whole = fp8.Quantized(data, scale, fp8.CastSpec(value.spec.format, (1, width), "fp32"))
        for m in self.matrices[name]:
            _, codes = select_matrix(whole, m.slot, m.rows, False)
            regridded = regrid(codes, self.quantization.spec)
            if regridded is None:
                raise SealError(f"{m.name} would be permuted across the blocks of its scales. {_HOW_TO_REQUANTIZE}")
            dtype, shape = self.scales[_scale_name(m, self.quantization)]
            yield m.name, regridded.data
            yield _scale_name(m, self.quantization), regridded.scale.to(dtype).reshape(shape)


def find_fp8_weights(folder: Path, stock: Matrices, axes: Structure) -> Fp8Weights:
    """Return the FP8 weights of a folder, from headers only. Raises SealError for codes that cannot be permuted with
    their scales, naming the tensor."""
    quantization = read_quantization(folder)
    if quantization is None:
        return Fp8Weights({}, {})
    if quantization.activations == "static" or quantization.scale_format != "float":
        kind = "scales of one byte" if quantization.scale_format != "float" else "fixed scales of activations"
        raise SealError(f"{folder} is in FP8 with {kind}, which sealing does not support. {_HOW_TO_REQUANTIZE}")
    with open_weights(folder, True)[0] as shards:
        stored = dict(shards.stored)
    names = {name for name, tensor in stored.items() if tensor.is_codes}
    matrices: dict[str, tuple[Matrix, ...]] = {}
    for row in fp8.describe_layers(stock.model, models.describe(stock.model).components):
        pieces = () if f"{row.name}.weight" in stock.tied else stock.matrices(row)[1]
        if pieces and {m.name for m in pieces} <= names:
            matrices[pieces[0].parameter] = pieces
    if unsupported := sorted(names - {m.name for pieces in matrices.values() for m in pieces}):
        raise SealError(
            f"{unsupported[0]} is in FP8, in a layout on disk that sealing does not support. {_HOW_TO_REQUANTIZE}"
        )
    scales = [_scale_name(m, quantization) for pieces in matrices.values() for m in pieces]
    if absent := next((name for name in scales if name not in stored), None):
        raise SealError(
            f"{folder} has no {absent}, the scales of codes; octavo verify {folder} reports further problems"
        )
    # A permutation that crosses blocks would need new scales, and so new codes.
    for parameter, pieces in matrices.items():
        if quantization.block is not None and {s.name for a in axes.layouts[parameter].axes for s in a} & set(
            UNCONSTRAINED
        ):
            raise SealError(
                f"{pieces[0].name} is in FP8, but tokens are permuted across its blocks. {_HOW_TO_REQUANTIZE}"
            )
    return Fp8Weights(matrices, {name: (stored[name].dtype, stored[name].shape) for name in scales}, quantization)


def _scale_name(m: Matrix, quantization: Quantization | None) -> str:
    assert quantization is not None
    return m.name + quantization.scale_suffix
