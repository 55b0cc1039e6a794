"""The host's side of :mod:`gluon_kernel`: which form runs, with which tile, and on how many programs.

A pair of operands in flight is (128 + BN) * 128 bytes, the two results that leave by TMA 128 * BN values. Of 227 KiB of
shared memory that leaves 6 stages of 128 x 128 with results in 16 bits, 5 with fp32, and 3 of 128 x 256, which serves
sums that are not held twice (see :mod:`tiles`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.fp8.arithmetic.cast import CastError, Quantized
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.groups import Groups
from octavo.fp8.kernels.triton_kernels import cast, grouped, tiles
from octavo.fp8.kernels.triton_kernels.gluon_kernel import gluon_gemm_kernel
from octavo.fp8.kernels.triton_kernels.launch import launch
from octavo.fp8.kernels.triton_kernels.tiles import Form, Gpu

ROWS, STEP = 128, 128
SHARED = 227 * 1024 - 1024  # of a program, less barriers and alignment
REGISTERS = 168  # a thread at launch: 12 warps of them; the two warpgroups then take what the loader gives back


def _form(a_q: Quantized, a_dim: int, b_q: Quantized, b_dim: int, fast: bool) -> Form:
    return tiles.form(tiles.grain(a_q.spec, a_dim), tiles.grain(b_q.spec, b_dim), fast=fast, gpu=Gpu(90, 1))


def gemm(
    a_q: Quantized, a_dim: int, b_q: Quantized, b_dim: int, out_dtype: torch.dtype, bias: Tensor | None = None,
    programs: int = 0,
) -> Tensor:  # fmt: skip
    """As :func:`gemm.gemm`: contract dimension ``a_dim`` of a with dimension ``b_dim`` of b, both matrices.
    ``programs``: how many share the tiles, in place of one a multiprocessor."""
    layout.check_fit("gluon", a_q, a_dim, b_q, b_dim)
    a, b = cast.relaid(a_q, a_dim), cast.relaid(b_q, b_dim)
    out = torch.empty(a.free, layout.round_up(b.free, 16), dtype=out_dtype, device=a.codes.device)
    if not (a.free and b.free and a.contracted):  # nothing to describe
        nothing = out[:, : b.free].zero_()
        return nothing if bias is None else nothing + bias.to(out_dtype)
    _run(
        _form(a_q, a_dim, b_q, b_dim, fast=a_dim == b_dim == 1), "", programs,
        (a.codes, a.free, a.contracted), (b.codes, b.free, b.contracted), out, (a.free, b.free, a.contracted, 0),
        a.scale, b.scale, (0, *a.scale.stride(), 0, *b.scale.stride()), bias, None, 1,
    )  # fmt: skip
    return out[:, : b.free].contiguous()


def grouped_rows(
    a_q: Quantized, w_q: Quantized, w_dim: int, groups: Groups, out_dtype: torch.dtype, bias: Tensor | None = None,
    programs: int = 0,
) -> Tensor:  # fmt: skip
    """As :func:`grouped.fwd` (``w_dim`` 1) and :func:`grouped.dgrad` (0)."""
    a, b = grouped._of_rows(a_q, 1), grouped._of_experts(w_q, w_dim)
    out = torch.empty(groups.rows, layout.round_up(b.free, 16), dtype=out_dtype, device=a.codes.device)
    if not (groups.rows and groups.experts and b.free and b.contracted):
        return out[:, : b.free].zero_()
    _run(
        _form(a_q, 1, w_q, w_dim, fast=w_dim == 1), "rows", programs,
        (a.codes, groups.rows, a.contracted), (b.codes, b.codes.shape[0], b.contracted), out,
        (groups.rows, b.free, a.contracted, b.rows), a.scale, b.scale, (*a.strides, *b.strides), bias, groups, 1,
    )  # fmt: skip
    return out[:, : b.free].contiguous()


def grouped_wgrad(dy_q: Quantized, x_q: Quantized, groups: Groups, out_dtype: torch.dtype, programs: int = 0) -> Tensor:
    """As :func:`grouped.wgrad`, for outputs in multiples of 64. Raises CastError for others."""
    a, b = grouped._of_rows(dy_q, 0), grouped._of_rows(x_q, 0)
    if a.free % 64:
        raise CastError(
            f"grouped_wgrad on gluon: experts of {a.free} outputs; a warpgroup stores 64 rows at a time, which must be "
            "one expert's. Use the triton backend."
        )
    out = torch.empty(groups.experts * a.free, layout.round_up(b.free, 16), dtype=out_dtype, device=a.codes.device)
    if out.numel() and groups.rows:
        _run(
            _form(dy_q, 0, x_q, 0, fast=False), "experts", programs,
            (a.codes, a.free, groups.rows), (b.codes, b.free, groups.rows), out, (a.free, b.free, groups.rows, 0),
            a.scale, b.scale, (*a.strides, *b.strides), None, groups, groups.experts,
        )  # fmt: skip
    else:
        out.zero_()
    return out.view(groups.experts, a.free, -1)[:, :, : b.free].contiguous()


def _run(
    form: Form, which: str, programs: int,
    a: tuple[Tensor, int, int], b: tuple[Tensor, int, int], out: Tensor, sizes: tuple[int, int, int, int],
    a_scale: Tensor, b_scale: Tensor, strides: tuple[int, ...],
    bias: Tensor | None, groups: Groups | None, batch: int,
) -> None:  # fmt: skip
    """Launch: operands as (codes, real rows, real columns), ``sizes`` as (M, N, K, rows held of one expert's b),
    ``strides`` of a's scales, then of b's: by expert, row and step."""
    m, n, *_ = sizes
    bias = None if bias is None else bias.contiguous()
    cols = 128 if form.twice else 256
    stages = (SHARED - ROWS * cols * out.element_size()) // ((ROWS + cols) * STEP)
    total = batch * layout.ceil_div(m, ROWS) * layout.ceil_div(n, cols)
    launch(
        gluon_gemm_kernel,
        (min(total, programs or tiles.gpu_of(out.device).processors),),
        _described(*a, (ROWS // 2, STEP)),
        _described(*b, (cols, STEP)),
        _described(out, out.shape[0], n, (ROWS // 2, cols)),
        *(a_scale, b_scale, bias),
        *((None, None, None) if groups is None else (groups.tiles, groups.starts, groups.sizes)),
        *(*sizes, total, *strides),
        FORM=form, GROUPS=which, BIAS=bias is not None, BN=cols, STAGES=stages, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip


def _described(held: Tensor, rows: int, cols: int, box: tuple[int, int]) -> TensorDescriptor:
    """A matrix in memory of which [rows, cols] are real: beyond them zeros are read and nothing is written."""
    swizzled = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * held.element_size(), rank=2)
    return TensorDescriptor(held, [rows, cols], [held.stride(0), 1], list(box), swizzled)
