"""The three GEMMs of several layers at once: one autograd function with an output for each layer.

See :mod:`octavo.fp8.fusion` for which layers those are and how each comes to its output. What a forward keeps is what
:mod:`octavo.fp8.dense.linear` keeps, once for all layers: the codes of x in wgrad layout, and references to the
weights.

One node stands for several layers, and a backward may reach them one after the other (``q.sum().backward()`` and then
``k.sum().backward()``). Autograd frees what a node saved after the first of them, so the node itself keeps the codes
of x until each layer that was called has had its gradient. They die with the graph at the latest, as those of a single
layer do. A second backward through the same output needs ``retain_graph=True``, as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.fp8.arithmetic.cast import Quantized
from octavo.fp8.blocks.attention_output import OWN_OUTPUT
from octavo.fp8.dense.casts import _no_autocast, cast_both, compute_dtype
from octavo.fp8.dense.gemms import Site
from octavo.fp8.dense.inputs import Input
from octavo.fp8.joined import Joined
from octavo.fp8.observe import counts
from octavo.fp8.weights import cache
from octavo.fp8.weights.cache import WeightSlice

__all__ = ["Call", "FusedGemms", "Marks"]


class Marks:
    """What the backward must know of each layer's call, written when its output is handed out; no tensors."""

    def __init__(self, grad: bool, layers: int) -> None:
        self.grad = grad
        self.called = [False] * layers
        self.counted = [False] * layers
        self.born = ["fwd"] * layers
        self.needs_x, self.needs_w = False, False
        self.pending: Any = None  # weakly: it holds the outputs, which hold the node, which holds this


class Call(NamedTuple):
    user: Any  # the group of layers, for the shared codes of x
    sites: tuple[Site, ...]
    joined: Joined
    marks: Marks


class FusedGemms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        site, marks, count = call.sites[0], call.marks, len(call.sites)
        fwd, wgrad = site.recipe.fwd, site.recipe.wgrad
        assert fwd is not None and wgrad is not None
        owners, biases = parameters[:count], parameters[count:]
        needs = [marks.grad and n for n in ctx.needs_input_grad]
        marks.needs_x, marks.needs_w = needs[0], any(needs[2 : 2 + count])
        given = Input(x, compute_dtype(x), call.user)
        row, col = site.want("fwd", fwd.a), site.want("wgrad", wgrad.b) if marks.needs_w else None
        with _no_autocast(x):
            x_row, x_col = given.codes(row, None if col is not None and col.spec == row.spec else col)
            assert x_row is not None
            w_q = call.joined.get(owners, fwd.b, row.backend, 1, forward=True)  # type: ignore[arg-type]
            y_MN = row.backend.gemm_fwd(x_row, w_q, given.dtype, _joined_bias(owners, biases))
        kept = (x_col or x_row) if marks.needs_w else None
        inside = needs[0] and site.shares_weight and cache.capturing(x)
        ctx.save_for_backward(
            *((w_q.data, w_q.scale) if inside else ()),
            *((kept.data, kept.scale) if kept is not None else ()),
        )
        # Weights live in their modules and need no saving. Autograd would unpack them all, and refuse the backward of
        # one layer because the weight of another was edited: _weights compares the versions of those that are used.
        ctx.owners = owners if needs[0] else ()
        ctx.versions = [w._version for w in ctx.owners]
        ctx.came, ctx.left, ctx.forget_input = set(), None, given.forgetter()
        ctx.call, ctx.needs, ctx.inside, ctx.kept_spec = call, needs, inside, None if kept is None else kept.spec
        ctx.sizes = [w.shape[0] for w in owners if w is not None]
        ctx.x_shape, ctx.x_dtype, ctx.compute_dtype = x.shape, x.dtype, given.dtype
        ctx.w_dtype, ctx.b_dtypes = owners[0].dtype, [None if b is None else b.dtype for b in biases]  # type: ignore[union-attr]
        ctx.set_materialize_grads(False)  # an output that nobody used must be told from one with zero gradients
        # Not views in autograd's eyes, and each with a version counter of its own: a model may write into one output.
        lead = x.shape[:-1]
        outputs = [
            y.contiguous() if OWN_OUTPUT in layer.__dict__ else y
            for y, layer in zip(y_MN.split(ctx.sizes, 1), call.user.members, strict=True)
        ]
        return tuple(torch.ops.aten._unsafe_view(y, [*lead, y.shape[1]]) for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        call, count = ctx.call, len(ctx.sizes)
        pending = call.marks.pending()
        if pending is not None:
            pending.drop()
        ctx.forget_input()
        rows = ctx.x_shape[:-1].numel()
        parts = [None if dy is None else dy.reshape(rows, n) for dy, n in zip(dys, ctx.sizes, strict=True)]
        given = [(i, dy) for i, dy in enumerate(parts) if dy is not None]
        dws: list[Tensor | None] = [None] * count
        dbs: list[Tensor | None] = [None] * count
        dx = None
        if given:
            with _no_autocast(given[0][1]):
                if len(given) == count:
                    dx, dws = _backward_of_all(ctx, torch.cat([dy for _, dy in given], 1))
                else:
                    dx = _backward_one_by_one(ctx, given, dws)
                for i, dy in given:
                    if ctx.needs[2 + count + i]:
                        dbs[i] = dy.sum(0, dtype=torch.float32).to(ctx.b_dtypes[i])
        dx = None if dx is None else dx.view(ctx.x_shape).to(ctx.x_dtype)
        wanted = [dw if ctx.needs[2 + i] else None for i, dw in enumerate(dws)]
        return dx, None, *wanted, *dbs


def _joined_bias(owners: tuple[Tensor | None, ...], biases: tuple[Tensor | None, ...]) -> Tensor | None:
    """All biases in fp32; -0.0, which changes no value and no sign, for a layer without one."""
    if all(b is None for b in biases):
        return None
    return torch.cat(
        [
            w.new_full((w.shape[0],), -0.0, dtype=torch.float32) if b is None else b.float()
            for w, b in zip(owners, biases, strict=True)
            if w is not None
        ]
    )


def _weights(ctx: Any, used: Sequence[int]) -> tuple[Tensor, ...]:
    """The weights of all layers, those in use as they were in the forward; none where x asks for no gradient."""
    for i in used if ctx.owners else ():
        was, found = ctx.versions[i], ctx.owners[i]._version
        if was != found:
            raise RuntimeError(
                f"The weight of {ctx.call.sites[i].name!r}, needed for the gradient of its input, has been modified by "
                f"an inplace operation since the forward (version {found}, expected {was}). Run the backward before "
                "the edit, or the forward again after it."
            )
    return ctx.owners


def _codes(ctx: Any, given: Sequence[int]) -> tuple[Quantized | None, Quantized | None]:
    """(the joined codes of the weights where a capture kept them, the codes of x for wgrad)."""
    first = ctx.came.isdisjoint(given)
    # Twice through one output: autograd knows whether the graph was retained, and says so if not.
    saved = ctx.left if first and ctx.left is not None else ctx.saved_tensors
    ctx.came.update(given)
    ctx.left = saved if any(c and i not in ctx.came for i, c in enumerate(ctx.call.marks.called)) else None
    rest = list(saved)
    w_q = Quantized(rest.pop(0), rest.pop(0), ctx.call.sites[0].recipe.fwd.b) if ctx.inside else None
    return w_q, Quantized(rest[0], rest[1], ctx.kept_spec) if rest else None


def _backward_of_all(ctx: Any, dy: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
    """dx [M, K] and the dw of all layers from dy [M, sum of N]: one dgrad, one wgrad."""
    site, everyone = ctx.call.sites[0], range(len(ctx.sizes))
    owners, (w_q, x_q) = _weights(ctx, everyone), _codes(ctx, everyone)
    row = site.want("dgrad", site.recipe.dgrad.a) if owners else None
    col = site.want("wgrad", site.recipe.wgrad.a) if x_q is not None else None
    dy_row = dy_col = dx = None
    dws: list[Tensor | None] = [None] * len(ctx.sizes)
    if row is not None and col is not None and row.spec != col.spec:
        dy_row, dy_col = cast_both(dy, row, col)
    elif row is not None:
        dy_row = row.backend.quantize(dy, row.spec, 1)
    if col is not None and dy_col is None:
        dy_col = dy_row or col.backend.quantize(dy, col.spec, 0)
    if row is not None and dy_row is not None:
        if w_q is None:
            spec, contract = site.recipe.dgrad.b, 1 if site.shares_weight else 0
            w_q = ctx.call.joined.get(owners, spec, row.backend, contract, forward=False)
        dx = row.backend.gemm_dgrad(dy_row, w_q, ctx.compute_dtype)
    if col is not None and dy_col is not None and x_q is not None:
        dws = list(col.backend.gemm_wgrad(dy_col, x_q, ctx.w_dtype).split(ctx.sizes, 0))
    for i in range(len(ctx.sizes)):
        _count(ctx, i, dy.shape[0], row is not None, col is not None)
    return dx, dws


def _backward_one_by_one(ctx: Any, given: list[tuple[int, Tensor]], dws: list[Tensor | None]) -> Tensor | None:
    """dx [M, K], and ``dws`` filled in, where some outputs did not reach the loss: each layer by its own GEMMs."""
    used = [i for i, _ in given]
    owners, (_, x_q) = _weights(ctx, used), _codes(ctx, used)
    dx: Tensor | None = None
    for i, dy in given:
        site = ctx.call.sites[i]
        if owners:
            dy_q = site.selections["dgrad"].backend.quantize(dy, site.recipe.dgrad.a, 1)
            w_q = site.weight("dgrad", owners[i], WeightSlice(), site.recipe.dgrad.b)
            own = site.selections["dgrad"].backend.gemm_dgrad(dy_q, w_q, ctx.compute_dtype)
            dx = own if dx is None else dx + own
        if x_q is not None:
            backend = site.selections["wgrad"].backend
            dws[i] = backend.gemm_wgrad(backend.quantize(dy, site.recipe.wgrad.a, 0), x_q, ctx.w_dtype)
        _count(ctx, i, dy.shape[0], bool(owners), x_q is not None)
    return dx


def _count(ctx: Any, at: int, tokens: int, dgrad: bool, wgrad: bool) -> None:
    site, marks = ctx.call.sites[at], ctx.call.marks
    if not marks.counted[at] or not counts.counting():
        return
    flops = 2 * tokens * ctx.sizes[at] * ctx.x_shape[-1]
    for gemm, ran in (("dgrad", dgrad), ("wgrad", wgrad)):
        if ran:
            counts.record(site.name, gemm, site.selections[gemm].backend.name, flops)
            counts.came(site.name, gemm, marks.born[at])
