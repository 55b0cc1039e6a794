"""Parts of a piece: views that an engine can step on its own."""

from __future__ import annotations

from octavo.fp8.optim.moments import GROUP, LAYOUT
from octavo.fp8.optim.update import Piece

__all__ = ["part", "whole"]

_FIGURES = {k.name for kept in LAYOUT.values() for k in kept if k.row is not None}  # a row a group


def part(piece: Piece, first: int, last: int) -> Piece:
    """Elements `first` to `last` of a piece, with the rows of the groups that they touch."""
    if (first, last) == (0, piece.weight.numel()):
        return piece
    begin, end, group = piece.start + first, piece.start + last, piece.start // GROUP
    rows = slice(begin // GROUP - group, -(-end // GROUP) - group if last > first else 0)
    state = {name: x[rows] if name in _FIGURES else x[first:last] for name, x in piece.state.items()}
    return piece._replace(weight=piece.weight[first:last], grad=piece.grad[first:last], state=state, start=begin)


def whole(piece: Piece) -> Piece:
    """The part of a piece that is whole groups of 128: empty where it holds none."""
    count = piece.weight.numel()
    head = min(-piece.start % GROUP, count)
    return part(piece, head, head + (count - head) // GROUP * GROUP)
