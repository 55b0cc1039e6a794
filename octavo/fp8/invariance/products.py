"""Batch-invariant matrix products.

A library chooses its kernel by the sizes of the operands: one row takes another kernel than two, two another than four,
and threads split many rows into pieces whose last rows take yet another path. The order in which the K terms of an
element are added, and with it the last bits, then depend on the number of rows.

Here rows are padded with zeros to a multiple of :data:`ROWS`, and columns to at least as many. On the CPUs that were
tested (``tests/fp8/invariance``) every row of such a product has the same bits, whatever the other rows, its position
and their number, for one thread and several. The library's interface does not promise that. So each kind of product is
tested once, on random operands (:func:`_is_row_invariant`). If a row depends on the number of rows, the product runs
in pieces of exactly :data:`ROWS` rows, always with the same shape; if that is not invariant either, it is rejected.

On devices with batch-invariant kernels (:mod:`octavo.fp8.invariance.devices`) these are used instead; gradients use
torch's products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from octavo.fp8.invariance.devices import InvarianceError, RowKernels, kernels_for

Sizes = int | Sequence[int]  # of a convolution: one for all dimensions, or one per dimension
ROWS = 16
_TEST_MULTIPLES = (1, 2, 3, 5, 9)  # multiples of ROWS rows that are compared


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Batch-invariant ``F.linear``: x [..., K] @ weight [N, K].T + bias [N] -> [..., N]; follows autocast."""
    if _is_autocast(x):
        with torch.autocast(x.device.type, enabled=False):
            return linear(*_to_autocast_dtype(x, weight, bias))
    lead, rows = x.shape[:-1], x.shape[:-1].numel()
    x_MK = x.reshape(rows, x.shape[-1])
    if kernels_for(x) is None and rows % ROWS == 0 and weight.shape[0] >= ROWS and _is_row_invariant(x_MK, weight.t()):
        y_MN = F.linear(x_MK, weight, bias)
    else:
        y_MN = _Linear.apply(x_MK, weight, bias)
    return y_MN.view(*lead, weight.shape[0])


def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Batch-invariant a [M, K] @ b [K, N]; follows autocast."""
    if _is_autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            a, b = _to_autocast_dtype(a, b)
            return mm(a, b, out_dtype)
    if (kernels := kernels_for(a)) is not None:
        return _run_kernel(kernels, a, b, None, out_dtype=out_dtype)
    return _run_padded(a, b, torch.mm if out_dtype is None else partial(torch.mm, out_dtype=out_dtype))


def addmm(start: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Batch-invariant beta start + alpha a [M, K] @ b [K, N]; ``start`` is [M, N] or one row. Follows autocast."""
    if _is_autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return addmm(*_to_autocast_dtype(start, a, b), beta=beta, alpha=alpha)
    if (kernels := kernels_for(a)) is not None:
        return _run_kernel(kernels, a, b, start, beta, alpha)
    whole = start.dim() == 2 and start.shape[0] == a.shape[0]
    if not whole:
        return _run_padded(
            a, b, lambda rows, cols: torch.addmm(_pad_columns(start, cols), rows, cols, beta=beta, alpha=alpha)
        )

    def product(rows: Tensor, cols: Tensor, start_rows: Tensor) -> Tensor:
        return torch.addmm(_pad_columns(start_rows, cols), rows, cols, beta=beta, alpha=alpha)

    return _run_padded(a, b, product, start)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` for rows and one matrix. Raises InvarianceError for batches of matrices on both sides, such as
    attention without ``sdpa``, unless the contracted dimension has size 1 and no sum is needed."""
    if _is_autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return matmul(*_to_autocast_dtype(a, b))
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
        f"invariant: the model multiplies batches of matrices, {list(a.shape)} @ {list(b.shape)}, whose rows would "
        "depend on the number of rows. Eager attention does this: load the model with "
        "attn_implementation='sdpa'; a model with linear attention cannot be invariant"
    )


def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor | None = None, **options: Any) -> Tensor:
    """Batch-invariant ``torch._grouped_mm``: rows a [R, K] times b [E, K, N]; rows of expert e end at ``offs[e]``.

    Autocast does not apply, as in torch. Raises InvarianceError for the other forms of the function.
    """
    if _is_autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return grouped_mm(a, b, offs=offs, **options)
    if offs is None or a.dim() != 2 or b.dim() != 3 or options.get("bias") is not None:
        raise InvarianceError(
            f"invariant: the model has a grouped product of {list(a.shape)} and {list(b.shape)}, but only rows "
            "[R, K] times experts [E, K, N] have a batch-invariant form"
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
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes | str, dilation: Sizes, groups: int
) -> Tensor:
    """Convolve with non-overlapping patches, as the first layer of a vision tower; each patch is a row of a product.

    x [B, C, *sizes], weight [N, C, *kernel] -> [B, N, *counts]. Raises InvarianceError if patches overlap.
    """
    dims, kernel = weight.dim() - 2, list(weight.shape[2:])
    steps, pads, gaps = ([v] * dims if isinstance(v, int) else list(v) for v in (stride, padding, dilation))
    if x.dim() != dims + 2 or groups != 1 or steps != kernel or any(pads) or any(g != 1 for g in gaps):
        raise InvarianceError(
            f"invariant: a convolution with kernel {kernel}, stride {steps}, padding {pads} and {groups} groups "
            "has no batch-invariant form; only non-overlapping patches have one"
        )
    counts = [size // k for size, k in zip(x.shape[2:], kernel, strict=True)]
    for i, (count, k) in enumerate(zip(counts, kernel, strict=True)):
        x = x.narrow(2 + i, 0, count * k)
    cells = [n for pair in zip(counts, kernel, strict=True) for n in pair]
    order = [0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)]
    patches = x.reshape(*x.shape[:2], *cells).permute(order).reshape(x.shape[0], *counts, weight[0].numel())
    return linear(patches, weight.flatten(1), bias).movedim(-1, 1)


class _Linear(torch.autograd.Function):
    """A product whose rows are padded only for the forward: the backward gets x without padding."""

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


def _run_kernel(
    kernels: RowKernels, a: Tensor, b: Tensor, start: Tensor | None, beta: float = 1, alpha: float = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    y: Tensor = _Kernel.apply(a, b, start, beta, alpha, out_dtype or a.dtype, kernels)
    return y


class _Kernel(torch.autograd.Function):
    """Computes alpha a @ b + beta start with a device's kernels, and gradients with torch."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, start: Tensor | None, beta: float, alpha: float, dtype: torch.dtype,
        kernels: RowKernels,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(a, b)
        ctx.beta, ctx.alpha, ctx.start = beta, alpha, None if start is None else (start.shape, start.dtype)
        if not a.shape[0] or not b.shape[1]:
            return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
        return kernels.product(_decode_values(a), _decode_values(b), start, beta, alpha, dtype)

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


def _decode_values(x: Tensor) -> Tensor:
    """Return x as a plain tensor; multiplying by 1 decodes a frozen FP8 weight."""
    return x if type(x) in (Tensor, Parameter) else x * 1


class _GroupedKernel(torch.autograd.Function):
    """Multiplies rows of experts with a device's kernels, and computes gradients with torch's grouped product."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, ends: Tensor, kernels: RowKernels) -> Tensor:
        ctx.save_for_backward(a, b, ends)
        return kernels.grouped_product(a, _decode_values(b), ends) if a.shape[0] else a.new_empty(0, b.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        a, b, ends = ctx.saved_tensors
        with torch.enable_grad():
            a, b = (t.detach().requires_grad_() for t in (a, b))
            y = torch._grouped_mm(a, b, offs=ends)
        used = (torch.arange(len(dy), device=dy.device) < ends[-1])[:, None]
        da, db = torch.autograd.grad(y, (a, b), torch.where(used, dy, 0))
        has_rows = ends.diff(prepend=ends.new_zeros(1)) > 0
        # torch leaves rows of no expert, and experts without rows, uninitialized.
        return torch.where(used, da, 0), torch.where(has_rows.view(-1, 1, 1), db, 0), None, None


def _run_padded(a: Tensor, b: Tensor, product: Callable[..., Tensor], *by_row: Tensor) -> Tensor:
    """Return ``product(a, b, *by_row)`` batch-invariantly; each tensor of ``by_row`` has as many rows as a."""
    rows, cols = a.shape[0], b.shape[1]
    if not rows or not cols:
        return product(a, b, *by_row)
    padding = -rows % ROWS
    if padding:
        a, by_row = F.pad(a, (0, 0, 0, padding)), tuple(F.pad(t, (0, 0, 0, padding)) for t in by_row)
    if cols < ROWS:
        b = F.pad(b, (0, ROWS - cols))
    if _is_row_invariant(a, b):
        y = product(a, b, *by_row)
    else:
        pieces = zip(*(t.split(ROWS) for t in (a, *by_row)), strict=True)
        y = torch.cat([product(piece, b, *others) for piece, *others in pieces])
    return y[:rows, :cols] if y.shape != (rows, cols) else y


def _pad_columns(start: Tensor, b: Tensor) -> Tensor:
    """Pad ``start`` to the number of columns of b."""
    return F.pad(start, (0, b.shape[1] - start.shape[-1])) if 1 < start.shape[-1] < b.shape[1] else start


_test_results: dict[tuple[object, ...], bool] = {}


@torch.no_grad()
def _is_row_invariant(a: Tensor, b: Tensor) -> bool:
    """Return True if a row of a product with a matrix like b [K, N] has the same bits for any number of rows. Tested
    once for each size, dtype, memory order and number of threads."""
    key = (a.dtype, b.shape, b.stride(0) > b.stride(1), torch.get_num_threads())
    if key not in _test_results:
        _test_results[key] = _test_rows(a.dtype, b)
    return _test_results[key]


def _test_rows(dtype: torch.dtype, b: Tensor) -> bool:
    """Run the test of :func:`_is_row_invariant`. Raises InvarianceError if the bits of a row depend on its position
    among ROWS rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(_TEST_MULTIPLES) * ROWS, b.shape[0], generator=generator).to(dtype)
    w = torch.randn(*reversed(b.shape), generator=generator).to(dtype)
    w = w.t() if b.stride(0) <= b.stride(1) else w.t().contiguous()
    by_piece = torch.cat([torch.mm(piece, w) for piece in x.split(ROWS)])
    shifted = torch.cat([torch.mm(piece.roll(5, 0), w).roll(-5, 0) for piece in x.split(ROWS)])
    if not torch.equal(by_piece, shifted):
        raise InvarianceError(
            f"invariant: on this machine, with {torch.get_num_threads()} threads, the bits of a row of a product with "
            f"{list(b.shape)} in {dtype} depend on its position among {ROWS} rows. Use another number of threads, "
            "train.precision: fp32, or rl.invariant: false"
        )
    return all(torch.equal(torch.mm(x[: n * ROWS], w), by_piece[: n * ROWS]) for n in _TEST_MULTIPLES)


def _is_autocast(x: Tensor) -> bool:
    """Return True if autocast would change the dtype of a product of x; it does not change float64."""
    device = x.device.type
    is_enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return is_enabled and x.dtype != torch.float64


def _to_autocast_dtype(*operands: Tensor | None) -> tuple[Any, ...]:
    """Cast the operands of a product to autocast's dtype."""
    return tuple(None if t is None else t.to(torch.get_autocast_dtype(t.device.type)) for t in operands)
