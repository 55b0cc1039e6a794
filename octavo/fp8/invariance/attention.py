"""Batch-invariant attention: the result for a query depends only on its own sequence, not on the batch, the number of
queries, or the length of the longest sequence.

A query t of a sequence sees keys 0 to t. Keys are processed in tiles of :data:`TILE`, by their position in their own
sequence, in order, with a running maximum m and sum l (Milakov and Gimelshein 2018, arXiv:1805.02867), in fp32::

    for each tile:   s = scale q k^T, minus infinity where a key is not seen
                     m' = max(m, max s)     p = exp(s - m')     a = exp(m - m')
                     l = a l + sum p        o = a o + p v       m = m'
    out = o / l                             lse = m + log l

A tile in which a query sees no key changes none of its bits (p = 0, a = 1), so the length of other sequences does not
matter. The
products have a fixed number of columns, and rows padded as in :mod:`octavo.fp8.invariance.products`, so that the number
of rows does not matter. The queries of the heads that share a head of k and v are rows of one product, and k and v are
not repeated. Training calls it with whole sequences, generation with the newest queries over cached keys, with the same
bits. On devices with batch-invariant kernels (:mod:`octavo.fp8.invariance.devices`) the forward uses a kernel.

The backward recomputes p from lse, tile by tile (Dao et al. 2022, arXiv:2205.14135)::

    dp = do v^T      ds = p (dp - sum(do out))      dq = scale ds k      dk = scale ds^T q      dv = p^T do
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.fp8.invariance.devices import InvarianceError, kernels_for

TILE = 128
_ROWS = 8  # queries of a product, for all heads that share a head of k together, are padded to a multiple of this
_MIN_EXPONENT = -87.0  # the smallest exponent whose exp is a normal number of fp32
_COLUMNS = 16  # head sizes are padded to a multiple of this: a library splits narrower columns unevenly among threads


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *,
    scale: float | None = None, is_causal: bool = False, positions: Tensor | None = None,
    starts: Tensor | None = None, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax(q k^T * scale + mask) v for sequences whose keys begin at column ``starts``.

    Args:
        q: [B, H, T, D]; in training whole sequences, in generation the newest queries of each.
        k, v: [B, H_kv, S, D] and [B, H_kv, S, D_v], H a multiple of H_kv; consecutive heads of q share a head. Columns
            that no query sees must be finite. No copy is made if S is a multiple of 128.
        mask: broadcasts to [B, H, T, S]; boolean (True for visible keys) or added to the scores.
        scale: factor of the scores; by default 1 / sqrt(D).
        is_causal: if True, query t has position t.
        positions: [B, T], the position of each query in its sequence, up to which it sees keys. A query with position
            -1 sees no key, and its result is 0.
        starts: [B], the column of each sequence's first key. By default 0 or, with a mask and whole sequences (T = S),
            the first column that any query of the sequence sees.
        window: if not None, a query sees only the last ``window`` keys up to its position.

    Returns:
        [B, H, T, D_v] in the dtype of q (autocast's under autocast).

    Raises:
        ValueError: shapes that do not match; a window without positions.
        InvarianceError: a mask that requires a gradient.
    """
    q, k, v = _to_autocast_dtype(q, k, v)
    _check(q, k, v, mask, is_causal, positions, window)
    batch, _, queries, size = q.shape
    if is_causal:
        positions = torch.arange(queries, device=q.device).expand(batch, queries)
    if starts is None and mask is not None and queries == k.shape[2]:
        starts = _first_columns(mask, batch)
    # Move each sequence's first key to column 0. On a GPU this happens even if all starts are 0: reading them would
    # wait for the device.
    if starts is not None and (starts.device.type != "cpu" or bool(starts.any())):
        column = (torch.arange(k.shape[2], device=k.device) + starts.view(-1, 1)).clamp(max=k.shape[2] - 1)
        past = column.new_tensor(k.shape[2]) - starts.view(-1, 1)  # keys of each sequence
        k, v = (torch.take_along_dim(t, column.view(batch, 1, -1, 1), 2) for t in (k, v))
        if mask is not None:
            mask = torch.take_along_dim(mask.expand(batch, -1, -1, -1), column.view(batch, 1, 1, -1), 3)
        real = torch.arange(k.shape[2], device=k.device) < past
        seen = Visibility(mask, positions, real, window)
    else:
        seen = Visibility(mask, positions, None, window)
    out: Tensor = _Attention.apply(q, k, v, seen, 1 / math.sqrt(size) if scale is None else scale)
    return out


class Visibility(NamedTuple):
    """The keys that a query sees, by position: see :func:`attention`. ``real`` bool [B, S] marks columns with keys."""

    mask: Tensor | None
    positions: Tensor | None
    real: Tensor | None
    window: int | None

    def mask_scores(self, scores: Tensor, start: int, keys: int) -> Tensor:
        """Set scores [B, H_kv, G, T', TILE] of the keys from ``start`` on to minus infinity for keys that are not seen.

        ``keys`` is the total number of keys. T' may be larger than T; the results of the additional rows are not used.
        """
        rows, width = scores.shape[3], min(TILE, keys - start)
        column = torch.arange(start, start + TILE, device=scores.device)
        hidden = (column >= keys).view(1, 1, 1, 1, -1)
        if self.positions is not None:
            at = F.pad(self.positions, (0, rows - self.positions.shape[1]), value=-1)[:, None, None, :, None]
            hidden = hidden | (column > at)
            if self.window is not None:
                hidden = hidden | (column <= at - self.window)
        if self.real is not None:
            hidden = hidden | ~_pad_to_tile(self.real[:, start : start + width])[:, None, None, None, :]
        if self.mask is None:
            return scores.masked_fill_(hidden, -math.inf)
        part = self.mask[..., start : start + width]
        batch, heads = part.shape[:2]
        groups = (heads // scores.shape[1], scores.shape[1]) if heads > 1 else (1, 1)
        part = part.reshape(batch, groups[1], groups[0], *part.shape[2:])
        if part.shape[3] > 1:
            part = F.pad(part, (0, 0, 0, rows - part.shape[3]))
        if part.dtype == torch.bool:
            return scores.masked_fill_(hidden | ~_pad_to_tile(part), -math.inf)
        return scores.add_(_pad_to_tile(part)).masked_fill_(hidden, -math.inf)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float) -> Tensor:
        with _in_fp32(q):
            if (kernels := kernels_for(q)) is None:
                y, lse = _forward(q, k, v, seen, scale)
            else:
                y, lse = kernels.attend(q, k, v, *seen, scale)
                lse = _rows(lse[..., None], k.shape[1])[0][:, :, :1]
        tensors = [t for t in (seen.mask, seen.positions, seen.real) if t is not None]
        ctx.save_for_backward(q, k, v, y, lse, *tensors)
        ctx.present = [t is not None for t in (seen.mask, seen.positions, seen.real)]
        ctx.window, ctx.scale = seen.window, scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with _in_fp32(dy):
            return _gradients(ctx, dy)


@contextmanager
def _in_fp32(x: Tensor) -> Iterator[None]:
    """Disable autocast and torch functions, for products that are already invariant.

    Autocast would cast their operands down again, and the backward, which usually runs outside of autocast, would
    recompute probabilities that differ from the forward's.
    """
    device = x.device.type
    lowers = torch.amp.is_autocast_available(device)
    with torch._C.DisableTorchFunction(), torch.autocast(device, enabled=False) if lowers else nullcontext():
        yield


def _forward(q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out [B, H, T, D_v], lse of the padded rows, which is infinite for rows that see no key)."""
    q_rows, shape = _rows(q, k.shape[1])
    q_rows = q_rows * scale
    keys = k.shape[2]
    top = q_rows.new_full((*q_rows.shape[:2], 1), -math.inf)
    total, out = torch.zeros_like(top), q_rows.new_zeros(*q_rows.shape[:2], v.shape[3] + -v.shape[3] % _COLUMNS)
    for start, k_tile, v_tile in _tiles(k, v):
        s = torch.bmm(q_rows, k_tile.transpose(1, 2))
        s = seen.mask_scores(s.view(*shape, TILE), start, keys).view(s.shape)
        # Online softmax: rescale total and out to the new maximum. Before the first visible key the maximum is -inf,
        # and s - (-inf) would be NaN.
        above = torch.maximum(top, s.amax(2, keepdim=True))
        safe = above.masked_fill(above == -math.inf, 0.0)
        p, a = _exp(s.sub_(safe)), _exp(top.sub_(safe))
        total = total.mul_(a).add_(p.sum(2, keepdim=True))
        out = out.mul_(a).add_(torch.bmm(p, v_tile))
        top = above
    empty = total == 0.0
    out = out / total.masked_fill(empty, 1.0)
    lse = (top + total.log()).masked_fill_(empty, math.inf)  # exp(s - inf) is 0 in the backward
    y = _unrows(out, q, shape)[..., : v.shape[3]].to(q.dtype).contiguous()
    return y, lse


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, y, lse, *tensors = ctx.saved_tensors
    saved = iter(tensors)
    mask, positions, real = (next(saved) if present else None for present in ctx.present)
    seen = Visibility(mask, positions, real, ctx.window)
    q_rows, shape = _rows(q, k.shape[1])
    dy_rows, y_rows = (_rows(t, k.shape[1])[0] for t in (dy, y))
    delta = (dy_rows * y_rows).sum(2, keepdim=True)
    dq, keys = torch.zeros_like(q_rows), k.shape[2]
    dks, dvs = [], []
    for start, k_tile, v_tile in _tiles(k, v):
        s = torch.bmm(q_rows, k_tile.transpose(1, 2)).mul_(ctx.scale)
        p = _exp(seen.mask_scores(s.view(*shape, TILE), start, keys).view(s.shape).sub_(lse))
        dvs.append(torch.bmm(p.transpose(1, 2), dy_rows))
        ds = torch.bmm(dy_rows, v_tile.transpose(1, 2)).sub_(delta).mul_(p).mul_(ctx.scale)
        dq = dq.add_(torch.bmm(ds, k_tile))
        dks.append(torch.bmm(ds.transpose(1, 2), q_rows))
    dk, dv = (_keys_gradient(torch.cat(parts, 1), like) for parts, like in ((dks, k), (dvs, v)))
    return _unrows(dq, q, shape)[..., : q.shape[3]].to(q.dtype), dk, dv, None, None


def _exp(x: Tensor) -> Tensor:
    """Return exp(x), 0 below the smallest normal number of fp32. Overwrites x."""
    # The library is many times slower for minus infinity and underflow, and most of a tile may be hidden.
    underflows = x < _MIN_EXPONENT
    return x.clamp_(min=_MIN_EXPONENT).exp_().masked_fill_(underflows, 0.0)


def _rows(x: Tensor, kv: int) -> tuple[Tensor, tuple[int, ...]]:
    """Convert x [B, H, T, D] to rows: the queries of all heads that share a head of k, padded with zeros to a multiple
    of :data:`_ROWS`, and D to a multiple of :data:`_COLUMNS`.

    Returns ([B H_kv, G T', D'] in fp32 (float64 for float64), (B, H_kv, G, T')).
    """
    batch, heads, queries, size = x.shape
    groups = heads // kv
    padding = -queries % (_ROWS // math.gcd(_ROWS, groups))
    wide = F.pad(_to_fp32(x), (0, -size % _COLUMNS, 0, padding))
    shape = (batch, kv, groups, queries + padding)
    return wide.reshape(batch * kv, groups * (queries + padding), wide.shape[3]), shape


def _unrows(rows: Tensor, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Invert :func:`_rows`, keeping all columns: [B, H, T, D']."""
    batch, kv, groups, queries = shape
    return rows.view(batch, kv * groups, queries, rows.shape[2])[:, :, : like.shape[2]]


def _tiles(k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first column, keys [B H_kv, TILE, D'], values [B H_kv, TILE, D_v']) in fp32, with zeros after the last
    key."""
    for start in range(0, k.shape[2], TILE):
        yield start, _tile(k, start), _tile(v, start)


def _tile(x: Tensor, start: int) -> Tensor:
    part = x[:, :, start : start + TILE]
    wide = F.pad(_to_fp32(part), (0, -x.shape[3] % _COLUMNS, 0, TILE - part.shape[2]))
    return wide.reshape(-1, TILE, wide.shape[3])


def _keys_gradient(d: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of ``like`` (k or v) from the gradients [B H_kv, S', D'] of all tiles."""
    batch, kv, keys, size = like.shape
    return d.view(batch, kv, -1, d.shape[2])[:, :, :keys, :size].to(like.dtype)


def _pad_to_tile(x: Tensor) -> Tensor:
    """Pad the last dimension to a tile, with False or 0."""
    return F.pad(x, (0, TILE - x.shape[-1])) if x.shape[-1] < TILE else x


def _to_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _first_columns(mask: Tensor, batch: int) -> Tensor:
    """Return the first column that any query of a sequence sees, [B]."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    return seen.any(1).any(1).long().argmax(-1).expand(batch)


def _to_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the arguments of attention to autocast's dtype, if autocast is enabled."""
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _check(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, positions: Tensor | None, window: int | None
) -> None:
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0]
    if not fits or q.shape[3] != k.shape[3] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"invariant attention takes q [B, H, T, D], k [B, H_kv, S, D] and v [B, H_kv, S, D_v], H a multiple of "
            f"H_kv; found {list(q.shape)}, {list(k.shape)} and {list(v.shape)}. Put the heads in dimension 1"
        )
    if is_causal and (mask is not None or positions is not None):
        raise ValueError(
            "is_causal sets the positions of queries: pass no mask or positions with it, or include it in them"
        )
    if positions is not None and positions.shape != (q.shape[0], q.shape[2]):
        raise ValueError(f"positions {list(positions.shape)} do not match queries {list(q.shape)}; pass [B, T]")
    if window is not None and (window < 1 or (positions is None and not is_causal)):
        raise ValueError(
            f"window={window} counts keys back from a position: pass positions, and a window of at least 1"
        )
    if mask is not None and mask.dim() != 4:
        raise ValueError(f"a mask {list(mask.shape)} does not broadcast to [B, H, T, S]; pass four dimensions")
    if mask is not None and mask.requires_grad:
        # The backward computes gradients of q, k and v only, so this mask's would silently be missing.
        raise InvarianceError(
            "invariant: attention has a mask that requires a gradient (a learned position bias), which is not "
            "computed. Such a model cannot be trained with rl.invariant: true"
        )
