"""The 8-bit formats: E4M3 and E5M2 for values, E8M0 for scales.

A code is one byte: sign, exponent, mantissa. With bias b, exponent field e and M mantissa bits m::

    value = (-1)^sign * 2^(e - b) * (1 + m / 2^M)      e > 0
    value = (-1)^sign * 2^(1 - b) * (m / 2^M)          e = 0 (zero and subnormals)

E4M3 (torch's ``float8_e4m3fn``) has no infinity and one NaN per sign (0x7F, 0xFF), so that its range reaches 448.
E5M2 is a truncated FP16: its top exponent holds infinity and NaN. E8M0 is an exponent only, 2^(byte - 127), 0xFF NaN.
Source: OCP 8-bit Floating Point Specification 1.0 and OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NAN_CODE = 0x7F
"""The code of a bad value: NaN in both E4M3 and E5M2."""


@dataclass(frozen=True)
class Format:
    """An FP8 format. ``max`` = 1.75 * 2^``max_exponent`` is the largest finite value in both formats."""

    name: str
    dtype: torch.dtype
    mantissa_bits: int
    bias: int
    max: float
    max_exponent: int
    min_normal: float
    min_subnormal: float
    has_inf: bool


E4M3 = Format("e4m3", torch.float8_e4m3fn, 3, 7, 448.0, 8, 2.0**-6, 2.0**-9, False)
E5M2 = Format("e5m2", torch.float8_e5m2, 2, 15, 57344.0, 15, 2.0**-14, 2.0**-16, True)
FORMATS: dict[str, Format] = {f.name: f for f in (E4M3, E5M2)}
E8M0: torch.dtype = torch.float8_e8m0fnu


def _e4m3_tables() -> tuple[Tensor, Tensor]:
    """Return the values of all bytes [256], and of all pairs of bytes as two fp32 packed in an int64 [65536]."""
    with torch.inference_mode(False):
        single = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8).view(E4M3.dtype).float()
        pair = torch.arange(65536, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.uint8)
        return single, pair.view(E4M3.dtype).float().view(torch.int64)


# torch's CPU cast from E4M3 takes 4 ns per element, longer than the small GEMMs that use the result; looking up two
# codes at a time takes 0.5 ns and is exact by construction, also for NaN.
_E4M3_SINGLE, _E4M3_PAIR = _e4m3_tables()


def decode(codes: Tensor) -> Tensor:
    """Return the exact values of FP8 codes as a new contiguous fp32 tensor of the same shape; NaN stays NaN."""
    # Fake tensors and tensors of a compiler have no values to look up.
    if codes.dtype != E4M3.dtype or codes.device.type != "cpu" or type(codes) is not Tensor:
        return codes.float().contiguous()
    flat = codes.contiguous().view(-1)  # reshape may return a strided view of a single row in a padded buffer
    if flat.numel() % 2 or flat.storage_offset() % 2:
        return _E4M3_SINGLE.index_select(0, flat.view(torch.uint8).to(torch.int32)).view(codes.shape)
    pairs = _E4M3_PAIR.index_select(0, flat.view(torch.uint16).to(torch.int32))
    return pairs.view(torch.float32).view(codes.shape)


def decode_e8m0(scale: Tensor) -> Tensor:
    """Return E8M0 scales as fp32: 2^(byte - 127), and NaN for 0xFF."""
    return scale.float()
