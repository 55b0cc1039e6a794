"""Products of matrices in high precision, on CPUs without 16-bit instructions as well.

On such a CPU (AVX2 without AVX-512: most laptops) torch multiplies BF16 several times slower than fp32, and gradients
up to 35 times (``benchmarks/bf16_cpu.py``). There a product of matrices that are not narrow is computed in fp32 from
the same operands and rounded once, which is what the instructions do; only the order of the sums differs. Elsewhere, in
compiled graphs, and with a torch function mode such as invariance, which replaces products itself, these are torch's
own functions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.base import accelerator
from octavo.fp8.dense.inputs import compute_dtype, is_autocast_enabled, is_functorch_active, without_autocast
from octavo.fp8.weights.shards import is_plain_tensor

MIN_INTENSITY = 6
"""Multiplications per element of the three matrices from which fp32 is faster. With fewer, as in decoding one token,
converting the weight takes most of the time."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, differentiable: x [..., K] @ weight [N, K].T + bias [N] -> [..., N]; follows autocast."""
    dtype = compute_dtype(x)
    if not is_computed_in_fp32(x, weight, dtype) or is_functorch_active():
        return F.linear(x, weight, bias)
    with without_autocast(x):
        y: Tensor = _WideLinear.apply(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return y


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``torch.mm``: a [M, K] @ b [K, N], written to ``out`` if it is given; without a gradient."""
    if not is_computed_in_fp32(a, b, a.dtype):
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    y = a.float() @ b.float()
    return y.to(a.dtype) if out is None else out.copy_(y)


def addmm(start: Tensor, a: Tensor, b: Tensor, alpha: float = 1) -> Tensor:
    """``torch.addmm``: start [M, N] + alpha a [M, K] @ b [K, N]; without a gradient."""
    if not is_computed_in_fp32(a, b, a.dtype):
        return torch.addmm(start, a, b, alpha=alpha)
    return torch.addmm(start.float(), a.float(), b.float(), alpha=alpha).to(start.dtype)


def stock_forward(module: nn.Module, x: object) -> Tensor | None:
    """Return the output of a linear layer, or of a convolution over single patches, as one product; None for other
    modules and inputs, whose own forward is as good.

    A patch embedding that gets its patches cut, x [patches, C, *kernel], is a product of rows with the flattened
    weight. torch's convolution computes the same by a slower way, above all its gradient.
    """
    weight = module._parameters.get("weight")
    if not isinstance(x, Tensor) or not is_plain_tensor(weight) or torch._C._len_torch_function_stack():
        return None
    assert weight is not None
    if isinstance(module, nn.Linear):
        return linear(x, weight, module.bias) if is_computed_in_fp32(x, weight, compute_dtype(x)) else None
    if not isinstance(module, nn.Conv2d | nn.Conv3d) or not _is_one_patch(module, x):
        return None
    ones = [1] * (x.dim() - 2)
    return linear(x.flatten(1), weight.flatten(1), module.bias).view(x.shape[0], -1, *ones)


def _is_one_patch(conv: nn.Conv2d | nn.Conv3d, x: Tensor) -> bool:
    """Whether each row of x is one patch of this convolution: its output has one position."""
    no_padding = conv.padding == (0,) * len(conv.kernel_size) and conv.groups == 1
    return no_padding and x.shape[2:] == conv.kernel_size and set(conv.dilation) == {1} and x.shape[0] > 0


def is_computed_in_fp32(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether a product of these operands in ``dtype`` is computed in fp32."""
    if dtype not in (torch.bfloat16, torch.float16) or a.device.type != "cpu" or type(b) not in (Tensor, nn.Parameter):
        return False
    if accelerator.multiplies_on_cpu(dtype) or torch._C._len_torch_function_stack() or torch.compiler.is_compiling():
        return False
    if not is_autocast_enabled(a) and not a.dtype == b.dtype == dtype:
        return False
    inner = max(a.shape[-1], 1)
    rows, columns = a.numel() // inner, b.numel() // inner
    elements = a.numel() + b.numel() + rows * columns
    return rows * columns * inner >= MIN_INTENSITY * elements > 0


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        with without_autocast(dy):
            dx = mm(rows, weight).view(x.shape) if needs_x else None
            dw = mm(rows.t(), x.reshape(-1, x.shape[-1])) if needs_w else None
        return dx, dw, rows.sum(0) if needs_b else None
