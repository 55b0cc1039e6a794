"""Attention with grouped heads that keeps k and v as the layer made them.

Several heads of q share one of k and v. Where a kernel wants as many heads of k and v as of q, the stock path repeats
them first (with a mask, on every device; without one, where the kernel knows no groups), and autograd keeps the
repeated copies: 2 x heads x head_dim values a token where 2 x kv_heads x head_dim would do. Here::

    forward    k', v' = k, v repeated       o, lse = softmax(q k'^T * scale + mask) v'
    saved      q, k, v, o, lse (fp32, one a head and row), the mask as it was given
    backward   k', v' repeated again        dk, dv = sums of dk', dv' over the heads of a group

The output is bit for bit that of ``F.scaled_dot_product_attention`` on the repeated k and v. dk and dv are summed in
fp32 and rounded once, where the stock path sums in the dtype of k. A boolean mask, which all layers share, is saved as
it is; the stock path keeps what it makes of it, once for each layer.

Who does what: torch's flash attention for the CPU, forward and backward, is called directly. On other devices without a
mask the kernel groups by itself and keeps nothing more. What remains, a mask on a GPU, dropout, or head sizes that no
flash kernel takes, is run again in backward (one more forward of attention, with the same dropout).
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
    """softmax(q k^T * scale + mask) v, where heads of q share heads of k and v.

    Args:
        q: [B, H, T, D].
        k, v: [B, H_kv, S, D] and [B, H_kv, S, D_v]; H is a multiple of H_kv, and consecutive heads of q share one.
        mask: broadcasts to [B, H, T, S]; boolean (True: may be seen) or added to the scores. None: none.
        scale: of the scores; None: 1 / sqrt(D).
        is_causal: position t sees positions up to t, from the first; not together with a mask.
        dropout: the share of weights that is dropped; nothing is where 0.

    Returns:
        [B, H, T, D_v] in the dtype of q (autocast's under autocast).

    Raises:
        ValueError: the shapes do not fit, or a mask came with ``is_causal``.
    """
    groups = _check(q, k, v, mask, is_causal)
    if is_active():
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=True)
    q, k, v, mask = _apply_autocast(q, k, v, mask)
    if not torch.is_grad_enabled() or not (q.requires_grad or k.requires_grad or v.requires_grad):
        return _stock_attention(q, k, v, mask, scale, is_causal, dropout, groups)
    v = _separate_v(v, q, k)
    if groups == 1 and (mask is None or mask.dtype != torch.bool):
        return _stock_attention(q, k, v, mask, scale, is_causal, dropout, groups)  # keeps nothing twice
    if q.device.type == "cpu" and _uses_cpu_flash(q, k, v, mask, scale, is_causal, dropout, groups):
        out: Tensor = _CpuFlash.apply(q, k, v, mask, scale, is_causal, groups)
        return out
    if mask is None and q.device.type != "cpu" and k.shape[-1] == v.shape[-1] <= 256:
        return F.scaled_dot_product_attention(
            q, k, v, None, dropout, is_causal=is_causal, scale=scale, enable_gqa=groups > 1
        )
    again: Tensor = checkpoint(
        _stock_attention, q, k, v, mask, scale, is_causal, dropout, groups,
        use_reentrant=False, preserve_rng_state=dropout > 0, context_fn=_recompute_contexts,
    )  # fmt: skip
    if again.grad_fn is not None:
        forgotten: Any = again.grad_fn.metadata  # a dictionary, whatever its annotation says
        forgotten[KEEPS_OUTPUT_KEY] = False  # the next layer must not count on it
    return again


def _recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a forward and of its recomputation, which repeats the choice of torch's kernels."""
    allowed = _cur_sdpa_kernel_backends(with_priority=True)
    return nullcontext(), sdpa_kernel(allowed, set_priority=True)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> int:
    """How many heads of q share one of k."""
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0]
    if not fits or q.shape[3] != k.shape[3] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"grouped attention takes q [B, H, T, D], k [B, H_kv, S, D] and v [B, H_kv, S, D_v] with H a multiple of "
            f"H_kv; found {list(q.shape)}, {list(k.shape)} and {list(v.shape)}. Lay the heads out in dimension 1"
        )
    if mask is not None and is_causal:
        raise ValueError(
            f"a mask of shape {list(mask.shape)} was given together with is_causal; put causality into the mask, or "
            "give none"
        )
    return q.shape[1] // k.shape[1]


def _apply_autocast(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What autocast makes of the arguments of attention: floating tensors in its dtype, float64 as it is."""
    device = q.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return q, k, v, mask
    dtype = torch.get_autocast_dtype(device)

    def lower(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return lower(q), lower(k), lower(v), None if mask is None else lower(mask)


def _separate_v(v: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """v apart from the q and k that were made in one buffer with it (one GEMM for all three): keeping a part keeps the
    whole, and after rotary embedding q and k are others. Where they are not, the buffer stays in any case."""
    wide = v.stride(2) > v.shape[1] * v.shape[3]  # rows farther apart than v's heads are long
    storage = v.untyped_storage()._cdata
    return v.clone() if wide and all(x.untyped_storage()._cdata != storage for x in (q, k)) else v


def _repeat_heads(x: Tensor, groups: int) -> Tensor:
    """[B, H_kv, S, D] -> [B, H_kv * groups, S, D], each head ``groups`` times in a row."""
    if groups == 1:
        return x
    batch, heads, rows, size = x.shape
    return x[:, :, None].expand(batch, heads, groups, rows, size).reshape(batch, heads * groups, rows, size)


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """The transpose of :func:`_repeat_heads`, summed in fp32."""
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
    """Whether torch would run its flash attention for the CPU on these, asked of torch itself."""
    if mask is not None and mask.requires_grad:
        return False
    if torch.compiler.is_compiling() or hasattr(q, "fake_mode"):  # torch answers only for real tensors
        plain = q.dtype == k.dtype == v.dtype and not dropout and min(*q.shape, *k.shape) > 0
        return plain and k.shape[3] == v.shape[3] and all(x.stride(3) == 1 for x in (q, k, v))
    wide_k, wide_v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))  # shapes count, not values
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
    """A boolean mask as what is added to the scores: 0 or -inf in the dtype of q."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
