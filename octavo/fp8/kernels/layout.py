"""Where codes and scales lie in memory, so that any backend's GEMM can read what any backend's cast wrote.

Logically a :class:`~octavo.fp8.arithmetic.cast.Quantized` always has the shape of the tensor it came from. In memory,
tensor cores want the contracted dimension contiguous, padded, and the scales in an order of their own. A cast is
therefore given which dimension of its [rows, columns] matrix the coming GEMM contracts (``contract``: 1 for x and w in
fwd and dy in dgrad, 0 for w in dgrad and both operands of wgrad) and lays its result out like this::

    codes    the contracted dimension is contiguous; both dimensions of the buffer are padded with zero codes: the
             contracted one to a multiple of 16, or of the block's side along it where that is finite and larger (128,
             32 -> 32), the free one to a multiple of 16. ``data`` is the view of the real elements.
    scales   one a row or column, or one in all: contiguous.
             blocks (1, g) along the contraction: contiguous along the free dimension, padded as that of the codes is
             (to a multiple of 16), so that there is a scale for every row of their buffer. This is the order of
             torch's and DeepGEMM's products.
             blocks (g, g): contiguous along the contraction, that side padded to a multiple of 4.
             Scales in padding are 1; ``scale`` is the view of the real blocks.

The reference writes plain contiguous tensors and reads anything. :func:`k_major` brings whatever it is given into the
layout above, copying only what is not there yet, so that a layout is a matter of speed and never of correctness.
The one thing it trusts: codes that end where their buffer ends are followed by nothing but zeros. So take rows or
columns of a Quantized by casting them, not by slicing its ``data`` along the contraction.
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
"""Tokens of a sequence that one program of the kernels of a paged cache attends to."""

CONTRACTED = {"fwd": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}
"""The dimension of each operand that a GEMM sums over."""
REVISION = 2
"""Goes up whenever sizes or order of codes or scales change. Compiled graphs carry it, because compilers keep graphs on
disk, and one made for another layout must not be found again."""
ALIGN = 16  # what a tensor core's load and torch's scaled products ask of both dimensions
SCALE_ALIGN = 4  # blocks along the contraction under 2-D blocks, fp32: 16 bytes


class Operand(NamedTuple):
    """One operand of a GEMM as it lies in memory, free dimension first.

    ``codes`` [free, contracted], both padded, the last one contiguous; ``scale`` [free blocks, contracted blocks], the
    real ones, strided as the page above says; ``free`` and ``contracted`` are the real sizes.
    """

    codes: Tensor
    scale: Tensor
    free: int
    contracted: int


def check_fit(gemm: str, a_q: Quantized, a_dim: int, b_q: Quantized, b_dim: int) -> None:
    """Raises CastError unless a and b are matrices that agree in what is contracted, ``a_dim`` of a and ``b_dim`` of
    b."""
    if a_q.data.dim() != 2 or b_q.data.dim() != 2 or a_q.data.shape[a_dim] != b_q.data.shape[b_dim]:
        raise CastError(
            f"gemm_{gemm}: the operands are {list(a_q.data.shape)} and {list(b_q.data.shape)}; it takes two matrices "
            f"that agree in dimension {a_dim} of the first and {b_dim} of the second. Flatten leading dimensions first."
        )


def as_bytes(t: Tensor) -> Tensor:
    """Codes and one-byte scales as bytes, since some of torch's operations know no FP8; anything else as it is."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(size: int, multiple: int) -> int:
    return ceil_div(size, multiple) * multiple


def grid_of(rows: int, cols: int, spec: CastSpec) -> tuple[int, int]:
    """Blocks along both sides of a [rows, cols] matrix; -1 is one block, also of an empty side."""
    r, c = spec.block
    return 1 if r == -1 else ceil_div(rows, r), 1 if c == -1 else ceil_div(cols, c)


def padded_sizes(rows: int, cols: int, spec: CastSpec, contract: int) -> tuple[int, int]:
    """(free, contracted) sizes of the buffer of codes for a [rows, cols] matrix."""
    free, contracted = (rows, cols) if contract == 1 else (cols, rows)
    side = spec.block[contract]
    return round_up(free, ALIGN), round_up(contracted, max(side, ALIGN))


def codes_buffer(
    rows: int, cols: int, spec: CastSpec, contract: int, device: torch.device, zero: bool = False
) -> tuple[Tensor, Tensor]:
    """(buffer [free, contracted] padded, view [rows, cols] of the real codes); ``zero`` fills the padding now.

    A kernel that writes its own padding asks for ``zero=False``.
    """
    make = torch.zeros if zero else torch.empty
    buffer = make(padded_sizes(rows, cols, spec, contract), dtype=torch.uint8, device=device).view(spec.fmt.dtype)
    view = buffer[:rows, :cols] if contract == 1 else buffer[:cols, :rows].t()
    return buffer, view


def scales_by_contraction(spec: CastSpec, contract: int) -> bool:
    """Whether the buffer of scales begins with the contracted dimension: fp32 scales of blocks (1, g) along it."""
    return spec.scale != "e8m0" and spec.block[contract] != -1 and spec.block[1 - contract] == 1


def scale_sizes(rows: int, cols: int, spec: CastSpec, contract: int) -> tuple[int, int]:
    """Sizes of the contiguous buffer that holds the scales of a [rows, cols] matrix in the order above, padding
    included: [contracted, free] where :func:`scales_by_contraction`, else [free, contracted]."""
    grid = grid_of(rows, cols, spec)
    free, contracted = grid[1 - contract], grid[contract]
    if spec.scale == "e8m0" or spec.block[contract] == -1:  # one byte each, or one for the whole contraction
        return free, contracted
    if scales_by_contraction(spec, contract):
        return contracted, round_up(free, ALIGN)
    return free, round_up(contracted, SCALE_ALIGN)


Relay = Callable[[Quantized, int], Quantized]
"""Lays codes out anew: see :func:`relay`."""


def relay(q: Quantized, contract: int) -> Quantized:
    """A copy of the codes of q, [rows, columns] or [E, rows, columns], that lies for a contraction of dimension
    ``contract`` of each matrix."""
    *experts, rows, cols = q.data.shape
    codes = q.data.new_zeros((*experts, *padded_sizes(rows, cols, q.spec, contract)), dtype=torch.uint8)
    data = codes[..., :rows, :cols] if contract == 1 else codes[..., :cols, :rows].mT
    data.copy_(q.data.view(torch.uint8))
    return q._replace(data=data.view(q.data.dtype))


def k_major(q: Quantized, contract: int, relay: Relay = relay) -> Operand:
    """``q`` (two-dimensional) as an operand whose dimension ``contract`` is contracted: views where it lies so already.

    Codes that do not are copied by ``relay``. e8m0 scales are taken as they are, one byte each.
    """
    found = _views(q, contract)
    if found.codes is None:
        q = relay(q, contract)
        found = _views(q, contract)
        assert found.codes is not None
    codes, scale = q.data.as_strided(*found.codes), _scale(q, contract, found.scale)
    return Operand(codes, scale, q.data.shape[1 - contract], q.data.shape[contract])


def lies(q: Quantized, contract: int) -> bool:
    """Whether the codes of a two-dimensional q lie so already that :func:`k_major` copies none of them."""
    return _views(q, contract).codes is not None


Strided = tuple[tuple[int, int], tuple[int, int]]  # sizes and strides of a view that begins where its tensor begins
Lying = tuple[Any, ...]
"""How a Quantized lies in memory, as a key: its cast; sizes, strides, offset and bytes of the storage, of codes and of
scales."""


def lying(q: Quantized) -> Lying:
    data, scale, spec = q
    return (
        *(spec, data.shape, data.stride(), data.storage_offset(), data.untyped_storage().nbytes()),
        *(scale.shape, scale.stride(), scale.storage_offset(), scale.untyped_storage().nbytes()),
    )


def without_values(lying: Lying) -> Quantized:
    """A Quantized that lies so, on meta."""

    def tensor(dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int, nbytes: int) -> Tensor:
        held = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        return held.view(dtype).as_strided(size, stride, offset)

    spec = lying[0]
    scale_dtype = E8M0 if spec.scale == "e8m0" else torch.float32
    return Quantized(tensor(spec.fmt.dtype, *lying[1:5]), tensor(scale_dtype, *lying[5:]), spec)


class _Views(NamedTuple):
    """The views that make a Quantized an operand; None for what does not lie so, and is copied."""

    codes: Strided | None
    scale: Strided | None


def _views(q: Quantized, contract: int) -> _Views:
    return _views_of(contract, *lying(q))


@lru_cache(maxsize=4096)
def _views_of(
    contract: int, spec: CastSpec,
    shape: torch.Size, strides: tuple[int, int], offset: int, nbytes: int,
    grid: torch.Size, steps: tuple[int, int], scale_offset: int, scale_nbytes: int,
) -> _Views:  # fmt: skip
    """Worked out once for each way in which codes and scales lie: every GEMM asks, of both of its operands.

    Codes are the corner of a padded buffer where their strides say so and their storage is exactly that buffer: padding
    is zero by construction then.
    """
    free, along = 1 - contract, contract
    sizes = padded_sizes(shape[0], shape[1], spec, contract)
    lie = 0 in shape or (
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
        held = scale_sizes(shape[0], shape[1], spec, contract)
        wanted = (1, held[1]) if scales_by_contraction(spec, contract) else (held[1], 1)
        if step == wanted and scale_nbytes // 4 - scale_offset >= held[0] * held[1]:
            scale = blocks, step
    return _Views((sizes, (sizes[1], 1)) if lie else None, scale)


def experts_k_major(q: Quantized, contract: int, relay: Relay = relay) -> Operand:
    """Weights [E, N, K] of E experts: as :func:`k_major` of each, with codes [E, free, contracted] in one buffer and
    scales [E, free blocks, contracted blocks] as they lie."""
    experts, *shape = q.data.shape
    sizes = padded_sizes(shape[0], shape[1], q.spec, contract)
    strides = (sizes[0] * sizes[1], sizes[1], 1)

    def lies(data: Tensor) -> bool:
        turned, nbytes = data if contract == 1 else data.mT, data.untyped_storage().nbytes()
        return turned.stride() == strides and data.storage_offset() == 0 and nbytes == experts * strides[0]

    data = q.data if lies(q.data) else relay(q, contract).data
    scale = q.scale if contract == 1 else q.scale.mT
    return Operand(data.as_strided((experts, *sizes), strides), scale, shape[1 - contract], shape[contract])


def lines(operand: Operand) -> Tensor:
    """Scales of blocks (1, g) with those of the padding: [padded free, blocks] with stride (1, padded free)."""
    rows, blocks = operand.codes.shape[0], operand.scale.shape[1]
    return operand.scale.as_strided((rows, blocks), (1, rows))


def scales_for(q: Quantized, contract: int) -> Quantized:
    """The same codes (two-dimensional) with scales in the order of a contraction of dimension ``contract``."""
    scale = _scale(q, contract, _views(q, contract).scale)
    return q._replace(scale=scale if contract == 1 else scale.t())


def _scale(q: Quantized, contract: int, lying: Strided | None) -> Tensor:
    """Scales [free blocks, contracted blocks] in the order above: where they lie so already, or copied; padding holds
    1."""
    if lying is not None:
        return q.scale.as_strided(*lying)
    scale = q.scale if contract == 1 else q.scale.t()
    if q.spec.block[contract] == -1:
        return scale.reshape(-1).unsqueeze(1)
    if scale.dtype is not torch.float32:
        return scale.contiguous()
    held = scale.new_ones(scale_sizes(q.data.shape[0], q.data.shape[1], q.spec, contract))
    turned = scales_by_contraction(q.spec, contract)
    return (held.t() if turned else held)[: scale.shape[0], : scale.shape[1]].copy_(scale)
