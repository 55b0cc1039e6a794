"""Frozen FP8 weights: codes and scales and nothing else, one byte a parameter.

What LoRA trains beside, and what an FP8 checkpoint holds. A frozen weight is an
:class:`~octavo.fp8.param_tensor.Fp8Weight` that is made of codes for good: it has the shape and the dtype of the values
it stands for, asks for no gradient, and keeps its codes as they came, bit for bit. GEMMs multiply by the codes; whoever
asks for values gets ``code * scale``, dequantized for as long as that takes. So a stock ``nn.Linear`` that holds one
computes in high precision, and :func:`octavo.fp8.apply` makes it an FP8 layer like any other.

=======  ==============  ==========  ==========================================================
kind     block of a cast recipe      scales of a weight [N, K]
=======  ==============  ==========  ==========================================================
row      (1, -1)         rowwise     [N, 1], one a row (output channel)
block    (128, 128)      blockwise   [ceil(N / 128), ceil(K / 128)], the layout of DeepSeek's checkpoints
tensor   (-1, -1)        tensorwise  [1, 1]
=======  ==============  ==========  ==========================================================

Experts are [E, N, K] with a dimension E in front of their scales. Scales are dequant multipliers, value = code * scale.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from octavo.fp8.cast import CastSpec, Quantized
from octavo.fp8.kernels.layout import grid_of
from octavo.fp8.kernels.registry import get
from octavo.fp8.param_rows import Need
from octavo.fp8.param_tensor import Fp8Weight, Gathered, Source
from octavo.fp8.weights import local_of

__all__ = [
    "FROZEN",
    "codes_of_frozen",
    "fingerprint",
    "freeze_weight",
    "frozen",
    "frozen_weights",
    "is_frozen",
    "thaw",
]

FROZEN = {
    "row": CastSpec("e4m3", (1, -1), "pow2"),
    "block": CastSpec("e4m3", (128, 128), "pow2"),
    "tensor": CastSpec("e4m3", (-1, -1), "fp32"),
}


def frozen(
    codes: Tensor, scale: Tensor, spec: CastSpec, dtype: torch.dtype = torch.bfloat16, transposed: bool = False
) -> nn.Parameter:
    """A frozen weight of codes that exist already; they are taken as they are.

    Args:
        codes: float8_e4m3fn, [N, K], or [E, N, K] for experts: as their GEMM multiplies by them.
        scale: fp32 dequant multipliers, a cell for each block of ``spec``: [n, k] or [E, n, k].
        spec: the cast that made them, of which the block counts; :data:`FROZEN` has the usual ones.
        dtype: of the values that the weight shows.
        transposed: the parameter is stored as [E, K, N] in the module (experts of some families).

    Raises:
        ValueError: another dtype, or a grid of scales that does not belong to this shape and block.
    """
    if codes.dtype is not spec.fmt.dtype or codes.dim() not in (2, 3):
        raise ValueError(
            f"A frozen weight takes codes of {spec.fmt.dtype} with two or three dimensions; found {codes.dtype} of "
            f"shape {list(codes.shape)}."
        )
    wanted = (*codes.shape[:-2], *grid_of(codes.shape[-2], codes.shape[-1], spec))
    if tuple(scale.shape) != wanted or scale.dtype is not torch.float32:
        raise ValueError(
            f"Codes of shape {list(codes.shape)} in blocks of {spec.block} have scales of shape {list(wanted)} in "
            f"torch.float32; found {list(scale.shape)} in {scale.dtype}."
        )
    shape = codes.shape if not transposed else torch.Size((*codes.shape[:-2], codes.shape[-1], codes.shape[-2]))
    like = torch.empty(shape, dtype=dtype, device="meta")
    need = Need(spec, get("reference"), 1, transposed)
    made = Gathered([Quantized(codes.detach(), scale.detach(), spec)], transposed)
    source = Source((need,), shape, frozen=True)
    return nn.Parameter(Fp8Weight(like, source, None, made, codes.device), requires_grad=False)


def freeze_weight(
    values: Tensor, kind: str | CastSpec = "block", dtype: torch.dtype | None = None, transposed: bool = False
) -> nn.Parameter:
    """Quantize ``values`` [N, K] or [E, N, K] ([E, K, N] if ``transposed``) into a frozen weight.

    ``kind``: row, block or tensor, or a cast of its own. Raises ValueError for another kind.
    """
    if not isinstance(kind, CastSpec) and kind not in FROZEN:
        raise ValueError(f"There is no kind {kind!r} of frozen weights; there are {', '.join(FROZEN)}.")
    spec = kind if isinstance(kind, CastSpec) else FROZEN[kind]
    q = Need(spec, get("reference"), 1, transposed).cast(values.detach())
    return frozen(q.data, q.scale, spec, dtype or values.dtype, transposed)


def is_frozen(value: object) -> bool:
    """True for a frozen FP8 weight, also as the local part of a DTensor."""
    local = local_of(value)
    return isinstance(local, Fp8Weight) and local.source.frozen


def codes_of_frozen(weight: Tensor) -> Quantized:
    """The codes and scales of a frozen weight: the very tensors, not copies. Raises ValueError for any other."""
    local = local_of(weight)
    if not is_frozen(weight):
        raise ValueError(f"{type(weight).__name__} of shape {list(weight.shape)} is no frozen FP8 weight.")
    return local.gathered.codes[0]


def frozen_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The frozen FP8 weights of a model, by name, each once."""
    return ((name, p) for name, p in model.named_parameters() if is_frozen(p))


def fingerprint(model: nn.Module) -> dict[str, str]:
    """SHA-256 of codes and scales by the name of each frozen weight (of this rank's part): equal before and after a
    training that left them alone."""
    out = {}
    for name, weight in frozen_weights(model):
        q, digest = codes_of_frozen(weight), hashlib.sha256()
        for part in (q.data.view(torch.uint8), q.scale):
            digest.update(part.contiguous().cpu().numpy().tobytes())
        out[name] = digest.hexdigest()
    return out


def thaw(model: nn.Module) -> nn.Module:
    """Replace every frozen weight by its dequantized values, in place: what to call where dtypes must be changed."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if is_frozen(parameter):
                assert isinstance(parameter, Fp8Weight)
                module._parameters[name] = nn.Parameter(parameter.dequantize(), requires_grad=False)
    return model
