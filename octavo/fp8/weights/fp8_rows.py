"""The FP8 codes of a weight whose rows are sharded over several ranks: bit for bit the codes of the whole weight.

FSDP2 assigns the rows from i * chunk to (i + 1) * chunk to rank i of W, with chunk = ceil(rows / W); the last ranks may
have fewer rows, or none. A block inside one shard is cast there. For blocks across a border, one small all-reduce per
weight combines the amaxes of all cut blocks of all its casts (bit patterns order like amaxes, and NaN and infinity
win); with the amax, and so the scale, each rank encodes its own rows. Which blocks are cut:

======================== ===========================================================================
blocks                   cut
======================== ===========================================================================
(1, -1), (1, 32)         none
(128, 128), (32, 1)      where a shard does not begin at a multiple of the block's rows
(-1, -1), (-1, 1)        all, as soon as two ranks have rows
of an expert, [E, N, K]  none: shards are of whole experts
======================== ===========================================================================

For each cast a rank sends the codes of ``chunk`` rows, with zeros after its last row, and the scales of the blocks that
begin in its shard. Padding rows are part of no amax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec, Quantized, quantize_with_scale, scale_from_amax
from octavo.fp8.arithmetic.formats import E8M0
from octavo.fp8.kernels.layout import as_bytes, ceil_div, grid_shape
from octavo.fp8.kernels.registry import Backend

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Need(NamedTuple):
    """A cast of a weight for the GEMMs of its layer, by the backend that runs them.

    ``contract`` is the dimension that the GEMM sums over. If ``transposed`` is True, the matrix is the transpose of the
    stored one; if ``grouped`` is True, all experts are cast at once, for grouped GEMMs.
    """

    spec: CastSpec
    backend: Backend
    contract: int = 1
    transposed: bool = False
    grouped: bool = False

    def matrix(self, values: Tensor) -> Tensor:
        return values.mT if self.transposed else values

    def cast(self, values: Tensor) -> Quantized:
        """Return the codes of a whole weight [N, K], or of whole experts [E, N, K]."""
        if self.grouped:
            return self.backend.quantize_experts(self.matrix(values), self.spec, self.contract)
        if values.dim() == 3:
            each = [self.backend.quantize(m, self.spec, self.contract) for m in self.matrix(values).unbind(0)]
            data, scale = torch.stack([as_bytes(q.data) for q in each]), torch.stack([as_bytes(q.scale) for q in each])
            return Quantized(data.view(self.spec.fmt.dtype), scale.view(each[0].scale.dtype), self.spec)
        return self.backend.quantize(self.matrix(values), self.spec, self.contract)


@dataclass(frozen=True)
class Shards:
    """The division of ``rows`` rows among ``ranks`` ranks; ``rank`` is this one."""

    rows: int
    ranks: int
    rank: int

    @property
    def chunk(self) -> int:
        return max(1, ceil_div(self.rows, self.ranks))

    def begin(self, rank: int) -> int:
        """Return the first row of a rank; the number of rows for ranks without rows and for ``ranks`` itself."""
        return min(rank * self.chunk, self.rows)

    @property
    def here(self) -> tuple[int, int]:
        """The rows of this rank."""
        return self.begin(self.rank), self.begin(self.rank + 1)

    def cut(self, height: int) -> list[int]:
        """Return the blocks of ``height`` rows (-1 for all rows) that span more than one rank, in order."""
        borders = [b for r in range(1, self.ranks) if 0 < (b := self.begin(r)) < self.rows]
        if height == -1:
            return [0] if borders else []
        return sorted({b // height for b in borders if b % height})

    def cuts(self, need: Need) -> bool:
        """Return True if any block of a two-dimensional weight is cut."""
        return bool(self.cut(need.spec.block[0]))

    def first_block(self, rank: int, height: int) -> int:
        """Return the first row block that begins on a rank or on a later one."""
        begin = self.begin(rank)
        return min(begin, 1) if height == -1 else ceil_div(begin, height)

    def blocks(self, height: int) -> int:
        """Return the maximum number of row blocks that begin on one rank."""
        ends = [self.first_block(r, height) for r in range(self.ranks + 1)]
        return max(b - a for a, b in zip(ends, ends[1:], strict=False))

    def pieces(self, height: int) -> Iterator[tuple[int, int, int | None]]:
        """Yield (first row, last row + 1, the cut block that they belong to or None) for this rank's rows, counted from
        its first row: at most part of a cut block, then whole blocks, then part of another cut block."""
        begin, end = self.here
        if begin == end:
            return
        cut = set(self.cut(height))
        if height == -1:
            yield 0, end - begin, 0 if cut else None
            return
        head = min(end, ceil_div(begin, height) * height)
        tail = max(head, end if end // height not in cut else end // height * height)
        if begin < head:
            yield 0, head - begin, begin // height
        if head < tail:
            yield head - begin, tail - begin, None
        if tail < end:
            yield tail - begin, end - begin, end // height


class Rows(NamedTuple):
    """A rank's part of each cast: codes [chunk, ...] as bytes, scales [blocks that begin here, ...]."""

    codes: list[Tensor]
    scales: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.codes, *self.scales))


def cast(values: Tensor, needs: Sequence[Need], shards: Shards, mesh: DeviceMesh) -> Rows:
    """Cast this rank's rows ``values`` for every need. Collective call over ``mesh`` if blocks are cut."""
    amaxes: list[dict[int, Tensor]] = (
        [{}] * len(needs) if values.dim() == 3 else _reduce_amaxes(values, needs, shards, mesh)
    )
    rows = Rows([], [])
    for need, amax in zip(needs, amaxes, strict=True):
        codes_shape, scale_shape = shapes(need, values.shape, shards)
        rows.codes.append(values.new_zeros(codes_shape, dtype=torch.uint8))
        rows.scales.append(torch.ones(scale_shape, dtype=_scale_dtype(need), device=values.device))
        if values.dim() == 3:
            if values.shape[0]:
                _write_codes(need.cast(values), rows, slice(values.shape[0]), 0)
        else:
            _cast_matrix(values, need, shards, amax, rows)
    return rows


def _cast_matrix(values: Tensor, need: Need, shards: Shards, amaxes: dict[int, Tensor], rows: Rows) -> None:
    height, begin = need.spec.block[0], shards.here[0]
    first = shards.first_block(shards.rank, height)
    for start, stop, block in shards.pieces(height):
        piece = values[start:stop]
        if block is None:
            q = need.backend.quantize(piece, need.spec, need.contract)
            block = 0 if height == -1 else (begin + start) // height
        else:
            q = _cast_piece(piece, need, amaxes[block])
        _write_codes(q, rows, slice(start, stop), block - first)


def _write_codes(q: Quantized, rows: Rows, where: slice, block: int) -> None:
    """Write codes into the last tensor of ``rows``, and their scales from ``block`` on. The scales of a block that
    began on an earlier rank (``block`` below 0) are sent by that rank."""
    rows.codes[-1][where].copy_(q.data.view(torch.uint8))
    if block >= 0:
        rows.scales[-1][block : block + q.scale.shape[0]].copy_(as_bytes(q.scale))


def _cast_piece(rows: Tensor, need: Need, amax: Tensor) -> Quantized:
    """Cast this rank's rows of a cut block, with the amax [1, column blocks] of all its rows."""
    spec = CastSpec(need.spec.format, (-1, need.spec.block[1]), need.spec.scale)
    scale = scale_from_amax(amax, spec)
    if spec.block == (-1, -1):
        return need.backend.quantize_with_scale(rows, scale, spec, amax, need.contract)
    return quantize_with_scale(rows, scale, spec, amax)


def _reduce_amaxes(values: Tensor, needs: Sequence[Need], shards: Shards, mesh: DeviceMesh) -> list[dict[int, Tensor]]:
    """Return the amaxes [1, column blocks] over all ranks of the cut blocks of every need."""
    cols = values.shape[1]
    cuts = [shards.cut(need.spec.block[0]) for need in needs]
    widths = [grid_shape(1, cols, need.spec)[1] for need in needs]
    if not any(cuts):
        return [{} for _ in needs]
    # The bit patterns of amaxes order like the amaxes, with NaN last.
    count = sum(len(cut) * width for cut, width in zip(cuts, widths, strict=True))
    bits = torch.zeros(count, dtype=torch.int32, device=values.device)
    sizes = [w for cut, w in zip(cuts, widths, strict=True) for _ in cut]
    slots = iter(bits.split(sizes))
    amaxes: list[dict[int, Tensor]] = [{block: next(slots) for block in cut} for cut in cuts]
    for need, slot in zip(needs, amaxes, strict=True):
        for start, stop, block in shards.pieces(need.spec.block[0]):
            if block is not None:
                slot[block].copy_(_amax_bits(values[start:stop], need.spec.block[1]))
    torch.distributed.all_reduce(bits, op=torch.distributed.ReduceOp.MAX, group=mesh.get_group())
    return [{block: b.view(torch.float32).unsqueeze(0) for block, b in slot.items()} for slot in amaxes]


def _amax_bits(rows: Tensor, width: int) -> Tensor:
    """Return max |x| over all rows of each block of ``width`` columns (-1 for one block), as int32 bit patterns."""
    bits = rows.detach().abs().amax(0).float().abs().view(torch.int32)  # amax may set the sign of a NaN
    if width == -1:
        return bits.amax(0, keepdim=True)
    pad = -bits.shape[0] % width
    return torch.nn.functional.pad(bits, (0, pad)).view(-1, width).amax(1)


def pack_for_gather(rows: Rows, shards: Shards) -> tuple[Tensor, ...]:
    """Return the tensors that FSDP2 gathers: codes and scales of every need in turn. For one rank, return a single
    tensor of bytes, because FSDP2 then takes only the first tensor."""
    parts = [t for pair in zip(rows.codes, rows.scales, strict=True) for t in pair]
    if shards.ranks > 1:
        return tuple(parts)
    parts.sort(key=lambda t: -t.element_size())  # fp32 first: bytes after them need no alignment
    return (torch.cat([t.reshape(-1).view(torch.uint8) for t in parts]),)


def shard_mesh(weight: Any) -> DeviceMesh:
    """Return the ranks that FSDP2 shards a DTensor over: the last dimension of its mesh; the others replicate."""
    mesh = weight.device_mesh
    return mesh[mesh.mesh_dim_names[-1]] if mesh.ndim > 1 else mesh


def gather(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the concatenated parts of all ranks. Collective call."""
    whole = part.new_empty((mesh.size() * part.shape[0], *part.shape[1:]))
    torch.distributed.all_gather(list(whole.split(part.shape[0])), part.contiguous(), group=mesh.get_group())
    return whole


def unpack_gathered(
    outputs: tuple[Tensor, ...],
    needs: Sequence[Need],
    whole: torch.Size,
    shards: Shards,
    scales: Sequence[Tensor] | None,
) -> list[Quantized]:
    """Return the codes of the whole weight for every need, as views of the tensors of all ranks.

    ``scales`` are the tensors of the last gather, which are overwritten.
    """
    sizes = [shapes(need, whole, shards) for need in needs]
    if shards.ranks == 1:
        outputs = _unpack_bytes(outputs[0], needs, sizes)
    codes = []
    for i, (need, (codes_shape, _)) in enumerate(zip(needs, sizes, strict=True)):
        sent = outputs[2 * i + 1]
        sent = sent.view(torch.uint8) if need.spec.scale == "e8m0" else sent
        scale = assemble_scales(sent, need, whole, shards, None if scales is None else scales[i])
        data = outputs[2 * i].view(-1, *codes_shape[1:])[: whole[0]].view(need.spec.fmt.dtype)
        codes.append(Quantized(data, scale, need.spec))
    return codes


def assemble_scales(sent: Tensor, need: Need, whole: torch.Size, shards: Shards, into: Tensor | None) -> Tensor:
    """Return the scales of all row blocks (or experts), in order, from the padded scales of each rank."""
    if len(whole) == 3:
        parts = [sent[: whole[0]]]
    else:
        height, each = need.spec.block[0], shards.blocks(need.spec.block[0])
        ends = [shards.first_block(r, height) for r in range(shards.ranks + 1)]
        parts = [
            sent[r * each : r * each + b - a] for r, (a, b) in enumerate(zip(ends, ends[1:], strict=False)) if b > a
        ]
    if into is None:
        scales = torch.cat(parts)
        return scales.view(E8M0) if need.spec.scale == "e8m0" else scales
    torch.cat(parts, out=as_bytes(into))
    return into


def _unpack_bytes(
    flat: Tensor, needs: Sequence[Need], sizes: Sequence[tuple[torch.Size, torch.Size]]
) -> tuple[Tensor, ...]:
    """Split the tensor that :func:`pack_for_gather` joined."""
    wanted: list[tuple[torch.Size, torch.dtype]] = []
    for need, (codes, scale) in zip(needs, sizes, strict=True):
        wanted += [(codes, torch.uint8), (scale, _scale_dtype(need))]
    parts, at = [flat] * len(wanted), 0
    for i in sorted(range(len(wanted)), key=lambda i: -wanted[i][1].itemsize):
        shape, dtype = wanted[i]
        size = shape.numel() * dtype.itemsize
        parts[i] = flat[at : at + size].view(dtype).view(shape)
        at += size
    return tuple(parts)


def shapes(need: Need, whole: torch.Size, shards: Shards) -> tuple[torch.Size, torch.Size]:
    """Return the shapes of the codes and scales that one rank sends."""
    if len(whole) == 3:
        n, k = (whole[2], whole[1]) if need.transposed else (whole[1], whole[2])
        return torch.Size((shards.chunk, n, k)), torch.Size((shards.chunk, *grid_shape(n, k, need.spec)))
    blocks = shards.blocks(need.spec.block[0])
    return torch.Size((shards.chunk, whole[1])), torch.Size((blocks, grid_shape(1, whole[1], need.spec)[1]))


def _scale_dtype(need: Need) -> torch.dtype:
    """Return the dtype of scales while they are sent: scales of one byte are sent as bytes."""
    return torch.uint8 if need.spec.scale == "e8m0" else torch.float32


def dequantize(q: Quantized, need: Need, dtype: torch.dtype) -> Tensor:
    """Return the values of the codes of a matrix, or of all experts [E, N, K]."""
    if q.data.dim() == 2:
        return need.backend.dequantize(q, dtype)
    parts = [Quantized(d, s, q.spec) for d, s in zip(q.data, q.scale, strict=True)]
    return torch.stack([need.backend.dequantize(p, dtype) for p in parts])
