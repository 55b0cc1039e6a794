"""RMSNorm and SwiGLU that emit quantized outputs, in plain PyTorch: what the fused kernels are tested against.

With x, gate, up and every other input read as fp32 and each line computed in fp32::

    rmsnorm            rstd = 1 / sqrt(mean(x^2) + eps)          y = x * rstd * weight
    swiglu             s = 1 / (1 + exp(-gate))                  h = gate * s * up
    swiglu, backward   dgate = dh * up * (s + gate * s * (1 - s))   dup = dh * gate * s

Products go from left to right. The result is rounded once, to the input's dtype, and what is quantized is the rounded
result: codes and scales are those of ``octavo.fp8.arithmetic.cast.quantize(y, spec)``, so that a fused layer trains as
the plain layer followed by a cast would. (Hugging Face's norms round twice, before and after the weight; once is
closer.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_rmsnorm(x: Tensor, weight: Tensor) -> None:
    """Raises CastError unless x is a matrix [M, K] and weight a vector [K], both of fp32, bf16 or fp16."""
    if x.dim() != 2 or tuple(weight.shape) != tuple(x.shape[1:]):
        raise CastError(
            f"rmsnorm_quantize: x has shape {list(x.shape)} and weight {list(weight.shape)}; it takes x [M, K] and "
            "weight [K]. Flatten the leading dimensions of x first."
        )
    _check_dtypes("rmsnorm_quantize", x, weight)


def check_swiglu(name: str, *tensors: Tensor) -> None:
    """Raises CastError unless all are matrices of one shape, and of fp32, bf16 or fp16."""
    shapes = [list(t.shape) for t in tensors]
    if tensors[0].dim() != 2 or any(s != shapes[0] for s in shapes):
        raise CastError(
            f"{name}: the inputs have shapes {', '.join(map(str, shapes))}; they must be matrices [M, I] of one "
            "shape. Flatten leading dimensions first."
        )
    _check_dtypes(name, *tensors)


def _check_dtypes(name: str, *tensors: Tensor) -> None:
    wrong = [str(t.dtype) for t in tensors if t.dtype not in _DTYPES]
    if wrong:
        raise CastError(f"{name}: found inputs of {', '.join(wrong)}; it takes float32, bfloat16 and float16.")


def rmsnorm_quantize(
    x: Tensor, weight: Tensor, eps: float, row: CastSpec | None, col: CastSpec | None,
    out: torch.dtype | None = None, low: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Quantized | None, Quantized | None]:  # fmt: skip
    """(y [M, K] in ``out``, or x's dtype, rstd [M] fp32, y.to(``low``) under ``row`` and under ``col``). Raises
    CastError for shapes or dtypes that do not fit."""
    check_rmsnorm(x, weight)
    x_MK = x.detach().float()
    rstd_M = 1.0 / torch.sqrt((x_MK * x_MK).mean(1) + eps)
    y_MK = (x_MK * rstd_M.view(-1, 1) * weight.detach().float()).to(out or x.dtype)
    given = y_MK.to(low or y_MK.dtype)
    return y_MK, rstd_M, *_casts(given, row, col)


def swiglu_quantize(
    gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
) -> tuple[Tensor, Quantized | None, Quantized | None]:
    """(h [M, I] in gate's dtype, h under ``row``, h under ``col``). Raises CastError for shapes or dtypes that do not
    fit."""
    check_swiglu("swiglu_quantize", gate, up)
    g, u = gate.detach().float(), up.detach().float()
    h_MI = (g * torch.sigmoid(g) * u).to(gate.dtype)
    return h_MI, *_casts(h_MI, row, col)


def swiglu_backward_quantize(
    dh: Tensor, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
) -> tuple[Quantized | None, Quantized | None, Quantized | None, Quantized | None]:
    """(dgate under ``row``, dgate under ``col``, dup under ``row``, dup under ``col``) of dh, gate and up [M, I].
    Raises CastError for shapes or dtypes that do not fit."""
    check_swiglu("swiglu_backward_quantize", dh, gate, up)
    dgate_MI, dup_MI = swiglu_backward(dh.detach(), gate.detach(), up.detach())
    return *_casts(dgate_MI, row, col), *_casts(dup_MI, row, col)


def swiglu_backward(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate, dup) [M, I] of h = silu(gate) * up, computed in fp32, rounded once: what the fused kernel casts."""
    d, g = dh.float(), gate.float()
    s = torch.sigmoid(g)
    silu = g * s
    return (d * up.float() * (s + silu * (1.0 - s))).to(gate.dtype), (d * silu).to(gate.dtype)


def _casts(y: Tensor, row: CastSpec | None, col: CastSpec | None) -> tuple[Quantized | None, Quantized | None]:
    if row is not None and col is not None:
        return cast.quantize_both(y, row, col)
    return None if row is None else cast.quantize(y, row), None if col is None else cast.quantize(y, col)
