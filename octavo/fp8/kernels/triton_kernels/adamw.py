"""AdamW in one launch: tables of pieces for ``adamw_kernels.py``.

Bytes per element that a step reads and writes, gradient in BF16 (8-bit states include their figures)::

    states x master        reads                            writes            together
    fp8 x bf16+sr          w 2, g 2, states 2.06            w 2, states 2.06    10.1
    fp8 x bf16+16          w 4, g 2, states 2.06            w 4, states 2.06    14.1
    fp32 x fp32 (g fp32)   w 4, g 4, states 8               w 4, states 8       28

All pieces of one kind (types, states, master) share one launch, whatever their number and lengths: a table has a row
with the addresses of each piece, and a program finds its piece by bisection. The table is built on the host and copied
from pinned memory, so that nothing waits for the device. Pieces whose addresses, starts and sizes are multiples of 16
take a form that reads 8 to 16 bytes per thread at once; other pieces, biases of odd length and shards that begin inside
16 elements, take a form that reads element by element.

Groups of 128 that the border of a shard cuts need the extrema of other ranks between their moments and their codes.
With such groups (``agree``) the kernel steps the whole groups and the reference steps all cut ones together: a few
rows, a few dozen small operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from octavo.fp8.arithmetic.adamw import Hyper, Piece, Scalars, find_edges, reference_step, slice_piece, whole_groups
from octavo.fp8.arithmetic.moments import GROUP, LAYOUT, MaxOverRanks
from octavo.fp8.kernels.triton_kernels.adamw_kernels import COLUMNS, adamw_step
from octavo.fp8.kernels.triton_kernels.launch import launch

GROUPS, TILES = 8, 4  # groups a tile, tiles a program: 4096 elements
WARPS = 4
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_WIDE = 1 << 63


def step(
    pieces: Sequence[Piece], hyper: Hyper, factor: float | Tensor | None = None, agree: MaxOverRanks | None = None
) -> None:
    """Step all ``pieces`` in place, bit for bit as ``octavo.fp8.arithmetic.adamw.reference_step``.

    Supports every format of states and every master. Raises TypeError for gradients that are not bfloat16, float16 or
    float32.
    """
    cut: list[Piece] = []
    if agree is not None:
        cut = [slice_piece(e.piece, e.first, e.last) for e in find_edges(pieces)]
        pieces = [whole_groups(piece) for piece in pieces]
    kinds: dict[tuple[torch.dtype, torch.dtype, str, bool], list[Piece]] = {}
    for piece in pieces:
        if piece.grad.dtype not in _TYPES:
            raise TypeError(f"AdamW's kernel takes no gradient of {piece.grad.dtype}; cast it to bfloat16 or float32.")
        if piece.weight.numel():
            master = "master" if "master" in piece.state else hyper.master
            kind = (piece.weight.dtype, piece.grad.dtype, master, _aligned(piece, hyper))
            kinds.setdefault(kind, []).append(piece)
    if factor is None or isinstance(factor, Tensor):
        times = factor
    else:
        times = torch.full((), factor, dtype=torch.float32, device=pieces[0].weight.device)
    for (weight, grad, master, aligned), alike in kinds.items():
        _launch(alike, hyper, times, weight, grad, master, aligned)
    if cut:  # each has one edge, the group that agree() expects in its column
        reference_step(cut, hyper, factor, agree)


def _launch(
    pieces: list[Piece],
    hyper: Hyper,
    factor: Tensor | None,
    weight: torch.dtype,
    grad: torch.dtype,
    master: str,
    aligned: bool,
) -> None:
    # One launch for pieces of one kind. The first program of each piece is the sum of the programs before it.
    rows, programs = [], 0
    for piece in pieces:
        rows.append(_row(piece, hyper, programs))
        groups = (piece.start % GROUP + piece.weight.numel() + GROUP - 1) // GROUP
        programs += (groups + GROUPS * TILES - 1) // (GROUPS * TILES)
    device = pieces[0].weight.device
    scalars = {s: Scalars.compute(hyper, s) for s in {piece.step for piece in pieces}}
    each = scalars[pieces[0].step]
    launch(
        adamw_step,
        (programs,),
        _table(rows, torch.int64, device),
        _numbers([scalars[piece.step] for piece in pieces], device),
        None if factor is None else factor.float(),
        len(pieces),
        1 << (len(pieces) - 1).bit_length() >> 1,
        *(each.beta1, each.rest1, each.beta2, each.rest2, each.eps),
        STATES=hyper.states,
        MASTER=master,
        W=_TYPES[weight],
        G=_TYPES[grad],
        ALIGNED=aligned,
        GROUPS=GROUPS,
        TILES=TILES,
        num_warps=WARPS,
        num_stages=1,
        enable_fp_fusion=False,
    )


def _row(piece: Piece, hyper: Hyper, program: int) -> list[int]:
    """Return the row of a piece, in the order of the kernel's columns."""
    low = piece.state.get("master", piece.state.get("master_low"))
    m, *rest = (piece.state[k.name].data_ptr() for k in LAYOUT[hyper.states])
    m_figures, v, v_figures = rest if len(rest) == 3 else (0, rest[0], 0)
    seed = (hyper.seed + _WIDE) % (2 * _WIDE) - _WIDE  # the 64 bits as a signed int64
    row = [piece.weight.data_ptr(), piece.grad.data_ptr(), 0 if low is None else low.data_ptr()]
    row += [m, m_figures, v, v_figures]
    row += [piece.weight.numel(), piece.start, program, piece.step, piece.index, seed]
    assert len(row) == COLUMNS.value
    return row


def _table(rows: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    table = torch.tensor(rows, dtype=dtype)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _numbers(scalars: list[Scalars], device: torch.device) -> Tensor:
    """fp32 [pieces, 3]: root, decay, pace. A learning rate on the device stays there."""
    if not isinstance(scalars[0].pace, Tensor):
        return _table([[s.root, s.decay, s.pace] for s in scalars], torch.float32, device)
    roots = _table([s.root for s in scalars], torch.float32, device)
    return torch.stack([roots, *(torch.stack([getattr(s, n) for s in scalars]) for n in ("decay", "pace"))], 1)


def _aligned(piece: Piece, hyper: Hyper) -> bool:
    """True if every tensor with one value per element is aligned to 16 elements, in memory and in its group."""
    tensors = [piece.weight, piece.grad, *(piece.state[k.name] for k in LAYOUT[hyper.states] if k.row is None)]
    tensors += [piece.state[name] for name in ("master", "master_low") if name in piece.state]
    return not (piece.start % 16 or piece.weight.numel() % 16 or any(t.data_ptr() % 16 for t in tensors))
