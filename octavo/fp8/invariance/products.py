"""Products of matrices whose rows do not depend on their number.

A library of matrix products picks its kernel by the sizes of the operands: one row goes to another kernel than two, two
to another than four, and threads cut many rows into pieces whose last rows take yet another path. The order in which
the K terms of an element are added, and with it the last bits, then depend on how many rows came along.

Here rows are padded with zeros to a multiple of :data:`ROWS`, and columns to at least as many. On the CPUs that this
was tried on (``tests/fp8/invariance``) every row of such a product has the same bits, whatever its neighbours, its
place and their number, for one thread and several. That is a property of the library, not of its interface. So each
kind of product is tried once, on random operands (:func:`_even`); where rows do depend on their number, it runs in
pieces of exactly :data:`ROWS` rows, a call of one shape; and where that does not help either, it is refused.

Where a device has kernels of its own (:mod:`octavo.fp8.invariance.devices`) they multiply instead; gradients are made
by torch's products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from octavo.fp8.invariance.devices import InvarianceError, RowKernels, kernels_for

ROWS = 16
_TRIED = (1, 2, 3, 5, 9)  # how many times ROWS rows are tried against each other


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: x [..., K] @ weight [N, K].T + bias [N] -> [..., N], rows by themselves; autocast as ever."""
    if _autocast(x):
        with torch.autocast(x.device.type, enabled=False):
            return linear(*_lowered(x, weight, bias))
    lead, rows = x.shape[:-1], x.shape[:-1].numel()
    x_MK = x.reshape(rows, x.shape[-1])
    if kernels_for(x) is None and rows % ROWS == 0 and weight.shape[0] >= ROWS and _even(x_MK, weight.t()):
        y_MN = F.linear(x_MK, weight, bias)
    else:
        y_MN = _Linear.apply(x_MK, weight, bias)
    return y_MN.view(*lead, weight.shape[0])


def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """a [M, K] @ b [K, N], each row of a by itself; autocast as ever."""
    if _autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            a, b = _lowered(a, b)
            return mm(a, b, out_dtype)
    if (kernels := kernels_for(a)) is not None:
        return _by_kernels(kernels, a, b, None, out_dtype=out_dtype)
    return _padded(a, b, torch.mm if out_dtype is None else partial(torch.mm, out_dtype=out_dtype))


def addmm(start: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta start + alpha a [M, K] @ b [K, N], each row by itself; ``start`` is [M, N] or one row of it. Autocast as
    ever."""
    if _autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return addmm(*_lowered(start, a, b), beta=beta, alpha=alpha)
    if (kernels := kernels_for(a)) is not None:
        return _by_kernels(kernels, a, b, start, beta, alpha)
    whole = start.dim() == 2 and start.shape[0] == a.shape[0]
    if not whole:
        return _padded(a, b, lambda rows, cols: torch.addmm(_wide(start, cols), rows, cols, beta=beta, alpha=alpha))

    def product(rows: Tensor, cols: Tensor, own: Tensor) -> Tensor:
        return torch.addmm(_wide(own, cols), rows, cols, beta=beta, alpha=alpha)

    return _padded(a, b, product, start)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of rows and a matrix. Raises InvarianceError for batches of matrices on both sides, such as attention
    written out, unless they contract one element, which is no sum."""
    if _autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return matmul(*_lowered(a, b))
    if b.dim() == 1 and a.dim() == 1:
        return mm(a.unsqueeze(0), b.unsqueeze(1)).view(())
    if b.dim() == 1:
        return matmul(a, b.unsqueeze(1)).squeeze(-1)
    if a.dim() == 1:
        return matmul(a.unsqueeze(0), b).squeeze(-2)
    if b.dim() == 2:
        return mm(a.reshape(a.shape[:-1].numel(), a.shape[-1]), b).view(*a.shape[:-1], b.shape[1])
    if a.shape[-1] == 1:
        return torch.matmul(a, b) if kernels_for(a) is None else a * b
    raise InvarianceError(
        f"invariant: a product of batches of matrices, {list(a.shape)} @ {list(b.shape)}, was found in the model, and "
        "its rows would depend on their number. Attention written out is one: load the model with "
        "attn_implementation='sdpa'; a model with linear attention cannot be invariant"
    )


def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor | None = None, **more: Any) -> Tensor:
    """torch's grouped product: rows a [R, K] times b [E, K, N], the rows of an expert ending at ``offs`` [E].

    Autocast leaves it alone, as it does torch's. Raises InvarianceError for its other forms.
    """
    if _autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return grouped_mm(a, b, offs=offs, **more)
    if offs is None or a.dim() != 2 or b.dim() != 3 or more.get("bias") is not None:
        raise InvarianceError(
            f"invariant: a grouped product of {list(a.shape)} and {list(b.shape)} was found, and only rows "
            "[R, K] of experts [E, K, N] are known by their rows"
        )
    if (kernels := kernels_for(a)) is not None:
        grouped: Tensor = _GroupedKernel.apply(a, b, offs, kernels)
        return grouped
    ends = offs.tolist()
    parts = [
        mm(a[start:end], b[e]) for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start
    ]
    used = ends[-1] if ends else 0
    return torch.cat([*parts, a.new_zeros(a.shape[0] - used, b.shape[2])])


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """A convolution that cuts its input into patches, as vision towers begin: each patch is a row of a product.

    x [B, C, *sizes], weight [N, C, *kernel] -> [B, N, *counts]. Raises InvarianceError where patches overlap.
    """
    dims, kernel = weight.dim() - 2, list(weight.shape[2:])
    steps, pads, gaps = ([v] * dims if isinstance(v, int) else list(v) for v in (stride, padding, dilation))
    if x.dim() != dims + 2 or groups != 1 or steps != kernel or any(pads) or any(g != 1 for g in gaps):
        raise InvarianceError(
            f"invariant: a convolution with kernel {kernel}, stride {steps}, padding {pads} and {groups} groups was "
            "found; only patches that do not overlap are known by their rows"
        )
    counts = [size // k for size, k in zip(x.shape[2:], kernel, strict=True)]
    for i, (count, k) in enumerate(zip(counts, kernel, strict=True)):
        x = x.narrow(2 + i, 0, count * k)
    cells = [n for pair in zip(counts, kernel, strict=True) for n in pair]
    where = [0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)]
    patches = x.reshape(*x.shape[:2], *cells).permute(where).reshape(x.shape[0], *counts, weight[0].numel())
    return linear(patches, weight.flatten(1), bias).movedim(-1, 1)


class _Linear(torch.autograd.Function):
    """A product whose rows are padded for the forward alone: what is saved is x as it came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        b = weight.t()
        return mm(x, b) if bias is None else addmm(bias, x, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad
        dx = torch.mm(dy, weight) if needs_x else None
        dw = torch.mm(dy.t(), x) if needs_w else None
        return dx, dw, dy.sum(0) if needs_b else None


def _by_kernels(
    kernels: RowKernels, a: Tensor, b: Tensor, start: Tensor | None, beta: float = 1, alpha: float = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    y: Tensor = _Kernel.apply(a, b, start, beta, alpha, out_dtype or a.dtype, kernels)
    return y


class _Kernel(torch.autograd.Function):
    """alpha a @ b + beta start by a device's kernels."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, start: Tensor | None, beta: float, alpha: float, dtype: torch.dtype,
        kernels: RowKernels,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(a, b)
        ctx.beta, ctx.alpha, ctx.start = beta, alpha, None if start is None else (start.shape, start.dtype)
        if not a.shape[0] or not b.shape[1]:
            return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
        return kernels.product(_values(a), _values(b), start, beta, alpha, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        needs_a, needs_b, needs_start = ctx.needs_input_grad[:3]
        scaled = (dy if ctx.alpha == 1 else dy * ctx.alpha).to(a.dtype)
        da = torch.mm(scaled, b.t()) if needs_a else None
        db = torch.mm(a.t(), scaled) if needs_b else None
        ds = None
        if needs_start:
            shape, dtype = ctx.start
            ds = (dy * ctx.beta).sum_to_size(shape).to(dtype)
        return da, db, ds, None, None, None, None


def _values(x: Tensor) -> Tensor:
    """x as a plain tensor: what a frozen FP8 weight is decoded to by an operation that asks for its values."""
    return x if type(x) in (Tensor, Parameter) else x * 1


class _GroupedKernel(torch.autograd.Function):
    """Rows of experts by a device's kernels; gradients expert by expert."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, ends: Tensor, kernels: RowKernels) -> Tensor:
        ctx.save_for_backward(a, b, ends)
        return kernels.grouped_product(a, _values(b), ends) if a.shape[0] else a.new_empty(0, b.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        a, b, ends = ctx.saved_tensors
        with torch.enable_grad():
            a, b = (t.detach().requires_grad_() for t in (a, b))
            y = torch._grouped_mm(a, b, offs=ends)
        used = (torch.arange(len(dy), device=dy.device) < ends[-1])[:, None]
        da, db = torch.autograd.grad(y, (a, b), torch.where(used, dy, 0))
        some = ends.diff(prepend=ends.new_zeros(1)) > 0
        # torch writes nothing for rows of no expert, nor for an expert without rows
        return torch.where(used, da, 0), torch.where(some.view(-1, 1, 1), db, 0), None, None


def _padded(a: Tensor, b: Tensor, product: Callable[..., Tensor], *beside: Tensor) -> Tensor:
    """``product(a, b, *beside)`` in which rows stand for themselves; ``beside`` has the rows of a."""
    rows, cols = a.shape[0], b.shape[1]
    if not rows or not cols:
        return product(a, b, *beside)
    more = -rows % ROWS
    if more:
        a, beside = F.pad(a, (0, 0, 0, more)), tuple(F.pad(t, (0, 0, 0, more)) for t in beside)
    if cols < ROWS:
        b = F.pad(b, (0, ROWS - cols))
    if _even(a, b):
        y = product(a, b, *beside)
    else:
        parts = zip(*(t.split(ROWS) for t in (a, *beside)), strict=True)
        y = torch.cat([product(own, b, *more_of) for own, *more_of in parts])
    return y[:rows, :cols] if y.shape != (rows, cols) else y


def _wide(start: Tensor, b: Tensor) -> Tensor:
    """What a product is added to, with the columns that b was padded to."""
    return F.pad(start, (0, b.shape[1] - start.shape[-1])) if 1 < start.shape[-1] < b.shape[1] else start


_known: dict[tuple[Any, ...], bool] = {}


@torch.no_grad()
def _even(a: Tensor, b: Tensor) -> bool:
    """Whether rows of products with matrices such as b [K, N] have their bits whatever their number; tried once for
    each size, dtype, order in memory and number of threads."""
    key = (a.dtype, b.shape, b.stride(0) > b.stride(1), torch.get_num_threads())
    if key not in _known:
        _known[key] = _trial(a.dtype, b)
    return _known[key]


def _trial(dtype: torch.dtype, b: Tensor) -> bool:
    """Raises InvarianceError where not even pieces of ROWS rows give a row the same bits at every place."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(_TRIED) * ROWS, b.shape[0], generator=generator).to(dtype)
    w = torch.randn(*reversed(b.shape), generator=generator).to(dtype)
    w = w.t() if b.stride(0) <= b.stride(1) else w.t().contiguous()
    piece = torch.cat([torch.mm(own, w) for own in x.split(ROWS)])
    turned = torch.cat([torch.mm(own.roll(5, 0), w).roll(-5, 0) for own in x.split(ROWS)])
    if not torch.equal(piece, turned):
        raise InvarianceError(
            f"invariant: on this machine a row of a product of {list(b.shape)} in {dtype} has other bits at another "
            f"place of {ROWS} rows, with {torch.get_num_threads()} threads. Use another number of threads or "
            "train.precision: fp32, or rl.invariant: false"
        )
    return all(torch.equal(torch.mm(x[: n * ROWS], w), piece[: n * ROWS]) for n in _TRIED)


def _autocast(x: Tensor) -> bool:
    """Whether autocast would lower a product of x; it leaves float64 alone."""
    device = x.device.type
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return on and x.dtype != torch.float64


def _lowered(*given: Tensor | None) -> tuple[Any, ...]:
    """The operands of a product in autocast's dtype."""
    return tuple(None if t is None else t.to(torch.get_autocast_dtype(t.device.type)) for t in given)
