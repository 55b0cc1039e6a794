"""Weights streamed into a model that is on the meta device: read, cast and laid in place piece by piece.

What is held beside the model itself is one piece of work: 128 rows or a few megabytes of a matrix, or one expert, and
what its cast needs. So the peak of a load is the model that comes out of it, FP8 codes and all.

    on disk                asked for         in the model
    ---------------------  ----------------  --------------------------------------------------------------------------
    values                 -                 values in the dtype asked for
    values                 row, block, ...   codes of `fp8.FROZEN[kind]`, of the values as they are on disk
    codes and scales       -                 the same codes, bit for bit; scales exactly, in fp32
    codes and scales       keep_fp8=False    values, code * scale, rounded once

Experts one by one on disk become one [E, N, K]. Where gate and up lie one below the other and the upper one ends inside
a block of the format, the blocks of the whole are made smaller and their scales repeated: the codes stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo import fp8
from octavo.models.codes import check_codes, finer, read_scale, rows_of_a_block
from octavo.models.errors import ModelError
from octavo.models.quantization import Quantization
from octavo.models.shards import Shards, Stored
from octavo.models.sources import Origin, Piece, is_transposed, run_rule

Parts = Callable[[int], Iterator[tuple[int, Tensor]]]  # slot -> (first row, rows as the GEMM has them)
_CHUNK = 1 << 21  # elements of a matrix that are read and cast at once


@dataclass
class Stream:
    """Fills parameters. `kinds` names those that are quantized on the way; `dtype_of` gives that of values."""

    shards: Shards
    model: PreTrainedModel
    scales: Mapping[str, Stored]
    quantization: Quantization | None
    kinds: Mapping[str, str]
    dtype_of: Callable[[str], torch.dtype]
    device: torch.device
    keep_fp8: bool = True
    notes: list[str] = field(default_factory=list)
    _cut: int = 0

    def fill(self, origin: Origin) -> None:
        """Read, cast and place what an origin makes. Raises ModelError for tensors that do not make it."""
        if origin.converter is not None:
            self._fill_by_rule(origin)
            return
        codes = [entry.is_codes for entry in origin.stored]
        if any(codes) and not all(codes):
            plain = next(e for e in origin.stored if not e.is_codes)
            raise ModelError(
                f"{plain} holds {plain.dtype} and {origin.stored[codes.index(True)]} FP8 codes, and both are parts of "
                f"{origin.name}. Write the checkpoint again, with all of them in one precision."
            )
        if any(codes) and self.keep_fp8:
            self._place(origin.name, self._frozen(origin))
        elif origin.name in self.kinds:
            decoded = self._decoded(origin, torch.float32) if any(codes) else None
            self._place(origin.name, self._quantized(origin, decoded))
        else:
            decoded = self._decoded(origin, self.dtype_of(origin.name)) if any(codes) else None
            self._place(origin.name, self._values(origin, decoded))

    def finish(self) -> None:
        """Notes about what was met on the way."""
        if self._cut:
            self.notes.append(
                f"{self._cut} stacks of experts have smaller blocks than the format's: gate and up, which are one "
                "matrix in the model, have scales of their own: their codes are those on disk, and GEMMs of a recipe "
                "with larger blocks take their dequantized values"
            )

    # values

    def _values(self, origin: Origin, parts: Parts | None) -> Tensor:
        """The parameter in high precision. `parts` gives the rows of a slot, as the GEMM has them."""
        shape, transposed = self._shape(origin.name), self._transposed(origin)
        out = torch.empty(shape, dtype=self.dtype_of(origin.name), device=self.device)
        first = origin.slots[0][0]
        direct = out.device.type == "cpu" and first.stored.dtype is out.dtype and not origin.experts
        if parts is None and direct:
            self.shards.read(first.stored, into=out)
            return _finite(out, first.stored)
        for slot, pieces in enumerate(origin.slots):
            matrix = (out[slot].mT if transposed else out[slot]) if origin.experts else out
            for row, values in parts(slot) if parts is not None else self._rows(pieces):
                if not matrix.dim():
                    matrix.copy_(values)
                else:
                    matrix[row : row + values.shape[0]].copy_(values)
        return _finite(out, first.stored)

    def _rows(self, pieces: tuple[Piece, ...]) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of the pieces of a slot one below the other, in the dtype on disk, a few at a time."""
        row = 0
        for piece in pieces:
            if piece.at is not None or piece.turned or not piece.stored.shape:
                one = None if piece.at is None else (piece.at, piece.at + 1)
                whole = self.shards.read(piece.stored, one)
                whole = whole if one is None else whole[0]
                yield row, whole.mT if piece.turned else whole
            else:
                for begin, end in chunks(piece.stored.shape):
                    yield row + begin, self.shards.read(piece.stored, (begin, end))
            row += piece.shape[0] if piece.shape else 0

    # values on disk, codes in the model

    def _quantized(self, origin: Origin, parts: Parts | None) -> nn.Parameter:
        spec = fp8.FROZEN[self.kinds[origin.name]]
        codes, scale, transposed = self._storage(origin, spec)
        for slot, pieces in enumerate(origin.slots):
            into = (codes[slot], scale[slot]) if origin.experts else (codes, scale)
            if parts is not None:
                cast_into(*into, spec, partial(parts, slot))
            elif origin.experts:
                cast_into(*into, spec, partial(iter, [(0, self._slot(pieces))]))
            else:
                cast_into(*into, spec, partial(self._rows, pieces))
            if not bool(torch.isfinite(into[1]).all()):
                raise ModelError(f"{pieces[0].stored} holds NaN or infinity, which no FP8 code stands for.")
        return fp8.frozen(codes, scale, spec, self.dtype_of(origin.name), transposed)

    def _slot(self, pieces: tuple[Piece, ...]) -> Tensor:
        """A whole expert, in the dtype on disk."""
        parts = [rows for _, rows in self._rows(pieces)]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def _storage(self, origin: Origin, spec: fp8.CastSpec) -> tuple[Tensor, Tensor, bool]:
        """Memory for codes [E, N, K] and scales of a parameter, and whether the module stores it transposed."""
        shape, transposed = list(self._shape(origin.name)), self._transposed(origin)
        if transposed:
            shape[-2:] = shape[:-3:-1]
        n, k = shape[-2:]
        grid = [1 if block == -1 else -(-size // block) for size, block in zip((n, k), spec.block, strict=True)]
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        return codes, torch.empty((*shape[:-2], *grid), dtype=torch.float32, device=self.device), transposed

    # codes on disk

    def _frozen(self, origin: Origin) -> nn.Parameter:
        spec, scales = self.scales_of(origin)
        codes, scale, transposed = self._storage(origin, spec)
        for slot, pieces in enumerate(origin.slots):
            into, grid = (codes[slot], scale[slot]) if origin.experts else (codes, scale)
            self._codes(pieces, into)
            grid.copy_(scales[slot])
        return fp8.frozen(codes, scale, spec, self.dtype_of(origin.name), transposed)

    def _codes(self, pieces: tuple[Piece, ...], into: Tensor) -> None:
        if into.device.type == "cpu" and len(pieces) == 1 and pieces[0][1:] == (None, False):
            self.shards.read(pieces[0].stored, into=into)
            check_codes(into, pieces[0].stored)
            return
        for row, codes in self._rows(pieces):
            check_codes(codes.contiguous(), pieces[0].stored)
            into[row : row + codes.shape[0]].view(torch.uint8).copy_(codes.view(torch.uint8))

    def _decoded(self, origin: Origin, dtype: torch.dtype) -> Parts:
        """Slot -> the rows of its values."""
        spec, scales = self.scales_of(origin)

        def parts(slot: int) -> Iterator[tuple[int, Tensor]]:
            pieces = origin.slots[slot]
            height, width = sum(piece.shape[0] for piece in pieces), pieces[0].shape[1]
            codes = torch.empty((height, width), dtype=torch.float8_e4m3fn)
            self._codes(pieces, codes)
            for begin, end in chunks((height, width), max(1, spec.block[0])):
                q = fp8.Quantized(codes[begin:end], scale_rows(scales[slot], spec, begin, end), spec)
                yield begin, fp8.dequantize(q, dtype)

        return parts

    def scales_of(self, origin: Origin) -> tuple[fp8.CastSpec, list[Tensor]]:
        """The cast that the codes of an origin are under, and the scales of each slot."""
        q = self.quantization
        assert q is not None
        read = [[read_scale(self.shards, self.scales[p.stored.name], p, q) for p in slot] for slot in origin.slots]
        heights, turned = [piece.shape[0] for piece in origin.slots[0]], origin.slots[0][0].turned
        block = q.spec.block if not turned or q.kind != "block" else q.spec.block[::-1]
        rows = rows_of_a_block(q, heights, turned, read)
        self._cut += rows != block[0]
        if rows == -1:
            return fp8.CastSpec("e4m3", (rows, block[1]), "fp32"), [slot[0] for slot in read]
        out = [torch.cat([finer(s, h, block[0], rows) for s, h in zip(slot, heights, strict=True)]) for slot in read]
        pow2 = all(bool((s.frexp().mantissa == 0.5).all()) for s in out)
        return fp8.CastSpec("e4m3", (rows, block[1]), "pow2" if pow2 else "fp32"), out

    # transformers' own rules

    def _fill_by_rule(self, origin: Origin) -> None:
        codes = [entry for entry in origin.stored if entry.is_codes]
        if codes and self.keep_fp8:
            rule = ", ".join(type(op).__name__ for op in origin.converter.operations) if origin.converter else ""
            raise ModelError(
                f"{codes[0]} holds FP8 codes, and on the way to {origin.name} its tensor goes through {rule}, for "
                "which Octavo has no way with codes. Load with keep_fp8=False: the values are dequantized first."
            )
        values = {}
        for entry in origin.stored:
            if entry.is_codes:
                single = Origin(origin.name, ((Piece(entry),),))
                decoded = self._decoded(single, self.dtype_of(origin.name))
                values[entry.name] = torch.cat([rows for _, rows in decoded(0)])
            else:
                values[entry.name] = _finite(self.shards.read(entry), entry)
        for name, value in run_rule(origin, self.model, values).items():
            if value.shape != self._shape(name):
                raise ModelError(
                    f"{origin.stored[0]} and its like make {name} of shape {list(value.shape)}; the model's is "
                    f"{list(self._shape(name))}. Check that config.json and the weights belong together."
                )
            if name in self.kinds:
                self._place(name, fp8.freeze_weight(value.to(self.device), self.kinds[name], self.dtype_of(name)))
            else:
                self._place(name, value.to(self.device, self.dtype_of(name)))

    # the model

    def _shape(self, name: str) -> torch.Size:
        return self._module(name)[2].shape

    def _transposed(self, origin: Origin) -> bool:
        return origin.experts and is_transposed(self._module(origin.name)[0])

    def _module(self, name: str) -> tuple[nn.Module, str, Tensor]:
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        found = module._parameters.get(leaf)
        return module, leaf, found if found is not None else module._buffers[leaf]  # type: ignore[return-value]

    def _place(self, name: str, value: Tensor) -> None:
        module, leaf, _ = self._module(name)
        if leaf in module._buffers:
            module._buffers[leaf] = value
        elif isinstance(value, nn.Parameter):
            module._parameters[leaf] = value
        else:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=value.is_floating_point())


def chunks(shape: tuple[int, ...], step: int = 128) -> Iterator[tuple[int, int]]:
    """Row ranges of a few megabytes, each a multiple of `step` and of 128 rows long but for the last."""
    rows, width = shape[0], max(1, torch.Size(shape[1:]).numel())
    unit = step if step % 128 == 0 else step * 128
    high = max(unit, _CHUNK // width // unit * unit)
    for begin in range(0, rows, high):
        yield begin, min(rows, begin + high)


def scale_rows(scale: Tensor, spec: fp8.CastSpec, begin: int, end: int) -> Tensor:
    """The scales of rows [begin, end), which begin with a block."""
    if spec.block[0] == -1:
        return scale
    return scale[begin // spec.block[0] : -(-end // spec.block[0])]


def cast_into(
    codes: Tensor, scale: Tensor, spec: fp8.CastSpec, parts: Callable[[], Iterator[tuple[int, Tensor]]]
) -> None:
    """Quantize a matrix that comes in rows into codes [N, K] and their scales: what `fp8.quantize` gives of the whole.

    One scale for all of it needs its amax first, so that the rows are read twice.
    """
    whole = None
    if spec.block == (-1, -1):
        largest = [values.abs().amax().float() for _, values in parts()]
        whole = fp8.scale_from_amax(torch.stack(largest).amax(), spec)
        scale.fill_(whole)
        if not bool(torch.isfinite(whole)):
            return
    for row, values in parts():
        values = (values.float() if values.dtype is torch.float64 else values).to(codes.device)
        if whole is None:
            q = fp8.quantize(values, spec, "reference")
            scale_rows(scale, spec, row, row + values.shape[0]).copy_(q.scale)
        else:
            q = fp8.quantize_with_scale(values, whole.to(codes.device), spec)
        codes[row : row + values.shape[0]].copy_(q.data)


def _finite(values: Tensor, stored: Stored) -> Tensor:
    """The values, if they are some."""
    if fp8.not_finite([(stored.name, values)]):
        raise ModelError(f"{stored} holds NaN or infinity. Download or write it again; `octavo verify` lists all such.")
    return values
