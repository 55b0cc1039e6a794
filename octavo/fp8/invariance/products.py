"""Products of matrices whose rows do not depend on their number.

A library of matrix products picks its kernel by the sizes of the operands: one row goes to another kernel than two, two
to another than four, and threads cut many rows into pieces whose last rows take yet another path. The order in which
the K terms of an element are added, and with it the last bits, then depend on how many rows came along.

Here rows are padded with zeros to a multiple of :data:`ROWS`, and columns to at least as many. On the CPUs that this
was tried on (``tests/fp8/invariance``) every row of such a product has the same bits, whatever its neighbours, its
place and their number, for one thread and several. That is a property of the library, not of its interface. So each
kind of product is tried once, on random operands (:func:`_even`); where rows do depend on their number, it runs in
pieces of exactly :data:`ROWS` rows, a call of one shape; and where that does not help either, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 16
_TRIED = (1, 2, 3, 5, 9)  # how many times ROWS rows are tried against each other


class InvarianceError(RuntimeError):
    """Something whose result for a row would depend on the rows beside it."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: x [..., K] @ weight [N, K].T + bias [N] -> [..., N], rows by themselves; autocast as ever."""
    if _autocast(x):
        with torch.autocast(x.device.type, enabled=False):
            return linear(*_lowered(x, weight, bias))
    lead, rows = x.shape[:-1], x.shape[:-1].numel()
    x_MK = x.reshape(rows, x.shape[-1])
    if rows % ROWS == 0 and weight.shape[0] >= ROWS and _even(x_MK, weight.t()):
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
    return _padded(a, b, torch.mm if out_dtype is None else partial(torch.mm, out_dtype=out_dtype))


def addmm(start: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta start + alpha a [M, K] @ b [K, N], each row by itself; ``start`` is [M, N] or one row of it. Autocast as
    ever."""
    if _autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return addmm(*_lowered(start, a, b), beta=beta, alpha=alpha)
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
        return torch.matmul(a, b)
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
