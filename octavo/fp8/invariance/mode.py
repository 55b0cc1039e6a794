"""The mode that makes a model batch-invariant: it replaces operations by functions that do not depend on the number of
rows.

A :class:`torch.overrides.TorchFunctionMode` sees every torch function that Python code calls: in linear layers,
routers, adapters, patch embeddings, attention by ``sdpa``. Functions whose result for a row depends on the other rows
are replaced (:data:`REPLACED`) or, where there is no replacement, refused by name (:data:`REFUSED`). The others are
elementwise, such as rotary embeddings and FP8 casts of rows, or, on a CPU, row by row: norms, softmax, top-k. On a GPU
these are replaced too (:mod:`octavo.fp8.invariance.rows`).

Gradients are not invariant, and need not be. A forward that the backward recomputes enters the mode through
:func:`checkpoint_contexts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from octavo.fp8.invariance import pointwise, products, rows
from octavo.fp8.invariance.attention import attention
from octavo.fp8.invariance.devices import InvarianceError
from octavo.fp8.invariance.products import Sizes


def is_active() -> bool:
    """Whether the batch-invariant mode is active."""
    return any(isinstance(mode, BatchInvariantMode) for mode in _get_current_function_mode_stack())


class BatchInvariantMode(TorchFunctionMode):
    """A mode in which the results for a row depend only on that row: see the module's docstring.
    ``octavo.fp8.batch_invariant`` enters it after checking a model."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        other = REPLACED.get(func)
        if other is not None:
            return other(*args, **(kwargs or {}))
        if func in REFUSED:
            raise InvarianceError(f"invariant: the model calls {func.__name__}, {REFUSED[func]}")
        return func(*args, **(kwargs or {}))


def checkpoint_contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """The contexts for a forward and for its recomputation in the backward (``context_fn`` of torch's checkpoint): the
    mode for the second, if it is active now, because a backward runs outside of the mode."""
    return nullcontext(), BatchInvariantMode() if is_active() else nullcontext()


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if p and training:
        raise InvarianceError(
            f"invariant: the model drops {p} of an input by random numbers that belong to a batch. Set the dropout in "
            "its configuration to 0"
        )
    return input


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if dropout_p:
        raise InvarianceError(
            f"invariant: attention drops {dropout_p} of its weights, by random numbers that belong to a batch. Set "
            "the model's attention_dropout to 0"
        )
    if attn_mask is not None and attn_mask.dim() < 4:
        attn_mask = attn_mask.view(*[1] * (4 - attn_mask.dim()), *attn_mask.shape)
    return attention(query, key, value, attn_mask, scale=scale, is_causal=is_causal)


def _conv(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1, padding: Sizes | str = 0,
    dilation: Sizes = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    return products.convolve(input, weight, bias, stride, padding, dilation, groups)


def _mm(input: Tensor, mat2: Tensor, out_dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    y = products.mm(input, mat2, out_dtype)
    return y if out is None else out.copy_(y)


def _rmatmul(b: Tensor, a: Tensor) -> Tensor:
    return products.matmul(a, b)


_MANY = "whose order on a GPU depends on the number of rows, and it has no replacement"
_SPREAD = (torch.var, torch.std, torch.var_mean, torch.std_mean, torch.norm, Tensor.var, Tensor.std, Tensor.norm)
_NORMS = (torch.linalg.norm, torch.linalg.vector_norm, F.normalize, F.cosine_similarity, F.group_norm, F.batch_norm)

REPLACED: Mapping[object, Callable[..., Any]] = {
    F.linear: products.linear,
    **dict.fromkeys((torch.mm, Tensor.mm), _mm),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), products.matmul),
    Tensor.__rmatmul__: _rmatmul,
    **dict.fromkeys((torch.addmm, Tensor.addmm), products.addmm),
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _conv),
    **dict.fromkeys(
        (f for f in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f), products.grouped_mm
    ),
    F.scaled_dot_product_attention: _sdpa,
    F.dropout: _dropout,
    F.silu: pointwise.silu,
    F.gelu: pointwise.gelu,
    F.softplus: pointwise.softplus,
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, torch.special.expit), pointwise.sigmoid),
    **dict.fromkeys((torch.rsqrt, Tensor.rsqrt), pointwise.rsqrt),
    **dict.fromkeys((torch.exp2, Tensor.exp2, torch.special.exp2), pointwise.exp2),
    **{f: rows.make_sum(f) for f in (torch.sum, Tensor.sum)},
    **{f: rows.make_mean(f) for f in (torch.mean, Tensor.mean)},
    **{f: rows.make_softmax(f) for f in (F.softmax, torch.softmax, Tensor.softmax)},
    **{f: rows.make_log_softmax(f) for f in (F.log_softmax, torch.log_softmax, Tensor.log_softmax)},
    **{f: rows.make_logsumexp(f) for f in (torch.logsumexp, Tensor.logsumexp)},
    **{f: rows.make_rms_norm(f) for f in (F.rms_norm, torch.rms_norm)},
    **{f: rows.make_topk(f) for f in (torch.topk, Tensor.topk)},
    F.layer_norm: rows.layer_norm,
    torch.native_layer_norm: rows.native_layer_norm,
    **{f: rows.make_refusal(f, _MANY) for f in (*_SPREAD, *_NORMS, F.instance_norm, torch.cdist)},
}
"""torch function -> its batch-invariant replacement."""

_SUMS = "whose sums depend on the other rows; a model that needs it cannot be invariant"
REFUSED: Mapping[object, str] = {
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm, torch.addbmm, Tensor.addbmm, torch.einsum, torch.tensordot), _SUMS),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d, F.bilinear), _SUMS),
    F.multi_head_attention_forward: "which has its own attention; a model that needs it cannot be invariant",
    F.mish: "which a CPU computes differently at the end of a tensor, and it has no replacement",
    F.logsigmoid: "which a CPU computes differently at the end of a tensor, and it has no replacement",
    F.glu: "which a CPU computes differently at the end of a tensor, and it has no replacement",
}
"""torch function -> why it cannot be called in the mode."""
