"""The encoding of rows that are packed between ranks: FP8 codes with scales, in the cast that the next layer uses
anyway.

The receiver decodes them to values, and the next layer casts these again. With power-of-two scales, one for each block
of a row, this is exact: code x scale is a BF16 value, and a cast of such values gives the same code x scale (with a
different exponent if the largest value of a block was rounded down). A GEMM therefore gives the same bits as without
the encoding. A GEMM that casts the rows along their columns (wgrad) starts from values that were already rounded once:
its codes are the same, except for values that underflow in one of the two casts. DeepSeek-V3 sends the rows of its
experts this way (arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec, Quantized, dequantize
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.kernels.registry import quantize

WIRE_FORMAT_KEY = "_coding"
"""The key in the __dict__ of an attention module whose output is packed to other ranks as codes: a
:class:`WireFormat`."""


@dataclass(frozen=True)
class WireFormat:
    """The cast in which the rows of a layer's operand are packed to other ranks."""

    spec: CastSpec

    @classmethod
    def for_inputs(cls, recipe: Recipe | None, chunk: int) -> WireFormat | None:
        """Return the format for a layer's input, whose rows are split into chunks of ``chunk`` columns.

        Returns None if codes would not be exact, or if a GEMM needs the values in high precision.
        """
        if recipe is None or recipe.fwd is None or recipe.wgrad is None:
            return None
        return cls._from_cast(recipe.fwd.a, chunk)

    @classmethod
    def for_gradients(cls, recipe: Recipe | None, chunk: int) -> WireFormat | None:
        """Return the format for the gradient of a layer's output, or None as in :meth:`for_inputs`."""
        if recipe is None or recipe.dgrad is None or recipe.wgrad is None:
            return None
        return cls._from_cast(recipe.dgrad.a, chunk)

    @classmethod
    def _from_cast(cls, spec: CastSpec, chunk: int) -> WireFormat | None:
        rows, columns = spec.block
        exact = rows == 1 and columns > 0 and chunk % columns == 0 and spec.scale in ("pow2", "e8m0")
        return cls(spec) if exact else None

    @property
    def bytes_per_value(self) -> float:
        """Bytes per value, including the value's share of a scale."""
        return 1 + (4 if self.spec.scale == "pow2" else 1) / self.spec.block[1]

    def pack(self, rows: Tensor) -> Tensor:
        """Encode rows [R, K] as bytes [R, n]: the codes of a row, then its scales."""
        q = quantize(rows, self.spec)
        return torch.cat([q.data.view(torch.uint8), q.scale.contiguous().view(torch.uint8)], 1)

    def unpack(self, packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Decode bytes [R, n] to values [R, K], where K is ``columns``."""
        codes = packed[:, :columns].contiguous().view(self.spec.fmt.dtype)
        scale_dtype = torch.float32 if self.spec.scale == "pow2" else torch.float8_e8m0fnu
        return dequantize(Quantized(codes, packed[:, columns:].contiguous().view(scale_dtype), self.spec), dtype)
