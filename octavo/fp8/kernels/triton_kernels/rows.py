"""The batch-invariant kernels (``invariance.RowKernels``). Each kind and size is tested on the device before use.

FP8 products use :mod:`gemm` and :mod:`grouped` in one form, whose tile depends only on casts and device
(``tiles.fixed``). The random operands of a test have a few tiles of columns plus the edge of the real operands:
programs of other columns run the same code.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import Quantized
from octavo.fp8.invariance import TRIAL_ROWS, InvarianceError, prove
from octavo.fp8.kernels.groups import Groups, group_rows
from octavo.fp8.kernels.triton_kernels import cast, gemm, grouped, grouped_cast, row_attention, row_products, row_sums

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COLUMNS = 512  # of a trial, without the ragged edge
_EXPERTS = 3  # of a trial: row r has expert r % 3
_Run = Callable[[Tensor], Tensor]


def product(a: Tensor, b: Tensor, start: Tensor | None, beta: float, alpha: float, dtype: torch.dtype) -> Tensor:
    """alpha a [M, K] @ b [K, N] + beta start, as ``row_products.product``. Raises InvarianceError for mixed dtypes."""
    _check("a product", a, b)
    inner, cols, laid = b.shape[0], _trial_columns(b.shape[1]), b.stride(0) <= b.stride(1)

    def begin() -> _Run:
        x, w = _random(1, a, TRIAL_ROWS, inner), _transpose_weight(_random(2, a, cols, inner), laid)
        return lambda which: row_products.product(x[which], w, None, 1.0, 1.0, dtype)

    key = ("product", a.device, a.dtype, dtype, inner, cols, laid)
    prove(key, f"a product with {list(b.shape)} in {a.dtype}", begin)
    return row_products.product(a, b, start, beta, alpha, dtype)


def grouped_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Rows of a by their expert's b, as ``row_products.grouped_product``. Raises InvarianceError for mixed dtypes."""
    _check("a grouped product", a, b)
    inner, cols, laid = b.shape[1], _trial_columns(b.shape[2]), b.stride(1) <= b.stride(2)

    def begin() -> _Run:
        x, w = _random(1, a, TRIAL_ROWS, inner), _transpose_weight(_random(2, a, _EXPERTS, cols, inner), laid)

        def run(which: Tensor) -> Tensor:
            expert = which % _EXPERTS
            order = expert.argsort(stable=True)
            expert_ends = torch.bincount(expert, minlength=_EXPERTS).cumsum(0).to(a.device)
            return row_products.grouped_product(x[which[order]], w, expert_ends)[order.argsort().to(a.device)]

        return run

    key = ("grouped product", a.device, a.dtype, inner, cols, laid)
    prove(key, f"a grouped product with {list(b.shape)} in {a.dtype}", begin)
    return row_products.grouped_product(a, b, ends)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, positions: Tensor | None, real: Tensor | None,
    window: int | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Arguments and result as ``row_attention.attend``. Raises InvarianceError for a dtype that no kernel takes."""
    k, v = k.to(q.dtype), v.to(q.dtype)  # lossless: a cache that was read in fp32 holds numbers of q's dtype
    _check("attention", q, k, v)
    heads, size, wide, count = q.shape[1] // k.shape[1], q.shape[3], v.shape[3], TRIAL_ROWS

    def begin() -> _Run:
        """All queries as one sequence with a mask; fewer queries as one sequence each, by their positions; a single
        query with keys for each of its heads, as transformers repeats them."""
        x, keys, values = (_random(i, q, n, count, d) for i, n, d in ((1, heads, size), (2, 1, size), (3, 1, wide)))
        seen = torch.ones(count, count, dtype=torch.bool, device=q.device).tril()

        def run(which: Tensor) -> Tensor:
            if len(which) == count:
                whole = (x[None], keys[None], values[None], seen[None, None], None, seen[-1:])
                return row_attention.attend(*whole, None, scale)[0][0].transpose(0, 1)
            queries, at = x[:, which].transpose(0, 1)[:, :, None], which[:, None].to(q.device)
            kv_heads = heads if len(which) == 1 else 1
            many = (keys.expand(len(which), kv_heads, count, size), values.expand(len(which), kv_heads, count, wide))
            return row_attention.attend(queries, *many, None, at, None, None, scale)[0][:, :, 0]

        return run

    key = ("attention", q.device, q.dtype, heads, size, wide)
    prove(key, f"attention of {heads} heads of {size} and {wide} in {q.dtype}", begin)
    return row_attention.attend(q, k, v, mask, positions, real, window, scale)


def sums(x: Tensor) -> Tensor:
    """Return the sum of each row of x [R, N], as ``row_sums.sums``."""

    def begin() -> _Run:
        trial = _random(1, x, TRIAL_ROWS, x.shape[1])
        return lambda which: row_sums.sums(trial[which])

    prove(("sums", x.device, x.dtype, x.shape[1]), f"the sum of a row of {x.shape[1]} in {x.dtype}", begin)
    return row_sums.sums(x)


def fp8_product(x: Quantized, w: Quantized, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """y [M, N] = x [M, K] @ w [N, K].T + bias [N] by ``gemm.gemm`` with the one fixed tile."""
    cols, inner = w.data.shape

    def begin() -> _Run:
        trial = _random(1, w.scale, TRIAL_ROWS, inner, dtype=torch.float32)
        other = cast.quantize(_random(2, w.scale, _trial_columns(cols), inner, dtype=torch.float32), w.spec, 1)
        return lambda which: gemm.gemm(cast.quantize(trial[which], x.spec, 1), 1, other, 1, dtype, fixed=True)

    key = ("fp8", w.data.device, x.spec, w.spec, dtype, inner, _trial_columns(cols))
    prove(key, f"an FP8 product of {x.spec} with {w.spec} {[cols, inner]}", begin)
    return gemm.gemm(x, 1, w, 1, dtype, bias, fixed=True)


def fp8_grouped_product(
    x: Quantized, w: Quantized, groups: Groups, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """y [R, N] of rows [R, K] and experts [E, N, K] by ``grouped.fwd`` with the one fixed tile."""
    cols, inner = w.data.shape[1:]

    def begin() -> _Run:
        device = w.data.device
        trial = _random(1, w.scale, TRIAL_ROWS, inner, dtype=torch.float32)
        weights = _random(2, w.scale, _EXPERTS, _trial_columns(cols), inner, dtype=torch.float32)
        other = grouped_cast.quantize_experts(weights, w.spec)

        def run(which: Tensor) -> Tensor:
            laid = group_rows((which % _EXPERTS).to(device), _EXPERTS)
            rows = trial.new_zeros(laid.groups.rows, inner).index_copy_(0, laid.row_of, trial[which])
            codes = grouped_cast.quantize_rows(rows, x.spec, laid.groups)
            return grouped.fwd(codes, other, laid.groups, dtype, fixed=True)[laid.row_of]

        return run

    key = ("fp8 grouped", w.data.device, x.spec, w.spec, dtype, inner, _trial_columns(cols))
    prove(key, f"an FP8 grouped product of {x.spec} with {w.spec} {[cols, inner]}", begin)
    return grouped.fwd(x, w, groups, dtype, bias, fixed=True)


def _random(seed: int, like: Tensor, *size: int, dtype: torch.dtype | None = None) -> Tensor:
    """Random numbers on the device of ``like``, in its dtype, the same on all devices."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed), device="cpu")
    return x.to(like.device, dtype or like.dtype)


def _transpose_weight(w: Tensor, transposed: bool) -> Tensor:
    """Return w [..., N, K] as [..., K, N], a view or a contiguous copy."""
    return w.mT if transposed else w.mT.contiguous()


def _trial_columns(cols: int) -> int:
    """Return the columns of a trial: a few tiles and the same ragged edge as ``cols``."""
    return cols if cols < 2 * _COLUMNS else _COLUMNS + cols % _COLUMNS


def _check(what: str, *operands: Tensor) -> None:
    if operands[0].dtype not in DTYPES or any(x.dtype != operands[0].dtype for x in operands):
        dtypes = ", ".join(str(x.dtype).removeprefix("torch.") for x in operands)
        raise InvarianceError(
            f"invariant: {what} of {dtypes} was found on {operands[0].device}, and its kernels there take operands of "
            "one dtype, fp32, bf16 or fp16. Load the model in one of these, and leave TF32 off"
        )
