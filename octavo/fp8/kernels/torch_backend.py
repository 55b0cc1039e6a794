"""The torch backend: the three GEMMs through ``torch.nn.functional.scaled_mm`` (cuBLASLt, in some cases CUTLASS).

torch has GEMMs but no casts; these run on the backend that :func:`select` chooses. This file converts operands to the
layout that scaled_mm needs for each kind of scaling of a [m, k] times b [n, k].T::

    tensor   one scale each                                          sm 8.9 and later
    row      scales [m, 1] and [1, n]                                sm 8.9 to 10.x; on 9.0 with CUDA 12.9
    block    1x128 by 128x128: scales [m, k/128] with stride (1, m),
             [k/128 rounded up to 4, n/128] with stride (1, that)    sm 9.x, CUDA 12.9
    line     1x128 by 1x128: as a's above, for both                  sm 9.x, CUDA 12.9
    mx       1x32, e8m0 scales in tiles of 128x4 (see swizzled)      sm 10.0 and later, CUDA 12.8

The last three need both operands in E4M3. With one scale per tensor or row, one operand may be in E5M2.

k and n must be multiples of 16, and both operands contiguous along k, as in :mod:`octavo.fp8.kernels.layout`. The
casting backend copies operands with another layout (``copy_to_layout``), and padded columns of the result are removed.
(Rules: aten/src/ATen/native/cuda/ScaledBlas.cpp.)

Fast accumulation, which keeps partial sums in fewer bits, is used only in the forward, and only with one scale per
tensor or row. The GEMM adds a bias if it then rounds only once; otherwise it returns fp32. For block scales, a test on
the device at first use decides this (:func:`why_not_bias`). If the GEMM rounds twice, Triton computes the product: it
supports the same GPUs and operands, and adds the bias in registers. torch would need an fp32 result, an addition and a
cast, which move 18 bytes per output instead of 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType
from torch.utils._python_dispatch import _disable_current_modes

from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.formats import E8M0
from octavo.fp8.kernels.layout import (
    CONTRACTED,
    CopyToLayout,
    MemoryKey,
    Operand,
    check_fit,
    copy_to_layout,
    is_k_major,
    k_major,
    make_meta_quantized,
    memory_key,
    padded_scales,
    round_up,
)
from octavo.fp8.kernels.reference import apply_scales
from octavo.fp8.kernels.registry import GemmOnlyBackend, get

_KINDS = {  # blocks as (across, along) the contraction
    ((-1, -1), (-1, -1)): "tensor",
    ((1, -1), (1, -1)): "row",
    ((1, 128), (128, 128)): "block",
    ((1, 128), (1, 128)): "line",
    ((1, 32), (1, 32)): "mx",
}
_KIND_NAMES = {
    "block": "blocks of 1x128 by 128x128",
    "line": "blocks of 1x128 by 1x128",
    "mx": "blocks of 1x32 with e8m0 scales",
}
_SCALINGS = {
    "tensor": (ScalingType.TensorWise, ScalingType.TensorWise),
    "row": (ScalingType.RowWise, ScalingType.RowWise),
    "block": (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
    "line": (ScalingType.BlockWise1x128, ScalingType.BlockWise1x128),
    "mx": (ScalingType.BlockWise1x32, ScalingType.BlockWise1x32),
}
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class Product(NamedTuple):
    """The arguments of scaled_mm: a [m, k] and b [k, n], both contiguous along k, and the scales of ``kind``."""

    kind: str
    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor


class TorchBackend(GemmOnlyBackend):
    """torch's GEMMs, with the casts of another backend."""

    name = "torch"

    def version(self) -> str:
        return f"torch {torch.__version__}" + (f" (CUDA {torch.version.cuda})" if torch.version.cuda else "")

    def why_not_auto(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "on the CPU it is slower than the reference; request it by name"

    def why_not_casts(
        self, op: str, a: CastSpec, b: CastSpec, device: torch.device, shape: Sequence[int | None] | None
    ) -> str | None:
        kind = scaling_kind(op, a, b)
        if kind is None:
            return f"scaled_mm cannot multiply {a} by {b}"
        if kind in _KIND_NAMES and "e5m2" in (a.format, b.format):
            return f"scaled_mm has {_KIND_NAMES[kind]} only for two matrices in E4M3, not for {a} by {b}"
        return _why_not(kind, device.type, device.index)

    def gemm(
        self, op: str, a_q: Quantized, b_q: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        product = make_product(op, a_q, b_q, self.copy_to_layout)
        a_dim, b_dim = CONTRACTED[op]
        rows, cols = a_q.data.shape[1 - a_dim], b_q.data.shape[1 - b_dim]
        if not (rows and cols and a_q.data.shape[a_dim]):  # the kernels do not take empty matrices
            empty = product.scale_a.new_zeros(rows, cols, dtype=out_dtype)
            return empty if bias is None else empty + bias.to(out_dtype)
        fast = op == "fwd" and product.kind in ("tensor", "row")
        if product.kind == "row" and not _has_row_kernel(product.a, out_dtype, bias):
            return _multiply_rows(product, fast, bias, out_dtype, rows, cols)
        if bias is None and out_dtype in (*_SIXTEEN_BITS, torch.float32):
            return _crop(multiply(product, out_dtype, fast), rows, cols)
        if bias is not None and out_dtype in _SIXTEEN_BITS and (fast or product.kind == "block"):
            if bias.dtype == out_dtype and (fast or why_not_bias(bias.device, out_dtype) is None):
                padded = (
                    F.pad(bias, (0, product.b.shape[1] - cols)) if product.b.shape[1] != cols else _align_bias(bias)
                )
                return _crop(multiply(product, out_dtype, fast, padded), rows, cols)
            if product.kind == "block":
                return get("triton").gemm_fwd(a_q, b_q, out_dtype, bias)
        return add_bias_and_round(multiply(product, torch.float32, fast)[:rows, :cols], bias, out_dtype)


@lru_cache(maxsize=256)
def scaling_kind(op: str, a: CastSpec, b: CastSpec) -> str | None:
    """Return the kind of scaling of a GEMM with operands of these casts, or None if scaled_mm does not support it."""
    dims = CONTRACTED[op]
    a_block, b_block = ((s.block[1 - dim], s.block[dim]) for s, dim in zip((a, b), dims, strict=True))
    kind = _KINDS.get((a_block, b_block))
    if kind is None or a.format == b.format == "e5m2":  # cuBLAS has no product of two E5M2 matrices
        return None
    return kind if (a.scale == "e8m0") == (b.scale == "e8m0") == (kind == "mx") else None


@lru_cache(maxsize=128)
def _why_not(kind: str, device: str, index: int | None) -> str | None:
    """Return why this kind of GEMM cannot run on this device, or None if it can."""
    if device == "cpu":
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"):
            return f"torch {torch.__version__} has no scaled_mm for the CPU"
        return None if kind in ("tensor", "row") else f"torch has no {_KIND_NAMES[kind]} on the CPU"
    if device != "cuda":
        return f"scaled_mm runs on NVIDIA GPUs, not on {device}"
    if torch.version.hip is not None:
        return "it needs an NVIDIA GPU, but this torch is built for AMD GPUs"
    if not torch.cuda.is_available():
        return "it depends on the GPU, but this process sees no GPU"
    return why_not_on_gpu(kind, torch.cuda.get_device_capability(index), _cuda_version())


def why_not_on_gpu(kind: str, capability: tuple[int, int], cuda: tuple[int, int]) -> str | None:
    """Return why there is no GEMM of this kind for a compute capability and torch's CUDA version, or None if there
    is."""
    here = f"this GPU has {capability[0]}.{capability[1]}"
    built = f"this torch is built with {cuda[0]}.{cuda[1]}"
    if capability < (8, 9):
        return f"FP8 needs compute capability 8.9 or later, {here}"
    if kind in ("block", "line"):
        if capability[0] != 9:
            return f"cuBLAS has {_KIND_NAMES[kind]} only on compute capability 9.0, {here}"
        return None if cuda >= (12, 9) else f"{_KIND_NAMES[kind]} need CUDA 12.9 or later, {built}"
    if kind == "mx":
        if capability < (10, 0):
            return f"{_KIND_NAMES[kind]} need compute capability 10.0 or later, {here}"
        return None if cuda >= (12, 8) else f"{_KIND_NAMES[kind]} need CUDA 12.8 or later, {built}"
    if kind == "row" and capability[0] == 9 and cuda < (12, 9):
        # With older CUDA, torch uses a CUTLASS kernel that reads scales out of bounds (pytorch#133334).
        return f"one scale per row needs CUDA 12.9 or later on compute capability 9.0, {built}"
    if kind == "row" and capability >= (11, 0):
        return f"cuBLAS rejects one scale per row above compute capability 10.x (pytorch#192707), {here}"
    return None


def _cuda_version() -> tuple[int, int]:
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return int(major), int(minor)


def make_product(op: str, a_q: Quantized, b_q: Quantized, copy_codes: CopyToLayout = copy_to_layout) -> Product:
    """Return the operands of a GEMM in the layout of scaled_mm; ``copy_codes`` copies codes that have another layout.

    Raises CastError unless they are matrices of matching shapes with casts that scaled_mm supports.
    """
    plan = _plan_views(op, memory_key(a_q), memory_key(b_q))
    if plan.copies_a or plan.copies_b:
        a_q = copy_codes(a_q, CONTRACTED[op][0]) if plan.copies_a else a_q
        b_q = copy_codes(b_q, CONTRACTED[op][1]) if plan.copies_b else b_q
        plan = _plan_views(op, memory_key(a_q), memory_key(b_q))
    if plan.views is None:
        return _make_product(op, a_q, b_q)
    a, b, scale_a, scale_b = plan.views
    return Product(
        plan.kind,
        a_q.data if a is None else a_q.data.as_strided(*a),
        b_q.data if b is None else b_q.data.as_strided(*b),
        a_q.scale if scale_a is None else a_q.scale.as_strided(*scale_a),
        b_q.scale if scale_b is None else b_q.scale.as_strided(*scale_b),
    )


_View = tuple[torch.Size, tuple[int, ...], int | torch.SymInt]  # sizes, strides, offset


class _ViewPlan(NamedTuple):
    """The conversion of operands with a given memory layout into a product."""

    kind: str
    copies_a: bool  # the codes of a must be copied
    copies_b: bool
    views: tuple[_View | None, ...] | None
    """Views of both codes and both scales, None for an unchanged tensor; None instead of all if scales must be
    copied."""


@lru_cache(maxsize=4096)
def _plan_views(op: str, a: MemoryKey, b: MemoryKey) -> _ViewPlan:
    """Compute the plan for operands with these layouts once, with two operands on the meta device."""
    with _disable_current_modes():
        a_q, b_q = make_meta_quantized(a), make_meta_quantized(b)
        product = _make_product(op, a_q, b_q)
        copied = not is_k_major(a_q, CONTRACTED[op][0]), not is_k_major(b_q, CONTRACTED[op][1])
    views: list[_View | None] = []
    for result, operand in zip(product[1:], (a_q.data, b_q.data, a_q.scale, b_q.scale), strict=True):
        if result.untyped_storage()._cdata != operand.untyped_storage()._cdata:
            return _ViewPlan(product.kind, *copied, None)
        view, original = ((t.shape, t.stride(), t.storage_offset()) for t in (result, operand))
        views.append(None if view == original else view)
    return _ViewPlan(product.kind, *copied, tuple(views))


def _make_product(op: str, a_q: Quantized, b_q: Quantized) -> Product:
    a_dim, b_dim = CONTRACTED[op]
    check_fit(op, a_q, a_dim, b_q, b_dim)
    kind = scaling_kind(op, a_q.spec, b_q.spec)
    if kind is None:
        raise CastError(
            f"gemm_{op}: scaled_mm cannot multiply {a_q.spec} by {b_q.spec}; use the casts of a recipe that "
            "the torch backend supports, or another backend."
        )
    a, b = k_major(a_q, a_dim), k_major(b_q, b_dim)
    if kind in ("block", "line"):  # scales include the padding of the free dimension, so the product has all rows
        scale_b = padded_scales(b) if kind == "line" else _square_scales(b)
        return Product(kind, a.codes, b.codes.t(), padded_scales(a), scale_b)
    codes, scale_a, scale_b = a.codes[: a.free], a.scale, b.scale.t()
    if kind == "row" and b.codes.shape[0] != b.free:
        scale_b = F.pad(scale_b, (0, b.codes.shape[0] - b.free), value=1.0)
    if kind == "mx":
        scale_a, scale_b = swizzle_scales(a.scale), swizzle_scales(b.scale)
    return Product(kind, codes, b.codes.t(), scale_a, scale_b)


def _square_scales(operand: Operand) -> Tensor:
    """Return scales [blocks along the contraction rounded up to 4, free blocks], contiguous along the first."""
    free, blocks = operand.scale.shape
    blocks = round_up(blocks, 4)
    return operand.scale.as_strided((blocks, free), (1, blocks))


def swizzle_scales(scale: Tensor) -> Tensor:
    """Return e8m0 scales [rows, blocks] in the order of tensor cores, flat, padded with zeros to whole tiles.

    Tiles have 128 rows by 4 blocks and are stored row-major. Within a tile, the scale (row, block) is byte
    (row % 32) * 16 + (row // 32) * 4 + block (cuBLAS: 1D block scaling factors layout).
    """
    rows, blocks = scale.shape
    padded = scale.new_zeros(round_up(rows, 128), round_up(blocks, 4), dtype=torch.uint8)
    padded[:rows, :blocks] = scale.view(torch.uint8)
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(E8M0)


def multiply(product: Product, out_dtype: torch.dtype, fast: bool = False, bias: Tensor | None = None) -> Tensor:
    """Call scaled_mm. Returns [m, n], padded columns included."""
    recipe_a, recipe_b = _SCALINGS[product.kind]
    swizzle = SwizzleType.SWIZZLE_32_4_4 if product.kind == "mx" else None
    return F.scaled_mm(
        product.a, product.b, product.scale_a, recipe_a, product.scale_b, recipe_b,
        swizzle_a=swizzle, swizzle_b=swizzle, bias=bias, output_dtype=out_dtype, use_fast_accum=fast,
    )  # fmt: skip


def _has_row_kernel(a: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> bool:
    """True if torch's kernel for row scales is used for this output dtype.

    cuBLAS (sm 9.0) supports all dtypes. On other GPUs torch uses CUTLASS, whose support of fp16 and fp32 depends on the
    version of torch, so it is used only for bf16.
    """
    if a.device.type != "cuda" or torch.cuda.get_device_capability(a.device)[0] == 9:
        return True
    return out_dtype is torch.bfloat16 and (bias is None or bias.dtype is torch.bfloat16)


def _multiply_rows(
    product: Product, fast: bool, bias: Tensor | None, out_dtype: torch.dtype, rows: int, cols: int
) -> Tensor:
    """Multiply codes in fp32 and apply row scales afterwards. They are powers of two, so that only the last step
    rounds."""
    one = product.scale_a.new_ones(1, 1)
    out = multiply(product._replace(kind="tensor", scale_a=one, scale_b=one), torch.float32, fast)
    return add_bias_and_round(apply_scales(out, product.scale_a, product.scale_b)[:rows, :cols], bias, out_dtype)


def add_bias_and_round(out: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Return the fp32 result plus the bias, rounded once."""
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype).contiguous()


def _crop(out: Tensor, rows: int, cols: int) -> Tensor:
    """Remove padded rows and columns from the result."""
    return out if out.shape == (rows, cols) else out[:rows, :cols].contiguous()


@lru_cache(maxsize=16)
def why_not_bias(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a GEMM of 1x128 by 128x128 must not add a bias in ``dtype`` on this device, or None if its result
    equals an addition in fp32 before rounding once. A small product tests this, once per process."""
    m, n, k = 256, 384, 512
    with _disable_current_modes():  # the caller may be in a fake mode, but the test needs the real device
        g = torch.Generator(device).manual_seed(0)
        a, b, added = (torch.randn(*size, generator=g, device=device) for size in ((m, k), (n, k), (n,)))
        grids = ((k // 128, m), (n // 128, k // 128))
        powers = (torch.randint(-3, 4, size, generator=g, device=device) for size in grids)
        scale_a, scale_b = (torch.exp2(power.float()).t() for power in powers)
        product = Product("block", a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t(), scale_a, scale_b)
        bias = (added * 64).to(dtype)
        expected = add_bias_and_round(multiply(product, torch.float32), bias, dtype)
        try:
            actual = multiply(product, dtype, bias=bias)
        except RuntimeError as error:
            return f"torch raises: {str(error).strip().splitlines()[0]}"
        share = (actual != expected).float().mean().item()  # another order of summation in fp32 flips a few ties
    return None if share < 0.02 else f"{share:.1%} of the values differ from an addition before rounding once"


def _align_bias(bias: Tensor) -> Tensor:
    """Return the bias contiguous and aligned to 16 bytes, as cuBLAS needs it; a slice of a fused bias may not be."""
    bias = bias.contiguous()
    return bias.clone() if bias.storage_offset() * bias.element_size() % 16 else bias
