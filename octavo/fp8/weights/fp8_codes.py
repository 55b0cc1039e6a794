"""The contents of an FP8 weight: a master, from which codes are cast, or only codes and the scales of their blocks.

A shard of a frozen weight has the rows that FSDP2 assigned to it, and the scales of all blocks that its rows touch: a
block across a border has its scale on every rank that it reaches, and :attr:`Codes.lead` is the number of its rows on
earlier ranks. FSDP2 creates it like any shard: cut (``chunk``), then an empty one of the padded size (``new_zeros``),
whose first rows are written (``narrow``, ``copy_``). The padding has no codes; it is added when the rows are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.kernels.layout import ceil_div
from octavo.fp8.weights import fp8_rows, versions
from octavo.fp8.weights.fp8_rows import Need, Rows, Shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Source(NamedTuple):
    """Description of an FP8 weight: the casts that its layers need, the shape of the whole weight, and whether the
    codes of its rows are kept between two gathers."""

    needs: tuple[Need, ...]
    whole: torch.Size
    keep: bool = True


class Master:
    """A master, and the codes of its rows under FSDP2; one for all aliases of a weight. ``casts`` counts them."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.casts = 0
        self.edits = 0  # writes through the weight: the same on every rank, also on one without rows
        self.rows: Rows | None = None
        self.stamp: tuple[object, ...] = ()
        self.dtensor: Any = None  # the DTensor of the master that state dicts get

    @property
    def version(self) -> int:
        """A number that rises with every write to the tensor that torch detects."""
        return self.tensor._version

    def shard_rows(self, values: Callable[[], Tensor], source: Source, shards: Shards, mesh: DeviceMesh) -> Rows:
        """Return the codes of this rank's rows, cast if ``values`` changed. Collective call if blocks are cut."""
        # If blocks are cut, a cast is a collective, so all ranks must make the same decision. The master's version
        # cannot decide then: a rank without rows sees no write to it.
        cut = any(shards.cuts(need) for need in source.needs)
        stamp = (versions.now, versions.edits, self.edits, 0 if cut else self.version, shards)
        if self.rows is not None and self.stamp == stamp:
            return self.rows
        with torch.inference_mode(False), torch.no_grad():
            rows = fp8_rows.cast(values(), source.needs, shards, mesh)
        self.casts += 1
        self.rows, self.stamp = (rows, stamp) if source.keep else (None, ())
        return rows


class Codes:
    """One :class:`Quantized` for each need of ``source``, of the matrix that the GEMM multiplies by; one object for all
    aliases of a weight. ``codes`` is empty in a shard without rows, and before a shard is filled.

    Args:
        is_transposed: True if the weight is the transpose of that matrix (experts stored as [E, K, N]).
        frozen: True for permanent codes, of one need.
        lead: the number of rows of the first block on earlier ranks.
        shard: True for a shard created by FSDP2.
    """

    def __init__(
        self, codes: list[Quantized], source: Source, is_transposed: bool, frozen: bool, lead: int = 0,
        shard: bool = False,
    ) -> None:  # fmt: skip
        self.codes, self.source = codes, source
        self.is_transposed, self.frozen, self.lead, self.shard = is_transposed, frozen, lead, shard

    @classmethod
    def gathered(
        cls, outputs: tuple[Tensor, ...], source: Source, ranks: int, frozen: bool, before: Codes | None
    ) -> Codes:
        """Return the codes of the whole weight from the tensors of all ranks, as a new object or in ``before``."""
        scales = None if before is None else [q.scale for q in before.codes]
        shards = Shards(source.whole[0], ranks, 0)
        codes = fp8_rows.unpack_gathered(outputs, source.needs, source.whole, shards, scales)
        if before is None:
            return cls(codes, source, source.needs[0].transposed, frozen)
        before.codes[:] = codes
        return before

    @property
    def need(self) -> Need:
        """The cast that values are decoded from; the only one of a frozen weight."""
        return self.source.needs[0]

    def find(self, spec: CastSpec) -> Quantized | None:
        """Return the codes under ``spec``; for a frozen weight those in the same blocks, with any kind of scales."""
        for q in self.codes:
            if q.spec == spec or (self.frozen and (q.spec.format, q.spec.block) == (spec.format, spec.block)):
                return q
        return None

    def values(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return code * scale of the local rows in ``dtype``; zeros for rows of the shard that have no codes."""
        if not self.codes:
            return torch.zeros(shape, dtype=dtype, device=device)
        q = _expand_scales(self.codes[0], self.lead) if self.lead else self.codes[0]
        values = fp8_rows.dequantize(q, self.need, dtype)
        values = values.mT if self.is_transposed else values
        missing = shape[0] - values.shape[0]
        return values if not missing else torch.cat([values, values.new_zeros(missing, *values.shape[1:])])

    def map(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """Return a copy with ``change`` applied to codes and scales."""
        codes = [Quantized(change(q.data), change(q.scale), q.spec) for q in self.codes]
        return Codes(codes, self.source, self.is_transposed, self.frozen, self.lead, self.shard)

    def transposed(self) -> Codes:
        """Return the codes of the transposed weight."""
        return Codes(self.codes, self.source, not self.is_transposed, self.frozen, self.lead)

    def expert(self, slot: int) -> Codes:
        """Return the codes of one expert."""
        codes = [Quantized(q.data[slot], q.scale[slot], q.spec) for q in self.codes]
        return Codes(codes, self.source, self.is_transposed, self.frozen)

    def rows(self, start: int, end: int) -> Codes:
        """Return rows (or experts) ``start`` to ``end`` with the scales of their blocks as views; this object itself if
        these are all rows, or if it is empty and will be filled."""
        if not self.codes or (start == 0 and end == self.codes[0].data.shape[0]):
            return self
        q, height, first = self.codes[0], self.need.spec.block[0], start + self.lead
        if q.data.dim() == 3:
            scale, lead = q.scale[start:end], 0
        elif height == -1:
            scale, lead = q.scale, first
        else:
            scale, lead = q.scale[first // height : ceil_div(end + self.lead, height)], first % height
        codes = [Quantized(q.data[start:end], scale, q.spec)] if end > start else []
        return Codes(codes, self.source, self.is_transposed, self.frozen, lead, self.shard)

    def copy_from(self, other: Codes) -> None:
        """Write the codes and scales of ``other`` into these; an empty shard allocates memory for them."""
        if not self.codes:
            self.codes[:] = [Quantized(q.data.clone(), q.scale.clone(), q.spec) for q in other.codes]
            self.lead = other.lead
            return
        for target, source in zip(self.codes, other.codes, strict=True):
            target.data.view(torch.uint8).copy_(source.data.view(torch.uint8))
            target.scale.copy_(source.scale)

    def shard_rows(self, shards: Shards, device: torch.device) -> Rows:
        """Return the tensors that this rank sends for a frozen weight: the codes of its rows as bytes, zero padding,
        and the scales of the blocks that begin here (a block across a border has the same scale on every rank)."""
        whole, height = self.source.whole, self.need.spec.block[0]
        codes_shape, scale_shape = fp8_rows.shapes(self.need, whole, shards)
        if not self.codes:
            codes = torch.zeros(codes_shape, dtype=torch.uint8, device=device)
            return Rows([codes], [torch.ones(scale_shape, dtype=torch.float32, device=device)])
        q = self.codes[0]
        scale = q.scale
        if len(whole) == 2:
            first, last = (shards.first_block(shards.rank + i, height) for i in (0, 1))
            before = first - (0 if height == -1 else shards.here[0] // height)
            scale = scale[before : before + last - first]
        return Rows([_pad_rows(q.data.view(torch.uint8), codes_shape, 0)], [_pad_rows(scale, scale_shape, 1)])


def _expand_scales(q: Quantized, lead: int) -> Quantized:
    """Return codes with one scale per row; the first ``lead`` rows of their first block are on earlier ranks."""
    height, rows = q.spec.block[0], q.data.shape[0]
    scale = q.scale.expand(rows, -1) if height == -1 else q.scale.repeat_interleave(height, 0)[lead : lead + rows]
    return Quantized(q.data, scale.contiguous(), CastSpec(q.spec.format, (1, q.spec.block[1]), q.spec.scale))


def _pad_rows(part: Tensor, shape: torch.Size, fill: int) -> Tensor:
    missing = shape[0] - part.shape[0]
    part = part if not missing else torch.cat([part, part.new_full((missing, *part.shape[1:]), fill)])
    return part.contiguous()
