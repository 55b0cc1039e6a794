"""LayerNorms that save FP8 codes of their input, and the selection of norms that can save codes.

With x [M, K], over each row, in fp32::

    forward    mean, rstd = 1 / sqrt(var + eps)     y = (x - mean) * rstd * weight + bias
    backward   n = (x - mean) * rstd,  g = dy * weight
               dx = rstd * (g - mean(g) - n * mean(g * n))     dw = sum of dy * n     db = sum of dy

The forward is the kernel of ``torch.nn.LayerNorm`` on the exact x. It saves E4M3 codes of x, mean and rstd in fp32 (one
per row), and references to weight and bias. The backward reads the decoded codes. RMSNorms do the same in
:mod:`octavo.fp8.blocks.rmsnorm`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.fp8.blocks import rmsnorm
from octavo.fp8.blocks.probe import why_replaced, wrong_dtype
from octavo.fp8.dense import sources
from octavo.fp8.dense.inputs import is_autocast_enabled, without_autocast
from octavo.fp8.dense.swap import SwappedModule, is_supported_input, swap
from octavo.fp8.weights.shards import is_whole


def is_norm(module: nn.Module) -> bool:
    """True if a module is a norm over features, with any formula, according to its name and parameters."""
    weight = module._parameters.get("weight")
    if isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm):
        return False
    return isinstance(module, nn.LayerNorm) or (
        "norm" in type(module).__name__.lower() and weight is not None and weight.dim() == 1 and not module._modules
    )


def why_not(norm: nn.Module) -> str | None:
    """Return why this norm cannot save FP8 codes of its input, or None if it can."""
    if not isinstance(norm, nn.LayerNorm):
        return rmsnorm.why_not_save(norm)
    if (reason := why_replaced(norm)) is not None:
        return reason
    if type(norm).forward is not nn.LayerNorm.forward:
        return f"{type(norm).__name__} overrides the forward of LayerNorm"
    if len(norm.normalized_shape) != 1:
        return f"it normalizes over {len(norm.normalized_shape)} dimensions"
    parameters = [p for p in norm._parameters.values() if p is not None]
    if any(not is_whole(p) for p in parameters):
        return "its weight is already sharded (apply the plan before fully_shard)"
    return wrong_dtype("its weight is", parameters)


def save_as_codes(norm: nn.Module) -> str | None:
    """Let a norm save FP8 codes of its input. Returns why it cannot, or None."""
    if not isinstance(norm, nn.LayerNorm):
        return rmsnorm.save_as_codes(norm)
    reason = why_not(norm)
    if reason is None:
        swap(norm, LayerNorm)
    return reason


class LayerNorm(SwappedModule):
    """A LayerNorm whose forward saves codes of its input; see the module docstring."""

    def replacement_forward(self, x: Tensor) -> Tensor | None:
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        parameters = [p for p in (weight, bias) if p is not None]
        if not is_supported_input(x) or x.dtype not in sources.DTYPES:
            return None
        if x.shape[-1:] != self.normalized_shape or not torch.is_grad_enabled():
            return None
        out = _output_dtype(x)
        is_mixed = any(p.dtype != x.dtype for p in parameters) and out == x.dtype and x.device.type != "cpu"
        if is_mixed or any(not is_whole(p) or p.device != x.device for p in parameters):
            return None  # the stock forward raises if the device does not support is_mixed dtypes
        return _LayerNorm.apply(x, weight, bias, _NormArgs(self.eps, out))  # type: ignore[arg-type]


def _output_dtype(x: Tensor) -> torch.dtype:
    """Return the output dtype of the stock norm, which may depend on autocast."""
    if not is_autocast_enabled(x):
        return x.dtype
    return _autocast_output_dtype(x.device.type, x.dtype, torch.get_autocast_dtype(x.device.type))


@lru_cache(maxsize=64)
def _autocast_output_dtype(device: str, dtype: torch.dtype, low: torch.dtype) -> torch.dtype:
    with torch.no_grad():
        return F.layer_norm(torch.ones(1, 2, device=device, dtype=dtype), (2,)).dtype


class _NormArgs(NamedTuple):
    eps: float
    out: torch.dtype


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: _NormArgs) -> Tensor:
        with without_autocast(x):
            # For 16-bit inputs, the CPU kernel rounds its statistics to 16 bits; the GPU kernel keeps fp32.
            wide = torch.float32 if x.device.type == "cpu" else call.out
            x_MK = x.detach().reshape(-1, x.shape[-1])
            w, b = (None if p is None else p.detach().to(wide) for p in (weight, bias))
            y_MK, mean_M, rstd_M = torch.native_layer_norm(x_MK.to(wide), [x.shape[-1]], w, b, call.eps)
            saved = sources.encode_activation(x_MK) if any(ctx.needs_input_grad) else None
        sources.save_named(ctx, x=saved, weight=weight, bias=bias, mean=mean_M.float(), rstd=rstd_M.float())
        ctx.wide, ctx.x_shape, ctx.x_dtype = wide, x.shape, x.dtype
        # Autograd must not see a view: a model may write into the output, as into the stock norm's.
        return torch.ops.aten._unsafe_view(y_MK.to(call.out), list(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean_M, rstd_M = sources.load_saved(ctx).values()
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        with without_autocast(dy):
            x_MK = sources.decode_activation(x, ctx.wide)
            dy_MK = dy.reshape(x_MK.shape).to(ctx.wide)
            w, b = (None if p is None else p.detach().to(ctx.wide) for p in (weight, bias))
            dx, dw, db = torch.ops.aten.native_layer_norm_backward(
                dy_MK, x_MK, [x_MK.shape[1]], mean_M, rstd_M, w, b, [needs_x, needs_w, needs_b]
            )
            dx = dx.view(ctx.x_shape).to(ctx.x_dtype) if needs_x else None
            dw = dw.to(weight.dtype) if needs_w else None
            db = db.to(bias.dtype) if needs_b else None
        return dx, dw, db, None
