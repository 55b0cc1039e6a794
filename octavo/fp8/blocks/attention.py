"""Grouped-query attention that saves k and v for the backward without repeating their heads.

Several heads of q share one head of k and v. If a kernel needs as many heads of k and v as of q, the stock path repeats
them first (always with a mask; without a mask, if the kernel does not support groups), and autograd saves the repeated
copies: 2 x heads x head_dim values per token instead of 2 x kv_heads x head_dim. Here::

    forward    k', v' = k, v repeated       o, lse = softmax(q k'^T * scale + mask) v'
    saved      q, k, v, o, lse (fp32, one per head and row), the original mask
    backward   k', v' repeated again        dk, dv = sums of dk', dv' over the heads of a group

The output equals ``F.scaled_dot_product_attention`` on the repeated k and v bit for bit. dk and dv are summed
in fp32 and rounded once; the stock path sums in the dtype of k. A boolean mask is saved itself, once for all layers;
the stock path saves a converted mask in each layer.

On the CPU, torch's flash attention is called directly, forward and backward. On other devices without a mask, the
kernel supports groups and saves no copies. The remaining cases (a mask on a GPU, dropout, head sizes that no flash
kernel supports) are recomputed in the backward: one more forward of attention, with the same dropout.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from octavo.fp8.blocks.attention_output import KEEPS_OUTPUT_KEY
from octavo.fp8.invariance import is_active


def grouped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Return softmax(q k^T * scale + mask) v, where heads of q share heads of k and v.

    Args:
        q: [B, H, T, D].
        k, v: [B, H_kv, S, D] and [B, H_kv, S, D_v]; H is a multiple of H_kv, and consecutive heads of q share one.
        mask: broadcasts to [B, H, T, S]; either boolean (True where q may attend) or added to the scores.
        scale: the factor of the scores, by default 1 / sqrt(D).
        is_causal: query t attends to keys 0 to t; cannot be combined with a mask.
        dropout: the probability of dropping an attention weight.

    Returns:
        [B, H, T, D_v] in the dtype of q (autocast's under autocast).

    Raises:
        ValueError: the shapes do not match, or ``is_causal`` is combined with a mask.
    """
    groups = _check(q, k, v, mask, is_causal)
    if is_active():
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=True)
    q, k, v, mask = _apply_autocast(q, k, v, mask)
    if not torch.is_grad_enabled() or not (q.requires_grad or k.requires_grad or v.requires_grad):
        return _stock_attention(q, k, v, mask, scale, is_causal, dropout, groups)
    v = _separate_v(v, q, k)
    if groups == 1 and (mask is None or mask.dtype != torch.bool):
        return _stock_attention(q, k, v, mask, scale, is_causal, dropout, groups)  # saves no copies
    if q.device.type == "cpu" and _uses_cpu_flash(q, k, v, mask, scale, is_causal, dropout, groups):
        out: Tensor = _CpuFlash.apply(q, k, v, mask, scale, is_causal, groups)
        return out
    if mask is None and q.device.type != "cpu" and k.shape[-1] == v.shape[-1] <= 256:
        return F.scaled_dot_product_attention(
            q, k, v, None, dropout, is_causal=is_causal, scale=scale, enable_gqa=groups > 1
        )
    output: Tensor = checkpoint(
        _stock_attention, q, k, v, mask, scale, is_causal, dropout, groups,
        use_reentrant=False, preserve_rng_state=dropout > 0, context_fn=_recompute_contexts,
    )  # fmt: skip
    if output.grad_fn is not None:
        metadata: Any = output.grad_fn.metadata  # annotated otherwise, but a dict
        metadata[KEEPS_OUTPUT_KEY] = False  # recomputed, so that the next layer must save its input
    return output


def _recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward and of its recomputation, which allows the same kernels."""
    allowed = _cur_sdpa_kernel_backends(with_priority=True)
    return nullcontext(), sdpa_kernel(allowed, set_priority=True)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> int:
    """Check the arguments, and return the number of heads of q that share one head of k."""
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0]
    if not fits or q.shape[3] != k.shape[3] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"grouped attention takes q [B, H, T, D], k [B, H_kv, S, D] and v [B, H_kv, S, D_v], where H is a multiple "
            f"of H_kv; got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}. Heads must be dimension 1"
        )
    if mask is not None and is_causal:
        raise ValueError(
            f"a mask of shape {list(mask.shape)} cannot be combined with is_causal; make the mask causal, or pass no "
            "mask"
        )
    return q.shape[1] // k.shape[1]


def _apply_autocast(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Convert floating-point arguments to autocast's dtype, except float64, as autocast does for attention."""
    device = q.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return q, k, v, mask
    dtype = torch.get_autocast_dtype(device)

    def lower(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return lower(q), lower(k), lower(v), None if mask is None else lower(mask)


def _separate_v(v: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Copy v out of a buffer that also holds q and k (from one fused projection), so that saving v does not keep the
    whole buffer alive.

    After rotary embedding, q and k are new tensors. If they still are in the buffer, it stays alive anyway.
    """
    has_gaps = v.stride(2) > v.shape[1] * v.shape[3]  # rows of q and k are between the rows of v
    storage = v.untyped_storage()._cdata
    return v.clone() if has_gaps and all(x.untyped_storage()._cdata != storage for x in (q, k)) else v


def _repeat_heads(x: Tensor, groups: int) -> Tensor:
    """Return x [B, H_kv, S, D] as [B, H_kv * groups, S, D], each head repeated ``groups`` times in a row."""
    if groups == 1:
        return x
    batch, heads, rows, size = x.shape
    return x[:, :, None].expand(batch, heads, groups, rows, size).reshape(batch, heads * groups, rows, size)


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Sum the gradient of :func:`_repeat_heads` over each group, in fp32."""
    if groups == 1:
        return x
    batch, heads, rows, size = x.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.view(batch, heads // groups, groups, rows, size).sum(2, dtype=wide).to(x.dtype)


def _stock_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, is_causal: bool, dropout: float,
    groups: int,
) -> Tensor:  # fmt: skip
    k, v = _repeat_heads(k, groups), _repeat_heads(v, groups)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=is_causal, scale=scale)


def _uses_cpu_flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, is_causal: bool, dropout: float,
    groups: int,
) -> bool:  # fmt: skip
    """True if torch would select its flash attention for the CPU for these arguments."""
    if mask is not None and mask.requires_grad:
        return False
    if torch.compiler.is_compiling() or hasattr(q, "fake_mode"):  # torch's own selection needs real tensors
        plain = q.dtype == k.dtype == v.dtype and not dropout and min(*q.shape, *k.shape) > 0
        return plain and k.shape[3] == v.shape[3] and all(x.stride(3) == 1 for x in (q, k, v))
    wide_k, wide_v = (
        x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v)
    )  # the selection depends on shapes, not on values
    choice = torch._fused_sdp_choice(q, wide_k, wide_v, mask, dropout, is_causal, scale=scale)
    return bool(choice == SDPBackend.FLASH_ATTENTION.value)


class _CpuFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, is_causal: bool,
        groups: int,
    ) -> Tensor:  # fmt: skip
        out: Tensor
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q,
            _repeat_heads(k, groups),
            _repeat_heads(v, groups),
            0.0,
            is_causal,
            attn_mask=_additive_mask(mask, q),
            scale=scale,
        )
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.scale, ctx.is_causal, ctx.groups = scale, is_causal, groups
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, mask = ctx.saved_tensors
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, _repeat_heads(k, ctx.groups), _repeat_heads(v, ctx.groups), out, lse, 0.0, ctx.is_causal,
            attn_mask=_additive_mask(mask, q), scale=ctx.scale,
        )  # fmt: skip
        return dq, _sum_groups(dk, ctx.groups), _sum_groups(dv, ctx.groups), None, None, None, None


def _additive_mask(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a boolean mask as 0 and -inf in the dtype of q, to be added to the scores; other masks unchanged."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
