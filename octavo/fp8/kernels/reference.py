"""The reference backend: the numeric specification in plain PyTorch, on any device. All other backends are tested
against it.

A GEMM here decodes its operands and multiplies them in fp32. This equals the specified arithmetic (fp32 partial sums
over each block of the contraction, each multiplied by its two scales, added in fp32) up to the order of summation:

* Powers of two (blockwise, rowwise, mxfp8): code * scale is exact in fp32, products of two codes have at most 8
  significant bits, and multiplying by a power of two commutes with every rounding. Scaling each operand first
  therefore gives the same terms as scaling each partial sum afterwards.
* fp32 scales (tensorwise, delayed): code * scale would round, so the codes themselves are multiplied, exactly, and the
  fp32 result is scaled. This is possible because such a scale does not change along the contraction; if it does (in a
  custom spec), operands are scaled first, with one fp32 rounding each.

The result is rounded once, to ``out_dtype``. Neither autocast nor a reduced matmul precision (TF32, BF16 on AMX)
changes it: autocast is disabled inside, and under a reduced precision the product is computed in float64.

The fused kernels are tested against the RMSNorm and SwiGLU with quantized outputs in this file. All inputs are read as
fp32, and each line is computed in fp32::

    rmsnorm            rstd = 1 / sqrt(mean(x^2) + eps)          y = x * rstd * weight
    swiglu             s = 1 / (1 + exp(-gate))                  h = gate * s * up
    swiglu, backward   dgate = dh * up * (s + gate * s * (1 - s))   dup = dh * gate * s

Products are evaluated from left to right. The result is rounded once, to the input's dtype, and then quantized: codes
and scales equal ``octavo.fp8.arithmetic.cast.quantize(y, spec)``, so that a fused layer trains like the plain layer
followed by a cast. (Hugging Face's norms round twice, before and after the weight; rounding once is more accurate.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.base import accelerator
from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.adamw import Hyper, Piece, reference_step
from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.formats import decode
from octavo.fp8.arithmetic.moments import MaxOverRanks
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.invariance import is_active, row_mm
from octavo.fp8.kernels import reference_grouped as grouped
from octavo.fp8.kernels.groups import Groups
from octavo.fp8.kernels.layout import CONTRACTED, check_fit
from octavo.fp8.kernels.registry import Backend

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the inputs of fused layers
_ALWAYS_SUPPORTED = ("quantize", "dequantize", "rmsnorm", "swiglu", "swiglu_backward", "adamw")


def check_rmsnorm(x: Tensor, weight: Tensor) -> None:
    """Raise CastError unless x is a matrix [M, K] and weight a vector [K], both of fp32, bf16 or fp16."""
    if x.dim() != 2 or tuple(weight.shape) != tuple(x.shape[1:]):
        raise CastError(
            f"rmsnorm_quantize: x has shape {list(x.shape)} and weight {list(weight.shape)}; it takes x [M, K] and "
            "weight [K]. Flatten the leading dimensions of x first."
        )
    _check_dtypes("rmsnorm_quantize", x, weight)


def check_swiglu(name: str, *tensors: Tensor) -> None:
    """Raise CastError unless all tensors are matrices of the same shape, and of fp32, bf16 or fp16."""
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


def reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) [M] in fp32 for each row of x [M, K]."""
    x_MK = x.float()
    return 1.0 / torch.sqrt((x_MK * x_MK).mean(1) + eps)


def rmsnorm_quantize(
    x: Tensor, weight: Tensor, eps: float, row: CastSpec | None, col: CastSpec | None,
    out: torch.dtype | None = None, low: torch.dtype | None = None, rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Quantized | None, Quantized | None]:  # fmt: skip
    """Return (y [M, K] in ``out`` or x's dtype, rstd [M] fp32, y.to(``low``) cast under ``row``, and under ``col``).

    Raises CastError for unsupported shapes or dtypes.
    """
    check_rmsnorm(x, weight)
    x_MK = x.detach().float()
    rstd_M = reciprocal_rms(x_MK, eps) if rstd is None else rstd
    y_MK = (x_MK * rstd_M.view(-1, 1) * weight.detach().float()).to(out or x.dtype)
    return y_MK, rstd_M, *_cast_both(y_MK.to(low or y_MK.dtype), row, col)


def rmsnorm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, needs_x: bool, needs_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return (dx [M, K] in x's dtype, dw [K] in the weight's dtype) of y = x * rstd * weight, computed in fp32 from dy
    and x [M, K]; None for one that is not needed."""
    dx = dw = None
    dy_MK, x_MK = dy.float(), x.float()
    n_MK = x_MK * rstd.unsqueeze(1)
    if needs_w:
        dw = (dy_MK * n_MK).sum(0).to(weight.dtype)
    if needs_x:
        g_MK = dy_MK * weight.float()
        dx = ((g_MK - n_MK * (g_MK * n_MK).mean(1, keepdim=True)) * rstd.unsqueeze(1)).to(x.dtype)
    return dx, dw


def swiglu_quantize(
    gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
) -> tuple[Tensor, Quantized | None, Quantized | None]:
    """Return (h [M, I] in gate's dtype, h cast under ``row``, h cast under ``col``). Raises CastError for unsupported
    shapes or dtypes."""
    check_swiglu("swiglu_quantize", gate, up)
    g, u = gate.detach().float(), up.detach().float()
    h_MI = (g * torch.sigmoid(g) * u).to(gate.dtype)
    return h_MI, *_cast_both(h_MI, row, col)


def swiglu_backward_quantize(
    dh: Tensor, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
) -> tuple[Quantized | None, Quantized | None, Quantized | None, Quantized | None]:
    """Return (dgate cast under ``row``, under ``col``, dup cast under ``row``, under ``col``) from dh, gate and up
    [M, I]. Raises CastError for unsupported shapes or dtypes."""
    check_swiglu("swiglu_backward_quantize", dh, gate, up)
    dgate_MI, dup_MI = swiglu_backward(dh.detach(), gate.detach(), up.detach())
    return *_cast_both(dgate_MI, row, col), *_cast_both(dup_MI, row, col)


def swiglu_backward(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dgate, dup) [M, I] of h = silu(gate) * up, computed in fp32 and rounded once; the fused kernel casts
    these."""
    d, g = dh.float(), gate.float()
    s = torch.sigmoid(g)
    silu = g * s
    return (d * up.float() * (s + silu * (1.0 - s))).to(gate.dtype), (d * silu).to(gate.dtype)


def _cast_both(y: Tensor, row: CastSpec | None, col: CastSpec | None) -> tuple[Quantized | None, Quantized | None]:
    if row is not None and col is not None:
        return cast.quantize_both(y, row, col)
    return None if row is None else cast.quantize(y, row), None if col is None else cast.quantize(y, col)


class ReferenceBackend(Backend):
    """Plain PyTorch on any device, slow on a GPU. :class:`Backend` documents the methods."""

    name = "reference"

    def supports(
        self, op: str, what: CastSpec | Recipe, device: torch.device, shape: Sequence[int | None] | None
    ) -> str | None:
        """Return None, except for GEMMs that the recipe keeps in high precision, and devices without FP8 dtypes."""
        if op != "adamw" and (missing := accelerator.missing_fp8(device)):
            return missing
        gemm = op.removeprefix("grouped_")
        if gemm not in CONTRACTED or not isinstance(what, Recipe):
            return None if op in _ALWAYS_SUPPORTED else f"it has no {op}"
        if op in grouped.OPS and (why_not := grouped.why_not(device)) is not None:
            return why_not
        if what.gemm(gemm) is None:
            return f"the recipe keeps {op} in high precision: there is no FP8 GEMM"
        return None

    def quantize(self, x: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        """Cast x as ``octavo.fp8.arithmetic.cast.quantize``; the result is contiguous for every ``contract``."""
        return cast.quantize(x, spec)

    quantize_both = staticmethod(cast.quantize_both)  # equal casts return the same object twice: do not write to it
    dequantize = staticmethod(cast.dequantize)

    def quantize_with_scale(
        self, x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None, contract: int = 1
    ) -> Quantized:
        return cast.quantize_with_scale(x, scale, spec, amax)

    def quantize_both_with_scale(
        self, x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None
    ) -> tuple[Quantized, Quantized]:
        q = cast.quantize_with_scale(x, scale, spec, amax)
        return q, q

    def reorder_scales(self, q: Quantized, contract: int) -> Quantized:
        return q  # its GEMMs read scales in any order

    copy_for_gemm = reorder_scales

    def gemm_fwd(self, x_q: Quantized, w_q: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            return _gemm("fwd", x_q, 1, w_q, 1, out_dtype)
        y = _gemm("fwd", x_q, 1, w_q, 1, torch.float32) + bias.float()
        return y.to(out_dtype)

    def gemm_dgrad(self, dy_q: Quantized, w_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        return _gemm("dgrad", dy_q, 1, w_q, 0, out_dtype)

    def gemm_wgrad(self, dy_q: Quantized, x_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        return _gemm("wgrad", dy_q, 0, x_q, 0, out_dtype)

    def quantize_rows(self, x: Tensor, spec: CastSpec, groups: Groups, contract: int = 1) -> Quantized:
        return grouped.quantize_rows(x, spec, groups)

    def quantize_rows_both(
        self, x: Tensor, row: CastSpec, col: CastSpec, groups: Groups
    ) -> tuple[Quantized, Quantized]:
        first = grouped.quantize_rows(x, row, groups)
        return first, first if row == col else grouped.quantize_rows(x, col, groups)

    def quantize_experts(self, w: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        return grouped.quantize_experts(w, spec)

    def grouped_fwd(
        self, x_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """Return y [R, N], with zeros in padding rows."""
        return grouped.fwd(_gemm, x_q, w_q, groups, out_dtype, bias)

    def grouped_dgrad(self, dy_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype) -> Tensor:
        """Return dx [R, K], with zeros in padding rows."""
        return grouped.dgrad(_gemm, dy_q, w_q, groups, out_dtype)

    def grouped_wgrad(self, dy_q: Quantized, x_q: Quantized, groups: Groups, out_dtype: torch.dtype) -> Tensor:
        return grouped.wgrad(_gemm, dy_q, x_q, groups, out_dtype)

    rmsnorm_quantize = staticmethod(rmsnorm_quantize)
    rmsnorm_backward = staticmethod(rmsnorm_backward)
    swiglu_quantize = staticmethod(swiglu_quantize)
    swiglu_backward_quantize = staticmethod(swiglu_backward_quantize)

    def adamw(
        self, pieces: Sequence[Piece], hyper: Hyper, factor: float | Tensor | None, agree: MaxOverRanks | None = None
    ) -> None:
        reference_step(pieces, hyper, factor, agree)


def _gemm(name: str, a_q: Quantized, a_dim: int, b_q: Quantized, b_dim: int, out_dtype: torch.dtype) -> Tensor:
    """Contract dimension ``a_dim`` of a with dimension ``b_dim`` of b. Rows of the result come from a, columns from
    b."""
    if a_q.data.dim() != 2 or b_q.data.dim() != 2 or a_q.data.shape[a_dim] != b_q.data.shape[b_dim]:
        check_fit(name, a_q, a_dim, b_q, b_dim)  # raises the error
    a, a_scale = _operand(a_q, a_dim)
    b, b_scale = _operand(b_q, b_dim)
    out = _matmul_fp32(a if a_dim == 1 else a.t(), b if b_dim == 0 else b.t())
    if a_scale is not None and b_scale is not None:
        out = apply_scales(out, a_scale.view(-1, 1), b_scale.view(1, -1))
    elif a_scale is not None:
        out = out * a_scale.view(-1, 1)
    elif b_scale is not None:
        out = out * b_scale.view(1, -1)
    return out if out_dtype is torch.float32 else out.to(out_dtype)


def apply_scales(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return out [M, N] * a [M or 1, 1] * b [1, N or 1], in this order, infinite only where the final result overflows.

    If a exceeds 2^80, the first product may overflow fp32 although the final result is in range. Then a factor of 2^40
    moves from a to b. This does not round, so the bits equal the plain products where these are finite. If both scales
    are that large, the result overflows in any case. The operation is not in place, because selective checkpointing may
    have saved ``out`` and forbids writing to it.
    """
    if a.numel() > 1 and b.numel() > 1:  # applying the power of each row last avoids a matrix of powers
        power = torch.where(a >= 2.0**80, 2.0**40, 1.0)
        return out * (a / power) * b * power
    power = torch.where((a >= 2.0**80) & (b < 2.0**80), 2.0**40, 1.0)
    return out * (a / power) * (b * power)


def _operand(q: Quantized, contracted: int) -> tuple[Tensor, Tensor | None]:
    """Return (the operand in fp32, the scale to apply to the result or None). The scale has one element, or one per
    index of the free dimension."""
    scale = q.scale
    if q.spec.scale != "fp32" or scale.shape[contracted] != 1:
        return cast.dequantize(q), None
    free, block = q.data.shape[1 - contracted], q.spec.block[1 - contracted]
    if block > 1:
        scale = scale.reshape(-1).repeat_interleave(block)[:free]
    return decode(q.data), scale


def _matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in true fp32, independently of autocast and of the matmul precision of the process."""
    device = a.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _matmul_fp32(a, b)
    matmul = torch.backends.cuda.matmul if device == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    mm = row_mm if torch._C._len_torch_function_stack() and is_active() else torch.mm
    if matmul.fp32_precision in ("none", "ieee"):
        return mm(a, b)
    return mm(a.double(), b.double()).float()
