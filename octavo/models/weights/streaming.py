"""Streams weights into a model on the meta device: they are read, cast and stored piece by piece.

In addition to the model, memory holds one piece: 128 rows or a few megabytes of a matrix, or one expert, and the
buffers of its cast. So the peak memory of a load is the size of the resulting model, including FP8 codes.

    on disk                requested         in the model
    ---------------------  ----------------  --------------------------------------------------------------------------
    values                 -                 values in the requested dtype
    values                 row, block, ...   codes of `fp8.weights.FROZEN[kind]`, of the values as they are on disk
    codes and scales       -                 the same codes, bit for bit; scales exactly, in fp32
    codes and scales       keep_fp8=False    values, code * scale, rounded once

Experts that are separate on disk become one [E, N, K]. If gate and up are concatenated by rows and gate ends inside a
block of the format, the blocks of the concatenated matrix become smaller and their scales are repeated; the codes do
not change.

On several ranks each needs only some rows of a parameter (`window`), and little else is read: of a matrix that is cast
in blocks, the rows of all blocks that overlap the window; of a stack, the experts in it. A scale of a whole matrix uses
the maximum over all ranks (`reduce_max`). The result is bit for bit the same as in one process. A parameter that needs
a rule of transformers is computed in full and then sliced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo import fp8
from octavo.fp8.arithmetic import quantize_with_scale, scale_from_amax
from octavo.fp8.weights import FROZEN, frozen_from_codes, frozen_rows
from octavo.models.errors import ModelError
from octavo.models.folder.quantization import Quantization
from octavo.models.weights.fp8_codes import check_codes, common_block_rows, read_scale, repeat_scales
from octavo.models.weights.name_mapping import Origin, Piece, is_transposed, run_rule
from octavo.models.weights.shards import Shards, StoredTensor

Rows = tuple[int, int]  # [first, last)
Parts = Callable[[int, Rows], Iterator[tuple[int, Tensor]]]  # slot, its rows -> (first row, rows as the GEMM has them)
_CHUNK = 1 << 21  # elements of a matrix that are read and cast at once


@dataclass
class WeightStream:
    """Fills parameters. `kinds`: parameters that are quantized during loading; `dtype_of`: the dtype of values.

    window   parameter, its shape -> the needed rows of its first dimension; None for all
    largest  the maximum of amaxes over all ranks, a collective if each rank has a window
    place    called with a name and its value; None to store the value in the model
    """

    shards: Shards
    model: PreTrainedModel
    scales: Mapping[str, StoredTensor]
    quantization: Quantization | None
    kinds: Mapping[str, str]
    dtype_of: Callable[[str], torch.dtype]
    device: torch.device
    keep_fp8: bool = True
    window: Callable[[str, torch.Size], Rows] | None = None
    reduce_max: Callable[[Tensor], Tensor] = lambda amax: amax
    place: Callable[[str, Tensor], None] | None = None
    rules: PreTrainedModel = field(init=False)  # the model that is passed to transformers' own rules
    notes: list[str] = field(default_factory=list)
    _small_blocks: set[str] = field(default_factory=set)
    _shapes: dict[str, torch.Size] = field(default_factory=dict)
    _turned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Record the shapes of the model, which may be changed before it is filled."""
        self.rules = self.model
        for path, module in self.model.named_modules(remove_duplicate=False):
            tensors = {**module._parameters, **module._buffers}
            self._shapes |= {f"{path}.{leaf}".lstrip("."): t.shape for leaf, t in tensors.items() if t is not None}
            if is_transposed(module):
                self._turned |= {f"{path}.{leaf}".lstrip(".") for leaf in tensors}

    def fill(self, origin: Origin) -> None:
        """Read, cast and place the parameter of an origin. Raises ModelError for tensors that do not fit."""
        if origin.converter is not None:
            self._fill_by_rule(origin)
            return
        codes = [entry.is_codes for entry in origin.stored]
        if any(codes) and not all(codes):
            plain = next(e for e in origin.stored if not e.is_codes)
            raise ModelError(
                f"{plain} is {plain.dtype} but {origin.stored[codes.index(True)]} has FP8 codes, and both are parts of "
                f"{origin.name}. Write the checkpoint again, with all of them in one precision."
            )
        if any(codes) and self.keep_fp8:
            self._place(origin.name, self._read_frozen(origin))
        elif origin.name in self.kinds:
            decoded = self._decode_parts(origin, torch.float32) if any(codes) else None
            self._place(origin.name, self._quantize(origin, decoded))
        else:
            decoded = self._decode_parts(origin, self.dtype_of(origin.name)) if any(codes) else None
            self._place(origin.name, self._read_values(origin, decoded))

    def finish(self) -> None:
        """Add notes about the parameters that were filled."""
        if self._small_blocks:
            self.notes.append(
                f"{len(self._small_blocks)} stacks of experts have smaller blocks than the format's: gate and up, "
                "which are one matrix in the model, have separate scales. Their codes are unchanged, and GEMMs of a "
                "recipe with larger blocks use their dequantized values"
            )

    # values

    def _read_values(self, origin: Origin, parts: Parts | None) -> Tensor:
        """Read the parameter in high precision. `parts` returns the rows of a slot, in GEMM orientation."""
        # Rows of the same dtype on the CPU are read into the parameter's memory; everything else is read in pieces.
        shape, (begin, end) = self._shape(origin.name), self._needed_rows(origin.name)
        here = (end - begin, *shape[1:]) if shape else ()
        out = torch.empty(here, dtype=self.dtype_of(origin.name), device=self.device)
        first, read_parts = origin.slots[0][0], parts or partial(self._read_rows, origin)
        direct = out.device.type == "cpu" and first.stored.dtype is out.dtype and not origin.experts
        if parts is None and direct:
            self.shards.read(first.stored, (begin, end) if shape else None, into=out)
            return _check_finite(out, first.stored)
        for slot in range(begin, end) if origin.experts else (0,):
            matrix, rows = out, (begin, end)
            if origin.experts:
                matrix, rows = out[slot - begin], (0, _num_rows(origin.slots[slot]))
                matrix = matrix.mT if origin.name in self._turned else matrix
            for row, values in read_parts(slot, rows):
                if not matrix.dim():
                    matrix.copy_(values)
                else:
                    matrix[row - rows[0] : row - rows[0] + values.shape[0]].copy_(values)
        return _check_finite(out, first.stored)

    def _read_rows(self, origin: Origin, slot: int, rows: Rows) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows) of a slot in the dtype on disk, a few at a time; for experts always all rows."""
        pieces = origin.slots[slot]
        if origin.experts or not pieces[0].stored.shape:
            yield from self._read_pieces(pieces)
            return
        for begin, end in chunks(pieces[0].stored.shape, rows=rows):
            yield begin, self.shards.read(pieces[0].stored, (begin, end))

    def _read_pieces(self, pieces: tuple[Piece, ...]) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows) of all pieces of a slot, concatenated."""
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

    def _quantize(self, origin: Origin, parts: Parts | None) -> Tensor:
        spec, read_parts = FROZEN[self.kinds[origin.name]], parts or partial(self._read_rows, origin)
        if not origin.experts:
            touched = self._block_rows(origin, spec)
            codes, scale = self._storage(origin, spec, touched)
            reduce_max = self.reduce_max if self.window is not None else None
            cast_into(codes, scale, spec, partial(read_parts, 0, touched), touched[0], reduce_max)
            self._check_scales(scale, origin.slots[0])
            return self._freeze_codes(origin, codes, scale, spec, touched)
        begin, end = self._needed_rows(origin.name)
        codes, scale = self._storage(origin, spec, (begin, end))
        for slot in range(begin, end):
            pieces = origin.slots[slot]
            whole = (
                partial(parts, slot, (0, _num_rows(pieces))) if parts else partial(iter, [(0, self._read_slot(pieces))])
            )
            cast_into(codes[slot - begin], scale[slot - begin], spec, whole)
            self._check_scales(scale[slot - begin], pieces)
        return self._freeze_codes(origin, codes, scale, spec, (begin, end))

    def _check_scales(self, scale: Tensor, pieces: tuple[Piece, ...]) -> None:
        if not bool(torch.isfinite(scale).all()):
            raise ModelError(f"{pieces[0].stored} holds NaN or infinity, which FP8 codes cannot represent.")

    def _read_slot(self, pieces: tuple[Piece, ...]) -> Tensor:
        """Read a whole expert in the dtype on disk."""
        parts = [rows for _, rows in self._read_pieces(pieces)]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def _block_rows(self, origin: Origin, spec: fp8.CastSpec) -> Rows:
        """Return the rows of all blocks that overlap the window of a matrix."""
        (begin, end), rows, height = self._needed_rows(origin.name), self._shape(origin.name)[0], spec.block[0]
        if height == -1 or begin == end:
            return begin, end
        return begin // height * height, min(rows, -(-end // height) * height)

    def _storage(self, origin: Origin, spec: fp8.CastSpec, rows: Rows) -> tuple[Tensor, Tensor]:
        """Allocate codes and scales for some rows [N, K], or for some experts [E, N, K], of a parameter."""
        shape = list(self._shape(origin.name))
        if origin.experts and origin.name in self._turned:
            shape[-2:] = shape[:-3:-1]
        shape[0] = rows[1] - rows[0]
        n, k = shape[-2:]
        grid = [1 if block == -1 else -(-size // block) for size, block in zip((n, k), spec.block, strict=True)]
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        return codes, torch.empty((*shape[:-2], *grid), dtype=torch.float32, device=self.device)

    def _freeze_codes(self, origin: Origin, codes: Tensor, scale: Tensor, spec: fp8.CastSpec, rows: Rows) -> Tensor:
        """Return the frozen weight with the codes and scales of these rows or experts, cut to the window."""
        dtype, turned = self.dtype_of(origin.name), origin.experts and origin.name in self._turned
        if self.window is None:
            return frozen_from_codes(codes, scale, spec, dtype, turned)
        begin, end = self._needed_rows(origin.name)
        if rows != (begin, end):
            codes = codes[begin - rows[0] : end - rows[0]].clone()
        return frozen_rows(codes, scale, spec, dtype, turned, self._shape(origin.name), begin)

    # codes on disk

    def _read_frozen(self, origin: Origin) -> Tensor:
        spec, scales = self.scales_of(origin)
        begin, end = self._needed_rows(origin.name)
        codes, scale = self._storage(origin, spec, (begin, end))
        if origin.experts:
            for slot in range(begin, end):
                pieces = origin.slots[slot]
                self._read_codes(pieces, codes[slot - begin], (0, _num_rows(pieces)))
                scale[slot - begin].copy_(scales[slot])
        else:
            self._read_codes(origin.slots[0], codes, (begin, end))
            scale = scale_rows(scales[0], spec, begin, end).to(self.device, copy=True)
        return self._freeze_codes(origin, codes, scale, spec, (begin, end))

    def _read_codes(self, pieces: tuple[Piece, ...], into: Tensor, rows: Rows) -> None:
        """Read the codes of these rows of one piece, or of all rows of several, into `into`."""
        if len(pieces) == 1 and pieces[0][1:] == (None, False):
            here = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
            self.shards.read(pieces[0].stored, rows, into=here)
            check_codes(here, pieces[0].stored)
            if here is not into:
                into.view(torch.uint8).copy_(here.view(torch.uint8))
            return
        for row, codes in self._read_pieces(pieces):
            check_codes(codes.contiguous(), pieces[0].stored)
            into[row : row + codes.shape[0]].view(torch.uint8).copy_(codes.view(torch.uint8))

    def _decode_parts(self, origin: Origin, dtype: torch.dtype) -> Parts:
        """Return a function from slot and rows to the dequantized values of these rows."""
        spec, scales = self.scales_of(origin)

        def parts(slot: int, rows: Rows) -> Iterator[tuple[int, Tensor]]:
            pieces, height = origin.slots[slot], max(1, spec.block[0])
            # chunks begin at multiples of `border`
            border = height if height % 128 == 0 or 128 % height == 0 else height * 128
            low = rows[0] // border * border
            codes = torch.empty((rows[1] - low, pieces[0].shape[1]), dtype=torch.float8_e4m3fn)
            self._read_codes(pieces, codes, (low, rows[1]))
            for begin, end in chunks(tuple(codes.shape), height):
                scale = scale_rows(scales[slot], spec, low + begin, low + end)
                values = fp8.dequantize(fp8.Quantized(codes[begin:end], scale, spec), dtype)
                yield max(rows[0], low + begin), values[max(0, rows[0] - low - begin) :]

        return parts

    def scales_of(self, origin: Origin) -> tuple[fp8.CastSpec, list[Tensor]]:
        """Return the cast of the codes of an origin, and the scales of each slot."""
        q = self.quantization
        assert q is not None
        read = [[read_scale(self.shards, self.scales[p.stored.name], p, q) for p in slot] for slot in origin.slots]
        heights, turned = [piece.shape[0] for piece in origin.slots[0]], origin.slots[0][0].turned
        block = q.spec.block if not turned or q.kind != "block" else q.spec.block[::-1]
        rows = common_block_rows(q, heights, turned, read)
        if rows != block[0]:
            self._small_blocks.add(origin.name)
        if rows == -1:
            return fp8.CastSpec("e4m3", (rows, block[1]), "fp32"), [slot[0] for slot in read]
        slots = [zip(slot, heights, strict=True) for slot in read]
        out = [torch.cat([repeat_scales(s, h, block[0], rows) for s, h in slot]) for slot in slots]
        pow2 = all(bool((s.frexp().mantissa == 0.5).all()) for s in out)
        return fp8.CastSpec("e4m3", (rows, block[1]), "pow2" if pow2 else "fp32"), out

    # transformers' own rules

    def _fill_by_rule(self, origin: Origin) -> None:
        codes = [entry for entry in origin.stored if entry.is_codes]
        if codes and self.keep_fp8:
            rule = ", ".join(type(op).__name__ for op in origin.converter.operations) if origin.converter else ""
            raise ModelError(
                f"{codes[0]} has FP8 codes, but its tensor becomes {origin.name} by {rule}, which Octavo cannot "
                "apply to codes. Load with keep_fp8=False to dequantize the values first."
            )
        # transformers' rule needs whole tensors; the other paths read pieces.
        values = {}
        for entry in origin.stored:
            if entry.is_codes:
                single = Origin(origin.name, ((Piece(entry),),))
                decoded = self._decode_parts(single, self.dtype_of(origin.name))
                values[entry.name] = torch.cat([rows for _, rows in decoded(0, (0, entry.shape[0]))])
            else:
                values[entry.name] = _check_finite(self.shards.read(entry), entry)
        for name, value in run_rule(origin, self.rules, values).items():
            if value.shape != self._shape(name):
                raise ModelError(
                    f"{origin.stored[0]} and similar tensors give {name} the shape {list(value.shape)}; the model's is "
                    f"{list(self._shape(name))}. Check that config.json and the weights belong together."
                )
            begin, end = self._needed_rows(name)
            cut = self.window is not None and bool(value.dim())
            if name in self.kinds:
                frozen: Tensor = fp8.freeze_weight(value.to(self.device), self.kinds[name], self.dtype_of(name))
                self._place(name, frozen.detach()[begin:end].clone() if cut else frozen)
            else:
                value = value[begin:end].clone() if cut else value
                self._place(name, value.to(self.device, self.dtype_of(name)))

    # the model

    def _shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def _needed_rows(self, name: str) -> Rows:
        """Return the needed rows (or experts) of a parameter."""
        shape = self._shape(name)
        if self.window is not None and shape:
            return self.window(name, shape)
        return 0, shape[0] if shape else 1

    def _place(self, name: str, value: Tensor) -> None:
        if self.place is not None:
            self.place(name, value)
            return
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = value
        elif isinstance(value, nn.Parameter):
            module._parameters[leaf] = value
        else:
            meta_parameter = module._parameters[leaf]
            trains = value.is_floating_point() and (meta_parameter is None or meta_parameter.requires_grad)
            module._parameters[leaf] = nn.Parameter(value, requires_grad=trains)


def _num_rows(pieces: tuple[Piece, ...]) -> int:
    """Return the number of rows of a slot."""
    return sum(piece.shape[0] for piece in pieces)


def chunks(shape: tuple[int, ...], step: int = 128, rows: Rows | None = None) -> Iterator[Rows]:
    """Yield ranges of rows of a few megabytes, each except the last a multiple of `step` and of 128 rows; over all
    rows, or over `rows`."""
    (first, last), width = rows or (0, shape[0]), max(1, torch.Size(shape[1:]).numel())
    unit = step if step % 128 == 0 else step * 128
    high = max(unit, _CHUNK // width // unit * unit)
    for begin in range(first, last, high):
        yield begin, min(last, begin + high)


def scale_rows(scale: Tensor, spec: fp8.CastSpec, begin: int, end: int) -> Tensor:
    """Return the scales of rows [begin, end); `begin` is the first row of a block."""
    if spec.block[0] == -1:
        return scale
    return scale[begin // spec.block[0] : -(-end // spec.block[0])]


def cast_into(
    codes: Tensor, scale: Tensor, spec: fp8.CastSpec, parts: Callable[[], Iterator[tuple[int, Tensor]]],
    first: int = 0, over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> None:  # fmt: skip
    """Quantize a matrix, passed in pieces of rows, into codes [N, K] and their scales: the same result as
    `fp8.quantize` on the full matrix.

    A single scale needs the amax of the matrix first, so the rows are read twice. `first`: the row of the full matrix
    with which `codes` begin, the first row of a block; `over_ranks`: the maximum of amaxes over all ranks with rows of
    the matrix.
    """
    whole = None
    if spec.block == (-1, -1):
        amaxes = [values.abs().amax().float() for _, values in parts()]
        amax = torch.stack(amaxes).amax() if amaxes else torch.zeros(())
        whole = scale_from_amax(amax if over_ranks is None else over_ranks(amax), spec)
        scale.fill_(whole)
        if not bool(torch.isfinite(whole)):
            return
    for at, values in parts():
        row = at - first
        values = (values.float() if values.dtype is torch.float64 else values).to(codes.device)
        if whole is None:
            q = fp8.quantize(values, spec, "reference")
            scale_rows(scale, spec, row, row + values.shape[0]).copy_(q.scale)
        else:
            q = quantize_with_scale(values, whole.to(codes.device), spec)
        codes[row : row + values.shape[0]].copy_(q.data)


def _check_finite(values: Tensor, stored: StoredTensor) -> Tensor:
    """Return the values; raise ModelError for NaN and infinity."""
    if fp8.find_nonfinite([(stored.name, values)]):
        raise ModelError(
            f"{stored} holds NaN or infinity. Download or write it again; `octavo verify` lists all of them."
        )
    return values
