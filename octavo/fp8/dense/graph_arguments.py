"""The arguments of compiled operators: backends and casts as text, and codes and scales as plain buffers.

A compiler folds text and cannot trace the objects that it describes; generated code never reads FP8. The operators are
in :mod:`octavo.fp8.dense.compiled`, with the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.formats import E8M0
from octavo.fp8.arithmetic.recipe import GEMMS, Gemm, Recipe
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.registry import Backend, Selection, get, select

# --- backends and casts as text ---------------------------------------------------------------------------------------


def describe(recipe: Recipe, selections: Mapping[str, Selection]) -> str:
    """Return the GEMMs of a layer as ``fwd|dgrad|wgrad``, each ``backend:cast of a;cast of b``, empty without FP8.

    The operators need nothing else, also in another process that loads the graph from a cache on disk. The text has the
    revision of the layout (``backend@revision``), because graphs of other versions may expect other buffer sizes.
    """
    parts = []
    for name in GEMMS:
        gemm, selection = recipe.gemm(name), selections.get(name)
        if gemm is None or selection is None:
            parts.append("")
        else:
            backend = f"{selection.backend.name}@{layout.REVISION}"
            parts.append(f"{backend}:{_format_spec(gemm.a)};{_format_spec(gemm.b)}")
    return "|".join(parts)


def format_casts(recipe: Recipe) -> str:
    """Return the casts of a recipe, without delayed scaling, as text for :func:`parse_casts`."""
    parts = [recipe.name, recipe.format]
    for name in GEMMS:
        gemm = recipe.gemm(name)
        parts.append("" if gemm is None else f"{_format_spec(gemm.a)};{_format_spec(gemm.b)}")
    return "|".join(parts)


def parse_casts(text: str) -> Recipe:
    """Return the recipe from the text of :func:`format_casts`."""
    name, fmt, *gemms = text.split("|")
    pairs = [[_parse_spec(spec) for spec in gemm.split(";")] if gemm else None for gemm in gemms]
    fwd, dgrad, wgrad = (None if pair is None else Gemm(*pair) for pair in pairs)
    return Recipe(name, fmt, fwd, dgrad, wgrad)


class GemmTexts(NamedTuple):
    """The parts of the text of :func:`describe`, one per GEMM, and the name of a call that has no layer."""

    fwd: str
    dgrad: str
    wgrad: str
    name: str = ""

    def text(self, gemm: str) -> str:
        """Return ``backend:cast;cast`` of a GEMM, or an empty string in high precision."""
        return self.fwd if gemm == "fwd" else self.dgrad if gemm == "dgrad" else self.wgrad

    def operand(self, gemm: str, index: int) -> str:
        """Return ``backend:cast`` of operand 0 (a) or 1 (b) of a GEMM, or an empty string in high precision."""
        text = self.text(gemm)
        if not text:
            return ""
        backend, casts = text.split(":")
        return backend + ":" + casts.split(";")[index]


def parse_key(key: str) -> GemmTexts:
    """Split the text of :func:`describe`, only by string operations, which Dynamo folds."""
    return GemmTexts(*key.split("|"))


def block_rows(operand: str) -> int:
    """Return the number of rows in a block of ``backend:cast``, -1 for all rows and 0 for an empty string. Dynamo can
    fold it."""
    return int(operand.split(":")[1].split(",")[1]) if operand else 0


def _format_spec(spec: CastSpec) -> str:
    return f"{spec.format},{spec.block[0]},{spec.block[1]},{spec.scale}"


@lru_cache(maxsize=256)
def _parse_spec(text: str) -> CastSpec:
    fmt, rows, cols, scale = text.split(",")
    return CastSpec(fmt, (int(rows), int(cols)), scale)


@lru_cache(maxsize=256)
def parse_operand(text: str) -> tuple[Backend, CastSpec]:
    """Return the backend and the cast from ``backend:cast``."""
    backend, spec = text.split(":")
    return get(backend.partition("@")[0]), _parse_spec(spec)


@lru_cache(maxsize=256)
def parse_gemm(text: str) -> tuple[Backend, CastSpec, CastSpec]:
    """Return the backend and both casts from ``backend:cast;cast``."""
    backend, casts = text.split(":")
    a, b = casts.split(";")
    return get(backend.partition("@")[0]), _parse_spec(a), _parse_spec(b)


HIGH_KEY = "||"
"""The text of :func:`describe` for three GEMMs in high precision."""


def make_key(casts: str, device: str, backend: str, name: str) -> str:
    """Return :func:`describe` for the casts of a recipe (:func:`format_casts`) and the backends selected for them, and
    the ``name`` under which GEMMs of a weight without a layer are counted.

    Raises BackendError if the requested backend does not support one of its GEMMs.
    """
    recipe = parse_casts(casts)
    fp8_gemms = [gemm for gemm in GEMMS if recipe.gemm(gemm) is not None]
    selected = {gemm: select(gemm, recipe_or_spec=recipe, device=device, requested=backend) for gemm in fp8_gemms}
    return f"{describe(recipe, selected)}|{name}"


# As torch.compiler.assume_constant_result, without importing torch._dynamo before the first call: selecting a backend
# queries the machine, which a compiler cannot trace.
make_key._dynamo_marked_constant = True  # type: ignore[attr-defined]


# --- codes as plain buffers -------------------------------------------------------------------------------------------


def pack(q: Quantized, contract: int) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of ``q`` as contiguous buffers, uint8 and fp32 (uint8 for e8m0), in the layout for a GEMM
    that contracts dimension ``contract``. Copies only tensors with a different layout.

    Scales are flat: a compiler would specialize on a dimension of ceil(tokens / 128), which is 1 for up to 128 tokens,
    and compile twice.
    """
    rows, cols = q.data.shape
    operand = layout.k_major(q, contract)
    scale = operand.scale.view(torch.uint8) if operand.scale.dtype is E8M0 else operand.scale
    if layout.scales_by_contraction(q.spec, contract):
        scale = scale.t()
    sizes = layout.scale_sizes(rows, cols, q.spec, contract)
    count = sizes[0] * sizes[1]
    is_exact_buffer = scale.storage_offset() == 0 and scale.untyped_storage().nbytes() == count * scale.itemsize
    if is_exact_buffer and scale.stride() == (sizes[1], 1):
        flat = scale.as_strided((count,), (1,))
    else:
        flat = scale.new_ones(count)
        flat.view(sizes)[: scale.shape[0], : scale.shape[1]] = scale
    return operand.codes.view(torch.uint8), flat


def unpack(codes: Tensor, scale: Tensor, rows: int, cols: int, spec: CastSpec, contract: int) -> Quantized:
    """Return the [rows, cols] matrix in buffers of :func:`pack`, as views."""
    grid = layout.grid_shape(rows, cols, spec)
    free, contracted = (grid[0], grid[1]) if contract == 1 else (grid[1], grid[0])
    data, scale = codes.view(spec.fmt.dtype), scale.view(layout.scale_sizes(rows, cols, spec, contract))
    if layout.scales_by_contraction(spec, contract):
        scale = scale.t()
    scale = scale[:free, :contracted]
    if spec.scale == "e8m0":
        scale = scale.view(E8M0)
    if contract == 1:
        return Quantized(data[:rows, :cols], scale, spec)
    return Quantized(data[:cols, :rows].t(), scale.t(), spec)


def fake_pack(x: Tensor, text: str, contract: int) -> tuple[Tensor, Tensor]:
    """Return uninitialized buffers like :func:`pack`'s for x under ``backend:cast``; empty for no cast."""
    if not text:
        return x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.float32)
    spec = parse_operand(text)[1]
    rows, cols = x.shape
    a, b = layout.scale_sizes(rows, cols, spec, contract)
    scale_dtype = torch.uint8 if spec.scale == "e8m0" else torch.float32
    codes = x.new_empty(layout.padded_sizes(rows, cols, spec, contract), dtype=torch.uint8)
    return codes, x.new_empty(a * b, dtype=scale_dtype)


def pack_pair(x: Tensor, row: Quantized | None, col: Quantized | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pack codes of x for a contraction of its columns and of its rows; the buffers of None are empty."""
    packed = [fake_pack(x, "", 1) if q is None else pack(q, contract) for q, contract in ((row, 1), (col, 0))]
    for i in range(2):  # a backend may return one tensor for both; an operator must not alias its results
        if packed[0][i].untyped_storage()._cdata == packed[1][i].untyped_storage()._cdata:
            packed[1] = (packed[1][0], packed[1][1].clone()) if i else (packed[1][0].clone(), packed[1][1])
    return (*packed[0], *packed[1])
