"""Batch-invariant sums, norms and softmax for devices on which torch's results depend on the number of rows.

A GPU's library splits a row among threads and blocks by the number of rows and by their alignment; the order of a sum,
and with it the last bits of a norm, then differ between one token and a thousand. On devices with batch-invariant
kernels (:mod:`octavo.fp8.invariance.devices`) every sum over dimensions of a tensor is a sum of rows, so that::

    softmax = e / sum e          with  e = exp(x - max x)         log_softmax = x - max x - log sum e
    mean = sum x / N             layer_norm = (x - mean) / sqrt(mean((x - mean)^2) + eps) * w + b
                                 rms_norm   =  x         / sqrt(mean(x^2) + eps) * w

in fp32, rounded once to the dtype that torch's function returns, which autocast may change. Maxima round nothing, and
other functions are elementwise. Gradients come from torch's functions. top-k uses a stable sort, so that equal values
keep their order: torch's own choice among them depends on the algorithm, and so on the number of rows.

On other devices torch's functions are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.fp8.invariance.devices import InvarianceError, RowKernels, autocast_disabled, kernels_for

Stock = Callable[..., Any]


def _replace_where_kernels(stock: Stock) -> Callable[[Callable[..., Any]], Stock]:
    """Decorate a function that replaces ``stock`` on devices with kernels, and takes (kernels, stock, input, ...)."""

    def replace(function: Callable[..., Any]) -> Stock:
        @wraps(stock)
        def wrapper(input: Tensor, *args: Any, **kwargs: Any) -> Any:
            kernels = kernels_for(input) if input.is_floating_point() and input.numel() else None
            if kernels is None:
                return stock(input, *args, **kwargs)
            return function(kernels, stock, input, *args, **kwargs)

        return wrapper

    return replace


def make_sum(stock: Stock) -> Stock:
    return _replace_where_kernels(stock)(partial(_reduce, mean=False))


def make_mean(stock: Stock) -> Stock:
    return _replace_where_kernels(stock)(partial(_reduce, mean=True))


def make_softmax(stock: Stock) -> Stock:
    return _replace_where_kernels(stock)(partial(_run_formula_over_dim, _softmax))


def make_log_softmax(stock: Stock) -> Stock:
    return _replace_where_kernels(stock)(partial(_run_formula_over_dim, _log_softmax))


def make_logsumexp(stock: Stock) -> Stock:
    @_replace_where_kernels(stock)
    def logsumexp(
        kernels: RowKernels, stock: Stock, x: Tensor, dim: int | Sequence[int], keepdim: bool = False
    ) -> Tensor:
        dim = dim if isinstance(dim, int) else _require_one_dim(stock, dim)

        def formula(x: Tensor) -> Tensor:
            top = x.amax(dim, keepdim=True)
            top = top.masked_fill(top.isinf(), 0.0)  # as torch does
            y = _sum(kernels, torch.exp(x - top), dim).log() + top
            return y if keepdim else y.squeeze(dim)

        return _apply_formula(formula, partial(stock, dim=dim, keepdim=keepdim), x)

    return logsumexp


def _reduce(
    kernels: RowKernels, stock: Stock, x: Tensor, dim: Any = None, keepdim: bool = False, *, mean: bool, **options: Any
) -> Tensor:
    """Return the sum or mean over some dimensions; torch reduces whole tensors, whose result belongs to no row."""
    if dim is None or dim == () or options.get("out") is not None:
        return stock(x, dim=dim, keepdim=keepdim, **options) if dim is not None else stock(x, **options)
    dims = sorted(d % x.dim() for d in ((dim,) if isinstance(dim, int) else dim))
    others = [d for d in range(x.dim()) if d not in dims]
    out = stock(x.new_empty(0, 1), dim=1, **options).dtype
    rows = x.permute(*others, *dims).reshape(-1, _count([x.shape[d] for d in dims]))
    y = _Sums.apply(rows, kernels).view([x.shape[d] for d in others])
    y = (y / rows.shape[1] if mean else y).to(out)
    return y.view([1 if d in dims else n for d, n in enumerate(x.shape)]) if keepdim else y


def _run_formula_over_dim(
    formula: Callable[[RowKernels, Tensor, int], Tensor], kernels: RowKernels, stock: Stock, x: Tensor,
    dim: int | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    if dim is None:
        dim = _require_one_dim(stock, dim)
    return _apply_formula(lambda x: formula(kernels, x, dim), partial(stock, dim=dim, **options), x)


def _softmax(kernels: RowKernels, x: Tensor, dim: int) -> Tensor:
    e = torch.exp(x - x.amax(dim, keepdim=True))
    return e / _sum(kernels, e, dim)


def _log_softmax(kernels: RowKernels, x: Tensor, dim: int) -> Tensor:
    x = x - x.amax(dim, keepdim=True)
    return x - _sum(kernels, torch.exp(x), dim).log()


def _sum(kernels: RowKernels, x: Tensor, dim: int) -> Tensor:
    """Return the sum over one dimension, which becomes 1."""
    rows = x.movedim(dim, -1)
    return kernels.sums(rows.reshape(-1, rows.shape[-1])).view(*rows.shape[:-1], 1).movedim(-1, dim)


def _require_one_dim(stock: Stock, dim: object) -> int:
    """Return the dimension in a sequence of one. Raises InvarianceError otherwise."""
    if isinstance(dim, Sequence) and len(dim) == 1 and isinstance(dim[0], int):
        return dim[0]
    raise InvarianceError(
        f"invariant: {stock.__name__} over dimensions {dim} has no batch-invariant form; pass one dimension"
    )


@_replace_where_kernels(torch.native_layer_norm)
def native_layer_norm(
    kernels: RowKernels, stock: Stock, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (y, mean, 1 / deviation) as torch's function does; not differentiable, for use in autograd functions."""
    wide = x.float().reshape(-1, _count(shape))
    y, mean, rstd = _standardize(kernels, wide, eps)
    lead = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
    return _scale_and_shift(y.view(x.shape), weight, bias).to(x.dtype), mean.view(lead), rstd.view(lead)


@_replace_where_kernels(F.layer_norm)
def layer_norm(
    kernels: RowKernels, stock: Stock, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    def formula(x: Tensor, *parameters: Tensor) -> Tensor:
        y = _standardize(kernels, x.reshape(-1, _count(normalized_shape)), eps)[0].view(x.shape)
        return _scale_and_shift(y, *_fill_optional(parameters, weight, bias))

    def run_stock(x: Tensor, *parameters: Tensor) -> Tensor:
        return stock(x, normalized_shape, *_fill_optional(parameters, weight, bias), eps)

    return _apply_formula(formula, run_stock, x, *(p for p in (weight, bias) if p is not None))


def make_rms_norm(stock: Stock) -> Stock:
    @_replace_where_kernels(stock)
    def rms_norm(
        kernels: RowKernels, stock: Stock, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:  # fmt: skip
        min_eps = torch.finfo(x.dtype).eps if eps is None else eps

        def formula(x: Tensor, *parameters: Tensor) -> Tensor:
            rows = x.reshape(-1, _count(normalized_shape))
            rstd = torch.rsqrt(kernels.sums(rows * rows) / rows.shape[1] + min_eps)
            return _scale_and_shift((rows * rstd[:, None]).view(x.shape), *parameters)

        def run_stock(x: Tensor, *parameters: Tensor) -> Tensor:
            return stock(x, normalized_shape, *parameters, eps=min_eps)

        return _apply_formula(formula, run_stock, x, *(() if weight is None else (weight,)))

    return rms_norm


def make_topk(stock: Stock) -> Stock:
    @_replace_where_kernels(stock)
    def topk(
        kernels: RowKernels, stock: Stock, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> Any:
        values, places = torch.sort(x, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), places.narrow(dim, 0, k)))

    return topk


def make_refusal(stock: Stock, why: str) -> Stock:
    """Return a function that raises InvarianceError on devices with kernels, where ``stock`` has no replacement."""

    @_replace_where_kernels(stock)
    def raise_error(kernels: RowKernels, stock: Stock, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise InvarianceError(f"invariant: the model calls {stock.__name__} on {x.device}, {why}")

    return raise_error


def _standardize(kernels: RowKernels, rows: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean = kernels.sums(rows) / rows.shape[1]
    centered = rows - mean[:, None]
    rstd = torch.rsqrt(kernels.sums(centered * centered) / rows.shape[1] + eps)
    return centered * rstd[:, None], mean, rstd


def _scale_and_shift(y: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _fill_optional(tensors: Sequence[Tensor], *parameters: Tensor | None) -> list[Tensor | None]:
    """Replace the parameters that are not None by ``tensors``, in order."""
    rest = iter(tensors)
    return [None if p is None else next(rest) for p in parameters]


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _apply_formula(formula: Callable[..., Tensor], stock: Stock, *tensors: Tensor) -> Tensor:
    """Apply ``formula`` to the tensors in fp32; the result has the dtype and the gradients of ``stock``."""
    # Autocast may change the dtype of the result, so ``stock`` is run on no rows.
    empty = [t.new_empty(0, *t.shape[1:]) if i == 0 else t for i, t in enumerate(tensors)]
    with torch.no_grad():
        out = stock(*empty).dtype
    y: Tensor = _Formula.apply(formula, stock, out, *tensors)
    return y


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, kernels: RowKernels) -> Tensor:
        ctx.shape, ctx.dtype = rows.shape, rows.dtype
        return kernels.sums(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy.to(ctx.dtype)[:, None].expand(ctx.shape), None


class _Formula(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, formula: Stock, stock: Stock, out: torch.dtype, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.stock, ctx.out = stock, out
        with autocast_disabled(tensors[0]):
            return formula(*(t if t.dtype == torch.float64 else t.float() for t in tensors)).to(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [t.detach().to(ctx.out).requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad(), autocast_disabled(dy):
            y = ctx.stock(*inputs)
        grads = torch.autograd.grad(y, inputs, dy)
        return None, None, None, *(g.to(t.dtype) for g, t in zip(grads, ctx.saved_tensors, strict=True))
