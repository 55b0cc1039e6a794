"""One step of AdamW over pieces of parameters: the arithmetic that every engine has bit for bit.

A :class:`Piece` is one parameter's part on this rank, as flat tensors. Its elements fall into the groups of 128 of the
flattened, unsharded parameter, so that a piece may begin and end inside a group. Per element, in fp32, one rounding an
operation and none fused (decoupled weight decay: Loshchilov & Hutter, ICLR 2019):

    g = float(grad) * factor                        the product only where there is a factor
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + (g * (1 - beta2)) * g
    d = sqrt(v) * (1 / sqrt(1 - beta2^step)) + eps
    w = w * (1 - lr * weight_decay) - (m * (lr / (1 - beta1^step))) / d

The numbers in brackets that depend on no element are computed in fp64 and rounded to fp32 once. The weight steps with
the unrounded moments; then they are encoded (:mod:`octavo.fp8.arithmetic.moments`) and the weight is written
(:mod:`octavo.fp8.arithmetic.master`). A NaN or an Inf in a gradient makes its weight NaN as in torch, and with it the
moments of its group of 128 in the formats that share a range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.fp8.arithmetic.adamw import (
    Hyper,
    Piece,
    Scalars,
    _chunks,
    _fp32,
    _step_edges,
    edges,
    reference,
)
from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.arithmetic.moments import Agree
from octavo.fp8.kernels.registry import select
from octavo.fp8.optim import cpu

__all__ = ["Engine", "engine", "on_cpu", "step"]


Engine = Callable[[Sequence[Piece], Hyper, "float | Tensor | None", "Agree | None"], None]


def step(
    pieces: Sequence[Piece], hyper: Hyper, factor: float | Tensor | None = None, agree: Agree | None = None
) -> None:
    """Step all `pieces` (of one device), in place. `factor` multiplies every gradient. `agree`: see `moments.encode`;
    it is given one column for each of :func:`edges`, in that order, once or twice as the format needs."""
    if not pieces:
        return
    device = pieces[0].weight.device
    if any(x.device != device for piece in pieces for x in piece.state.values()):
        from octavo.fp8.optim import offload  # which builds on this file

        offload.of(device).step(pieces, hyper, factor, agree, engine(device))
    else:
        engine(device)(pieces, hyper, factor, agree)


def engine(device: torch.device) -> Engine:
    """What steps pieces on `device`: :func:`on_cpu`, a backend's kernel where there is one, else :func:`reference`."""
    if device.type == "cpu":
        return on_cpu
    return select("adamw", recipe_or_spec=CastSpec(), device=device).backend.adamw


def on_cpu(pieces: Sequence[Piece], hyper: Hyper, factor: float | Tensor | None, agree: Agree | None) -> None:
    """:func:`reference` bit for bit, in the cache: see :mod:`octavo.fp8.optim.cpu`."""
    if hyper.states == "coat":
        reference(pieces, hyper, factor, agree)
        return
    jobs = [
        (piece, Scalars.of(hyper, piece.step), first, last)
        for piece in pieces
        for first, last in _chunks(piece, cpu.CHUNK)
    ]
    if factor is not None and not isinstance(factor, Tensor):
        factor = _fp32(factor)
    cpu.run(jobs, hyper, factor)
    _step_edges(edges(pieces), hyper, factor, agree)
