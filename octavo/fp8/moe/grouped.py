"""Grouped FP8 GEMMs: the three GEMMs of a linear layer for all experts at once.

With the rows of all experts x [R, K] (grouped by :mod:`octavo.fp8.kernels.groups`), w [E, N, K] and dy [R, N], for each
expert e::

    fwd    y_e  = x_e @ w_e.T (+ bias_e)     dgrad  dx_e = dy_e @ w_e     wgrad  dw_e = dy_e.T @ x_e

A forward saves the same tensors as :mod:`octavo.fp8.dense.linear`: the codes of x in wgrad layout, and none if the
weight is frozen or the backward can recompute x. This code does not wait for the device: sizes of experts stay there,
and FLOPs of real rows are summed when they are read.

If grouped GEMMs are not supported (delayed scaling, which has a history per expert, or a backend without them), experts
run one by one with the three GEMMs of a linear layer. :func:`why_not_grouped` returns the reason, and plans show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.dense.gemms import DenseOps
from octavo.fp8.dense.inputs import CastRequest, QuantizedPair
from octavo.fp8.dense.linear import GemmArgs, fp8_linear_unchecked
from octavo.fp8.kernels.groups import TILE, Groups, expert_spans, select_expert
from octavo.fp8.kernels.registry import Backend, GemmOnlyBackend, Selection
from octavo.fp8.moe import grouped_high
from octavo.fp8.observe.recorder import LayerRecord, Result
from octavo.fp8.weights.shards import is_whole


def why_not_grouped(chosen: Recipe, selections: Mapping[str, Selection], device: torch.device) -> str | None:
    """Return why experts of this recipe run one by one on these backends, or None if they run grouped.

    A plan selects backends with grouped GEMMs if all GEMMs of the recipe have one.
    """
    if chosen.delayed is not None:
        return "delayed scaling keeps a history per expert"
    for gemm, selection in selections.items():
        why_not = selection.backend.supports(f"grouped_{gemm}", chosen, device, None)
        if why_not is not None:
            return f"{selection.backend.name}: {why_not}"
    return None


class Grouped(DenseOps):
    """Casts and GEMMs for rows of all experts, grouped by ``groups``. ``transposed``: the weight is stored as
    [E, K, N]."""

    def __init__(self, groups: Groups, transposed: bool) -> None:
        self.groups, self.transposed = groups, transposed
        self.tensors, self.sizes = groups[:3], groups.sizes

    def restore(self, tensors: Sequence[Tensor]) -> tuple[DenseOps, list[Tensor]]:
        sizes, starts, tiles, *rest = tensors
        return Grouped(Groups(sizes, starts, tiles, self.groups.rows), self.transposed), rest

    def cast(self, x: Tensor, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair:
        """Cast in one pass if one backend can do both casts; all backends give the same codes."""
        if (
            row is not None
            and col is not None
            and (row.backend is col.backend or isinstance(row.backend, GemmOnlyBackend))
        ):
            return row.backend.quantize_rows_both(x, row.spec, col.spec, self.groups)
        return (
            None if row is None else row.backend.quantize_rows(x, row.spec, self.groups, 1),
            None if col is None else col.backend.quantize_rows(x, col.spec, self.groups, 0),
        )

    def cast_weight(self, backend: Backend, w: Tensor, spec: CastSpec, contract: int) -> Quantized:
        return backend.quantize_experts(w, spec, contract)

    def flops(self, rows: int, outputs: int, inputs: int) -> int:
        return 2 * outputs * inputs

    def fwd(self, backend: Backend, x: Quantized, w: Quantized, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        return backend.grouped_fwd(x, w, self.groups, dtype, bias)

    def dgrad(self, backend: Backend, dy: Quantized, w: Quantized, dtype: torch.dtype) -> Tensor:
        return backend.grouped_dgrad(dy, w, self.groups, dtype)

    def wgrad(self, backend: Backend, dy: Quantized, x: Quantized, dtype: torch.dtype) -> Tensor:
        return self._to_stored_layout(backend.grouped_wgrad(dy, x, self.groups, dtype))

    def high_fwd(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return grouped_high.fwd(x, w, bias, self.groups)

    def high_dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        return grouped_high.dgrad(dy, w, self.groups)

    def high_wgrad(self, dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._to_stored_layout(grouped_high.wgrad(dy, x, self.groups, dtype))

    def bias_grad(self, dy: Tensor) -> Tensor:
        return grouped_high.bias_grad(dy, self.groups)

    def _to_stored_layout(self, dw: Tensor) -> Tensor:
        return dw.mT if self.transposed else dw

    # Reports for each expert with rows; they read values and wait for the device in any case.

    def operand(self, seen: LayerRecord, role: str, x: Tensor, q: Quantized) -> None:
        for expert, span in expert_spans(self.groups):
            seen.operand(role, x[span], select_expert(q, expert, span))

    def weight(self, seen: LayerRecord, w: Tensor, q: Quantized) -> None:
        for expert, _ in expert_spans(self.groups):
            seen.operand("w", w[expert], Quantized(q.data[expert], q.scale[expert], q.spec))

    def gradient(self, seen: LayerRecord, dw: Tensor, dy: Tensor, x: Tensor) -> None:
        dw = self._to_stored_layout(dw)  # [E, N, K] again
        for expert, span in expert_spans(self.groups):
            seen.gradient(dw[expert], dy[span], x[span])

    def product(self, seen: LayerRecord, gemm: str, a: Tensor, b: Tensor) -> None:
        for expert, span in expert_spans(self.groups):
            seen.product(gemm, a[span], b[span] if gemm == "wgrad" else b[expert])

    def result(self, seen: LayerRecord, product: Result) -> None:
        """Report the result of one expert with rows, selected by the checker."""
        filled = list(expert_spans(self.groups))
        if not filled:
            return
        expert, span = filled[seen.pick(len(filled))]

        def select(x: Tensor | None, rows: bool) -> Tensor | None:
            return None if x is None else x[span] if rows else x[expert]

        b_q, wgrad = product.b_q, product.gemm == "wgrad"
        part = (lambda out: self._to_stored_layout(out)[expert]) if wgrad else (lambda out: out[span])
        selected_b = (
            select_expert(b_q, expert, span) if wgrad else Quantized(b_q.data[expert], b_q.scale[expert], b_q.spec)
        )
        seen.result(
            product._replace(
                a=select(product.a, True),
                a_q=select_expert(product.a_q, expert, span),
                b=select(product.b, wgrad),
                b_q=selected_b,
                bias=select(product.bias, False),
                out=part(product.out),
                again=lambda: part(product.again()),
            )
        )


def grouped_gemms(x: Tensor, bias: Tensor | None, call: GemmArgs) -> Tensor:
    """Return x [R, K] times the weights, [R, N] in x's dtype or autocast's; padding rows are undefined.

    The weight of ``call`` is the parameter itself, [E, N, K] or transposed; ``bias`` is [E, N]. ``torch.compile``
    cannot trace this function.
    """
    if not is_whole(call.weight):
        raise RuntimeError(
            f"The weights of {call.site.name!r} are a DTensor where their GEMMs run. FP8 experts multiply by plain "
            "weights: under FSDP2 call the module that fully_shard wrapped, so that its hooks gather them first; "
            "expert and tensor parallelism are not supported."
        )
    return fp8_linear_unchecked(x, call.weight, bias, call)


def run_each_expert(x: Tensor, groups: Groups, run: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, int]:
    """Return (results of ``run(expert, rows)`` for each expert with rows, zeros elsewhere; number of experts that ran).

    Without any rows the first expert runs on an empty tensor, so that its weights are in the graph. Waits for the
    device.
    """
    filled = list(expert_spans(groups)) or [(0, slice(0, 0))]
    parts = []
    for expert, span in filled:
        y = run(expert, x[span])
        parts.append(F.pad(y, (0, 0, 0, -y.shape[0] % TILE)))
    y = torch.cat(parts)
    return F.pad(y, (0, 0, 0, groups.rows - y.shape[0])), len(filled)
