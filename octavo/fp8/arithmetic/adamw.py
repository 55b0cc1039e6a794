"""One AdamW step over pieces of parameters: the arithmetic that all engines implement bit for bit.

A :class:`Piece` is the part of a parameter on this rank, as flat tensors. Groups are 128 consecutive elements of the
flattened, unsharded parameter, so that a piece may begin and end inside a group. For each element, in fp32, every
operation rounds once and none are fused (decoupled weight decay: Loshchilov & Hutter, ICLR 2019):

    g = float(grad) * factor                        skipped if there is no factor
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + (g * (1 - beta2)) * g
    d = sqrt(v) * (1 / sqrt(1 - beta2^step)) + eps
    w = w * (1 - lr * weight_decay) - (m * (lr / (1 - beta1^step))) / d

The expressions in parentheses that depend on no element are computed in fp64 and rounded to fp32 once. The weight is
updated with the unrounded moments, which are then encoded (:mod:`octavo.fp8.arithmetic.moments`), and the weight is
written (:mod:`octavo.fp8.arithmetic.master`). A NaN or an Inf in a gradient makes the weight NaN as in torch, and also
the moments of its group of 128 in formats whose groups share a range.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.fp8.arithmetic import master, moments, philox
from octavo.fp8.arithmetic.moments import GROUP, LAYOUT, MaxOverRanks
from octavo.fp8.arithmetic.root import sqrt

MASTERS = ("fp32", "bf16+16", "bf16+sr")
"""The formats of the fp32 weight: see :mod:`octavo.fp8.arithmetic.master`."""

_GROUP_TENSORS = {
    k.name for specs in LAYOUT.values() for k in specs if k.row is not None
}  # tensors with a row per group

_CHUNK = 1 << 22  # elements per operation on devices for which launches cost more than memory
CPU_CHUNK = 31 << 10
"""Elements per operation on a CPU: as many as torch runs in one thread (fewer than 2^15), so that the work outweighs
the call overhead and all arrays fit in a cache of 2 MiB."""


class Piece(NamedTuple):
    """A part of a parameter, as plain, flat, contiguous tensors on one device.

    weight: [n] bfloat16 or float32, written in place.
    grad: [n] of any floating dtype.
    state: the tensors of :data:`LAYOUT` ([n], or one row for each group of this piece), `master_low` int16 [n] for the
        master "bf16+16", `master` fp32 [n] for "fp32" with a BF16 weight; written in place.
    start: the index of its first element in the flattened unsharded parameter.
    index: the number of the parameter in the optimizer, counted over all parameter groups, equal on all ranks.
    step: the number of this step, from 1.
    """

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    start: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is unused
    step: int


@dataclass(frozen=True)
class Hyper:
    """The hyperparameters of all pieces in a call. `lr` is a float or a 0-d tensor, which stays on its device."""

    lr: float | Tensor
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    states: str = "fp8"
    master: str = "fp32"
    seed: int = 0


class Scalars(NamedTuple):
    """The scalars of a step of a piece, computed in fp64 and rounded to fp32.

    `decay` and `pace` are 0-d fp32 tensors if the learning rate is a tensor on a device other than the CPU, because
    reading it would synchronize.
    """

    beta1: float
    rest1: float  # 1 - beta1
    beta2: float
    rest2: float  # 1 - beta2
    eps: float
    root: float  # 1 / sqrt(1 - beta2^step)
    decay: float | Tensor  # 1 - lr * weight_decay
    pace: float | Tensor  # lr / (1 - beta1^step)

    @classmethod
    def compute(cls, hyper: Hyper, step: int) -> Scalars:
        lr, h = hyper.lr, hyper
        correction = 1 - h.beta1**step
        decay: float | Tensor
        pace: float | Tensor
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            wide = lr.detach().double()
            decay, pace = (1 - wide * h.weight_decay).float(), (wide / torch.full_like(wide, correction)).float()
        else:
            decay, pace = _fp32(1 - float(lr) * h.weight_decay), _fp32(float(lr) / correction)
        return cls(
            beta1=_fp32(h.beta1),
            rest1=_fp32(1 - h.beta1),
            beta2=_fp32(h.beta2),
            rest2=_fp32(1 - h.beta2),
            eps=_fp32(h.eps),
            root=_fp32(1 / (1 - h.beta2**step) ** 0.5),
            decay=decay,
            pace=pace,
        )


class Edge(NamedTuple):
    """A group of which a piece has only a part.

    These are elements `first` to `last` of the piece and row `row` of its group tensors. They begin at element `lane`
    of group `group` of the parameter.
    """

    piece: Piece
    first: int
    last: int
    row: int
    lane: int
    group: int


def slice_piece(piece: Piece, first: int, last: int) -> Piece:
    """Return elements `first` to `last` of a piece, as views."""
    if (first, last) == (0, piece.weight.numel()):
        return piece
    begin, end, group = piece.start + first, piece.start + last, piece.start // GROUP
    rows = slice(begin // GROUP - group, -(-end // GROUP) - group if last > first else 0)
    state = {name: x[rows] if name in _GROUP_TENSORS else x[first:last] for name, x in piece.state.items()}
    return piece._replace(weight=piece.weight[first:last], grad=piece.grad[first:last], state=state, start=begin)


def whole_groups(piece: Piece) -> Piece:
    """Return the part of a piece that consists of whole groups."""
    count = piece.weight.numel()
    head = min(-piece.start % GROUP, count)
    return slice_piece(piece, head, head + (count - head) // GROUP * GROUP)


def reference_step(
    pieces: Sequence[Piece], hyper: Hyper, factor: float | Tensor | None, agree: MaxOverRanks | None
) -> None:
    """Run the step in plain torch on any device: whole groups in chunks, then all partial groups in one table."""
    for piece in pieces:
        for first, last in _chunks(piece, CPU_CHUNK if piece.weight.device.type == "cpu" else _CHUNK):
            rows = slice((piece.start % GROUP + first) // GROUP, (piece.start % GROUP + last) // GROUP)
            state = {
                k.name: piece.state[k.name][first:last].view(-1, GROUP) if k.row is None else piece.state[k.name][rows]
                for k in LAYOUT[hyper.states]
            }
            weight = _read(piece, hyper, first, last).view(-1, GROUP)
            grad = piece.grad[first:last].view(-1, GROUP)
            dither = _dither(hyper, piece, piece.start + first, last - first)
            m, v = moments.decode(hyper.states, state)
            weight, m, v = _advance(weight, grad, m, v, Scalars.compute(hyper, piece.step), factor)
            for name, value in moments.encode(hyper.states, m, v, dither).items():
                state[name].copy_(value)
            _write(piece, hyper, first, last, weight.view(-1))
    _step_edges(find_edges(pieces), hyper, factor, agree)


def find_edges(pieces: Sequence[Piece]) -> list[Edge]:
    """Return the groups of which pieces have only a part, in the order of the pieces, the first before the last."""
    edges = []
    for piece in pieces:
        n, lane = piece.weight.numel(), piece.start % GROUP
        head = min(-lane % GROUP, n)
        if head:
            edges.append(Edge(piece, 0, head, 0, lane, piece.start // GROUP))
        tail = (n - head) % GROUP
        if tail:
            edges.append(Edge(piece, n - tail, n, (lane + n - tail) // GROUP, 0, (piece.start + n - tail) // GROUP))
    return edges


def _chunks(piece: Piece, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of whole groups in a piece's elements, of at most `size` elements each."""
    head = -piece.start % GROUP
    stop = head + max(piece.weight.numel() - head, 0) // GROUP * GROUP
    for first in range(head, stop, size):
        yield first, min(first + size, stop)


def _step_edges(edges: list[Edge], hyper: Hyper, factor: float | Tensor | None, agree: MaxOverRanks | None) -> None:
    if not edges:
        return
    # All partial groups in one table [edges, 128]; zeros in the lanes of other ranks do not change extrema.
    table = [_pad_to_group(e, _read(e.piece, hyper, e.first, e.last)) for e in edges]
    grads = [_pad_to_group(e, e.piece.grad[e.first : e.last].float()) for e in edges]
    dither = [row for e in edges if (row := _dither(hyper, e.piece, e.group * GROUP, GROUP)) is not None]
    state = {}
    for k in LAYOUT[hyper.states]:
        tensors = [e.piece.state[k.name] for e in edges]
        rows = [
            _pad_to_group(e, x[e.first : e.last]) if k.row is None else x[e.row]
            for e, x in zip(edges, tensors, strict=True)
        ]
        state[k.name] = torch.stack(rows)
    m, v = moments.decode(hyper.states, state)
    stepped = [
        _advance(w, g, m[i], v[i], Scalars.compute(hyper, e.piece.step), factor)
        for i, (e, w, g) in enumerate(zip(edges, table, grads, strict=True))
    ]
    m, v = (torch.stack([s[i] for s in stepped]) for i in (1, 2))
    new = moments.encode(hyper.states, m, v, torch.cat(dither) if dither else None, agree)
    for i, e in enumerate(edges):
        lanes = slice(e.lane, e.lane + e.last - e.first)
        for k in LAYOUT[hyper.states]:
            if k.row is None:
                e.piece.state[k.name][e.first : e.last].copy_(new[k.name][i, lanes])
            else:
                e.piece.state[k.name][e.row].copy_(new[k.name][i])
        _write(e.piece, hyper, e.first, e.last, stepped[i][0][lanes])


def _pad_to_group(edge: Edge, part: Tensor) -> Tensor:
    row = part.new_zeros(GROUP)
    row[edge.lane : edge.lane + part.numel()] = part
    return row


def _advance(
    w: Tensor, grad: Tensor, m: Tensor, v: Tensor, s: Scalars, factor: float | Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (w, m, v) after the step, unrounded."""
    g = grad.float()
    if factor is not None:
        g = g * (factor if isinstance(factor, Tensor) else _fp32(factor))
    m = m * s.beta1 + g * s.rest1
    v = v * s.beta2 + (g * s.rest2) * g
    d = sqrt(v) * s.root + s.eps
    return w * s.decay - (m * s.pace) / d, m, v


def _dither(hyper: Hyper, piece: Piece, start: int, count: int) -> Tensor | None:
    """Return the dither of the second moments of a range of whole groups, int32 [G, 128] from 0 to 65535, or None if
    the format needs none."""
    if hyper.states in ("fp32", "coat"):
        return None
    device = piece.weight.device
    return moments.dither(hyper.seed, start, count, step=piece.step, parameter=piece.index, device=device).view(
        -1, GROUP
    )


def _words(hyper: Hyper, piece: Piece, start: int, count: int) -> Tensor:
    device = piece.weight.device
    return philox.words(hyper.seed, start, count, step=piece.step, parameter=piece.index, device=device)


def _read(piece: Piece, hyper: Hyper, first: int, last: int) -> Tensor:
    """Return the fp32 weights of a range."""
    if "master" in piece.state:
        return piece.state["master"][first:last]
    weight = piece.weight[first:last]
    return master.join(weight, piece.state["master_low"][first:last]) if hyper.master == "bf16+16" else weight.float()


def _write(piece: Piece, hyper: Hyper, first: int, last: int, w: Tensor) -> None:
    weight = piece.weight[first:last]
    if hyper.master == "bf16+16":
        high, low = master.split(w)
        weight.copy_(high)
        piece.state["master_low"][first:last].copy_(low)
    elif hyper.master == "bf16+sr":
        weight.copy_(master.stochastic(w, _words(hyper, piece, piece.start + first, last - first)))
    else:
        weight.copy_(w)  # a BF16 weight: to nearest even
        if "master" in piece.state:
            piece.state["master"][first:last].copy_(w)


def _fp32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]
