"""Casts of experts' rows and weights in Triton, with the kernels of ``cast``.

Rows [R, K] of all experts (:mod:`octavo.fp8.kernels.groups`): a tile of rows belongs to one expert, which the kernel
looks up on the device in ``groups.tiles``; rows after the expert's last one count as zeros with any content. Codes
have the layout of a matrix of R rows in :mod:`octavo.fp8.kernels.layout`, and so have scales of finite blocks and of
rows; scales of whole columns, [E, K], and of whole experts, [E, 1], are contiguous.

Weights [E, N, K]: a batch of matrices in the same layout, one after the other::

    codes    [E, free padded, contracted padded], contiguous
    scales   [E, free blocks, contracted blocks]: for each expert in the order of a matrix, with its padding, so that
             the stride between experts includes padding: read the strides

where contract 1 has N free and K contracted, contract 0 the reverse. ``data`` [E, N, K] and ``scale`` [E, N / r, K / c]
are views of the real elements, transposed for contract 0. ``layout.experts_k_major`` takes the codes as they are;
:func:`convert_to_k_major` copies them for the other contraction where a block serves both.
"""

from __future__ import annotations

from torch import Tensor

from octavo.fp8.arithmetic import cast as reference
from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.groups import Groups
from octavo.fp8.kernels.layout import Operand
from octavo.fp8.kernels.triton_kernels import cast
from octavo.fp8.kernels.triton_kernels.cast_plans import Jobs
from octavo.fp8.kernels.triton_kernels.room import allocate


def quantize_rows(x: Tensor, spec: CastSpec, groups: Groups, contract: int = 1) -> Quantized:
    """See ``Backend.quantize_rows``. One launch for finite blocks and rows, four where all rows share a scale. Raises
    CastError if x is not a matrix of ``groups.rows`` rows, or cannot be cast."""
    _check(x, groups)
    return _rows(x, ((spec, contract),), groups)[0]


def quantize_rows_both(x: Tensor, row: CastSpec, col: CastSpec, groups: Groups) -> tuple[Quantized, Quantized]:
    """See ``Backend.quantize_rows_both``: one pass over x for finite blocks, as :func:`cast.quantize_both`. Raises
    CastError as for :func:`quantize_rows`."""
    _check(x, groups)
    first, second = _rows(x, ((row, 1), (col, 0)), groups)
    return first, second


def _check(x: Tensor, groups: Groups) -> None:
    reference.check_castable(x)
    if x.dim() != 2 or x.shape[0] != groups.rows:
        raise CastError(
            f"quantize_rows: x has shape {list(x.shape)}, but its groups hold {groups.rows} rows; "
            "give the matrix whose rows they describe."
        )


def _rows(x: Tensor, jobs: Jobs, groups: Groups) -> list[Quantized]:
    if groups.experts:
        outs = cast.run(x.detach(), jobs, groups=groups)
    else:  # all rows are padding
        outs = [allocate(x, spec, contract, groups) for spec, contract in jobs]
        for out, (spec, _) in zip(outs, jobs, strict=True):
            out.codes.zero_()
            out.scales.fill_(127 if spec.scale == "e8m0" else 1)
    return [Quantized(out.data, out.scale, spec) for out, (spec, _) in zip(outs, jobs, strict=True)]


def quantize_experts(w: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
    """See ``Backend.quantize_experts``: all experts in one launch, three where rows, columns or all share a scale and
    no tile holds them. Raises CastError if w is not [E, N, K], or cannot be cast.
    """
    reference.check_castable(w)
    if w.dim() != 3:
        raise CastError(f"quantize_experts: weights have shape {list(w.shape)}; give [experts, outputs, inputs].")
    out = cast.run(w.detach(), ((spec, contract),))[0]
    return Quantized(out.data, out.scale, spec)


def convert_to_k_major(q: Quantized, contract: int) -> Operand:
    """Convert as ``layout.experts_k_major``, with a kernel for the copy of codes if one is needed."""
    return layout.experts_k_major(q, contract, cast.copy_to_layout)
