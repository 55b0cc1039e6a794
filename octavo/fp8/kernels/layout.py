"""The memory layout of codes and scales, which lets any backend's GEMM read the result of any backend's cast.

A :class:`~octavo.fp8.arithmetic.cast.Quantized` always has the logical shape of the tensor it was cast from. In memory,
tensor cores need the contracted dimension contiguous and padded, and the scales in a particular order. A cast therefore
has an argument ``contract``, the dimension of its [rows, columns] matrix that the next GEMM contracts (1 for x and w in
fwd and for dy in dgrad, 0 for w in dgrad and for both operands of wgrad), and returns this layout::

    codes    the contracted dimension is contiguous; both dimensions of the buffer are padded with zero codes: the
             contracted one to a multiple of 16, or of the block's side along it if that is finite and larger (32 or
             128), the free one to a multiple of 16. ``data`` is the view of the real elements.
    scales   one per row, per column or per tensor: contiguous.
             blocks (1, g) along the contraction: contiguous along the free dimension, which is padded like the codes
             (to a multiple of 16), so that every row of their buffer has a scale. torch's and DeepGEMM's products
             read this order.
             blocks (g, g): contiguous along the contraction, which is padded to a multiple of 4.
             Scales in padding are 1; ``scale`` is the view of the real blocks.

The reference writes plain contiguous tensors and reads any strides. :func:`k_major` converts any operand to the layout
above and copies only tensors that differ from it, so that the layout affects speed but not correctness. It relies on an
invariant: in a buffer of the padded size, all codes after the real ones are zero. To select rows or columns of a
Quantized, cast them again instead of slicing ``data`` along the contraction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.formats import E8M0

PAGED_CHUNK = 1024
"""Tokens of a sequence per program of the paged cache's kernels."""

CONTRACTED = {"fwd": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}
"""The dimensions of both operands that a GEMM contracts."""
REVISION = 3
"""Incremented whenever sizes or order of codes or scales change, or the arguments of operators. Compiled graphs contain
it, because compilers cache graphs on disk, and a graph for another layout must not be reused."""
ALIGN = 16  # required of both dimensions by tensor core loads and by torch's scaled products
SCALE_ALIGN = 4  # blocks along the contraction under 2-D blocks, fp32: 16 bytes


class Operand(NamedTuple):
    """One operand of a GEMM in the layout above, free dimension first.

    ``codes`` [free, contracted], both padded, the last one contiguous; ``scale`` [free blocks, contracted blocks], the
    real ones, with the strides above; ``free`` and ``contracted`` are the real sizes.
    """

    codes: Tensor
    scale: Tensor
    free: int
    contracted: int


def check_fit(gemm: str, a_q: Quantized, a_dim: int, b_q: Quantized, b_dim: int) -> None:
    """Raise CastError unless a and b are matrices with the same size in the contracted dimension, ``a_dim`` of a and
    ``b_dim`` of b."""
    if a_q.data.dim() != 2 or b_q.data.dim() != 2 or a_q.data.shape[a_dim] != b_q.data.shape[b_dim]:
        raise CastError(
            f"gemm_{gemm}: the operands are {list(a_q.data.shape)} and {list(b_q.data.shape)}; it takes two matrices "
            f"that agree in dimension {a_dim} of the first and {b_dim} of the second. Flatten leading dimensions first."
        )


def as_bytes(t: Tensor) -> Tensor:
    """View codes and one-byte scales as uint8, because some torch operations do not support FP8; return other tensors
    unchanged."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(size: int, multiple: int) -> int:
    return ceil_div(size, multiple) * multiple


def grid_shape(rows: int, cols: int, spec: CastSpec) -> tuple[int, int]:
    """Return the number of blocks along both sides of a [rows, cols] matrix; a side of -1 is one block, also if the
    matrix is empty."""
    r, c = spec.block
    return 1 if r == -1 else ceil_div(rows, r), 1 if c == -1 else ceil_div(cols, c)


def padded_sizes(rows: int, cols: int, spec: CastSpec, contract: int) -> tuple[int, int]:
    """Return the (free, contracted) sizes of the buffer of codes for a [rows, cols] matrix."""
    free, contracted = (rows, cols) if contract == 1 else (cols, rows)
    side = spec.block[contract]
    return round_up(free, ALIGN), round_up(contracted, max(side, ALIGN))


def codes_buffer(
    rows: int, cols: int, spec: CastSpec, contract: int, device: torch.device, zero: bool = False
) -> tuple[Tensor, Tensor]:
    """Allocate codes for a [rows, cols] matrix. Returns (padded buffer [free, contracted], view [rows, cols]).

    ``zero`` fills the buffer with zeros; it is not needed for kernels that write the padding.
    """
    make = torch.zeros if zero else torch.empty
    buffer = make(padded_sizes(rows, cols, spec, contract), dtype=torch.uint8, device=device).view(spec.fmt.dtype)
    view = buffer[:rows, :cols] if contract == 1 else buffer[:cols, :rows].t()
    return buffer, view


def scales_by_contraction(spec: CastSpec, contract: int) -> bool:
    """True if the contracted dimension of the buffer of scales comes first, for fp32 scales of blocks (1, g) along
    it."""
    return spec.scale != "e8m0" and spec.block[contract] != -1 and spec.block[1 - contract] == 1


def scale_sizes(rows: int, cols: int, spec: CastSpec, contract: int) -> tuple[int, int]:
    """Return the sizes of the contiguous buffer of the scales of a [rows, cols] matrix, padding included.

    They are (contracted, free) if :func:`scales_by_contraction`, otherwise (free, contracted).
    """
    grid = grid_shape(rows, cols, spec)
    free, contracted = grid[1 - contract], grid[contract]
    if spec.scale == "e8m0" or spec.block[contract] == -1:  # one byte each, or one for the whole contraction
        return free, contracted
    if scales_by_contraction(spec, contract):
        return contracted, round_up(free, ALIGN)
    return free, round_up(contracted, SCALE_ALIGN)


CopyToLayout = Callable[[Quantized, int], Quantized]
"""Copies codes into another layout: see :func:`copy_to_layout`."""


def copy_to_layout(q: Quantized, contract: int) -> Quantized:
    """Copy the codes of q, [rows, columns] or [E, rows, columns], into the layout for a contraction of dimension
    ``contract`` of each matrix."""
    *experts, rows, cols = q.data.shape
    codes = q.data.new_zeros((*experts, *padded_sizes(rows, cols, q.spec, contract)), dtype=torch.uint8)
    data = codes[..., :rows, :cols] if contract == 1 else codes[..., :cols, :rows].mT
    data.copy_(q.data.view(torch.uint8))
    return q._replace(data=data.view(q.data.dtype))


def k_major(q: Quantized, contract: int, copy_codes: CopyToLayout = copy_to_layout) -> Operand:
    """Return the two-dimensional ``q`` as an operand whose dimension ``contract`` is contracted.

    Codes and scales that already have the layout are views; ``copy_codes`` copies other codes. e8m0 scales keep their
    byte order.
    """
    views = _views(q, contract)
    if views.codes is None:
        q = copy_codes(q, contract)
        views = _views(q, contract)
        assert views.codes is not None
    codes, scale = q.data.as_strided(*views.codes), _scale(q, contract, views.scale)
    return Operand(codes, scale, q.data.shape[1 - contract], q.data.shape[contract])


def is_k_major(q: Quantized, contract: int) -> bool:
    """True if the codes of a two-dimensional q already have the layout, so that :func:`k_major` copies no codes."""
    return _views(q, contract).codes is not None


Strided = tuple[tuple[int, int], tuple[int, int]]  # sizes and strides of a view that begins where its tensor begins
MemoryKey = tuple[Any, ...]
"""The memory layout of a Quantized as a hashable key: its cast; then sizes, strides, offset and bytes of the storage,
of codes and of scales."""


def memory_key(q: Quantized) -> MemoryKey:
    data, scale, spec = q
    return (
        *(spec, data.shape, data.stride(), data.storage_offset(), data.untyped_storage().nbytes()),
        *(scale.shape, scale.stride(), scale.storage_offset(), scale.untyped_storage().nbytes()),
    )


def make_meta_quantized(key: MemoryKey) -> Quantized:
    """Return a Quantized on the meta device with this memory layout."""

    def tensor(dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int, nbytes: int) -> Tensor:
        storage = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        return storage.view(dtype).as_strided(size, stride, offset)

    spec = key[0]
    scale_dtype = E8M0 if spec.scale == "e8m0" else torch.float32
    return Quantized(tensor(spec.fmt.dtype, *key[1:5]), tensor(scale_dtype, *key[5:]), spec)


class _Views(NamedTuple):
    """Sizes and strides of the views that make a Quantized an operand; None for a tensor that must be copied."""

    codes: Strided | None
    scale: Strided | None


def _views(q: Quantized, contract: int) -> _Views:
    return _compute_views(contract, *memory_key(q))


@lru_cache(maxsize=4096)
def _compute_views(
    contract: int, spec: CastSpec,
    shape: torch.Size, strides: tuple[int, int], offset: int, nbytes: int,
    grid: torch.Size, steps: tuple[int, int], scale_offset: int, scale_nbytes: int,
) -> _Views:  # fmt: skip
    """Compute the views of :func:`_views` once for each memory layout, because every GEMM needs them twice.

    Codes are the corner of a padded buffer if they have its strides and their storage is exactly this buffer; its
    padding is then zero by construction.
    """
    free, along = 1 - contract, contract
    sizes = padded_sizes(shape[0], shape[1], spec, contract)
    codes_fit = 0 in shape or (
        (strides[along] == 1 or shape[along] == 1)
        and strides[free] == sizes[1]
        and offset == 0
        and nbytes == sizes[0] * sizes[1]
    )
    blocks, step = (grid[free], grid[along]), (steps[free], steps[along])
    scale: Strided | None = None
    if spec.block[contract] == -1:
        if blocks[1] == 1 and (step[0] == 1 or blocks[0] == 1):  # strides of 1, also of a transposed row
            scale = (blocks[0], 1), (1, 1)
    elif spec.scale == "e8m0":
        if step == (blocks[1], 1):
            scale = blocks, step
    else:
        # The padding must be inside the storage: kernels read scales of whole buffers.
        padded = scale_sizes(shape[0], shape[1], spec, contract)
        expected = (1, padded[1]) if scales_by_contraction(spec, contract) else (padded[1], 1)
        if step == expected and scale_nbytes // 4 - scale_offset >= padded[0] * padded[1]:
            scale = blocks, step
    return _Views((sizes, (sizes[1], 1)) if codes_fit else None, scale)


def experts_k_major(q: Quantized, contract: int, copy_codes: CopyToLayout = copy_to_layout) -> Operand:
    """Return the weights [E, N, K] of E experts as an operand, each in the layout of :func:`k_major`.

    Codes [E, free, contracted] are in one buffer; scales [E, free blocks, contracted blocks] keep their strides.
    """
    experts, *shape = q.data.shape
    sizes = padded_sizes(shape[0], shape[1], q.spec, contract)
    strides = (sizes[0] * sizes[1], sizes[1], 1)

    def in_layout(data: Tensor) -> bool:
        by_free, nbytes = data if contract == 1 else data.mT, data.untyped_storage().nbytes()
        return by_free.stride() == strides and data.storage_offset() == 0 and nbytes == experts * strides[0]

    data = q.data if in_layout(q.data) else copy_codes(q, contract).data
    scale = q.scale if contract == 1 else q.scale.mT
    return Operand(data.as_strided((experts, *sizes), strides), scale, shape[1 - contract], shape[contract])


def padded_scales(operand: Operand) -> Tensor:
    """Return scales of blocks (1, g) with their padding: [padded free, blocks] with strides (1, padded free)."""
    rows, blocks = operand.codes.shape[0], operand.scale.shape[1]
    return operand.scale.as_strided((rows, blocks), (1, rows))


def reorder_scales(q: Quantized, contract: int) -> Quantized:
    """Return the two-dimensional q with scales in the order for a contraction of dimension ``contract``."""
    scale = _scale(q, contract, _views(q, contract).scale)
    return q._replace(scale=scale if contract == 1 else scale.t())


def _scale(q: Quantized, contract: int, view: Strided | None) -> Tensor:
    """Return scales [free blocks, contracted blocks] in the layout: a view, or a copy whose padding is 1."""
    if view is not None:
        return q.scale.as_strided(*view)
    scale = q.scale if contract == 1 else q.scale.t()
    if q.spec.block[contract] == -1:
        return scale.reshape(-1).unsqueeze(1)
    if scale.dtype is not torch.float32:
        return scale.contiguous()
    buffer = scale.new_ones(scale_sizes(q.data.shape[0], q.data.shape[1], q.spec, contract))
    transposed = scales_by_contraction(q.spec, contract)
    return (buffer.t() if transposed else buffer)[: scale.shape[0], : scale.shape[1]].copy_(scale)
