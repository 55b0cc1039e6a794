"""The Triton backend: every operation on every NVIDIA GPU since Ada, and therefore the fallback on these GPUs.

This file declares what the kernels support and calls them. Only ``triton_kernels/`` imports triton, when a kernel is
first used. On the CPU the kernels run slowly in Triton's interpreter if ``TRITON_INTERPRET=1`` is set before the
import. Tests compare them with the reference this way; "auto" does not choose Triton on the CPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from octavo.fp8.arithmetic.adamw import Hyper, Piece
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.moments import MaxOverRanks
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.invariance import KERNELS, RowKernels, is_active
from octavo.fp8.kernels import triton_kernels as kernels
from octavo.fp8.kernels.groups import Groups
from octavo.fp8.kernels.layout import CONTRACTED
from octavo.fp8.kernels.registry import Backend

MIN_CAPABILITY = (8, 9)  # Ada, the first GPUs whose tensor cores support FP8
WHOLE_BLOCKS = ((-1, -1), (1, -1), (-1, 1))
CAST_SIDES = (1, 16, 32, 64, 128)  # sides of finite blocks, for a cast
ALONG, ACROSS = (-1, 32, 128), (-1, 1, 128)  # sides of blocks for a GEMM, along and across its contraction


class TritonBackend(Backend):
    """Casts, GEMMs, grouped GEMMs, fused layers and the optimizer's step in Triton."""

    name = "triton"

    def version(self) -> str:
        return f"triton {_version()}"

    def why_not_auto(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "Triton's interpreter is for tests; request it by name"

    def supports(
        self, op: str, what: CastSpec | Recipe, device: torch.device, shape: Sequence[int | None] | None
    ) -> str | None:
        why_not = _why_not(device.type, device.index)
        if why_not is not None:
            return why_not
        if isinstance(what, CastSpec):
            return _why_not_cast(what)
        return None if op.removeprefix("grouped_") not in CONTRACTED else why_not_gemm(op, what)

    def quantize(self, x: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        return kernels.cast.quantize(x, spec, contract)

    def quantize_both(self, x: Tensor, row: CastSpec, col: CastSpec) -> tuple[Quantized, Quantized]:
        return kernels.cast.quantize_both(x, row, col)

    def quantize_with_scale(
        self, x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None, contract: int = 1
    ) -> Quantized:
        return kernels.cast.quantize_with_scale(x, scale, spec, amax, (contract,))[0]

    def quantize_both_with_scale(
        self, x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None
    ) -> tuple[Quantized, Quantized]:
        row, col = kernels.cast.quantize_with_scale(x, scale, spec, amax, (1, 0))
        return row, col

    def dequantize(self, q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
        return kernels.cast.dequantize(q, dtype)

    def copy_to_layout(self, q: Quantized, contract: int) -> Quantized:
        return kernels.cast.copy_to_layout(q, contract)

    def gemm_fwd(self, x_q: Quantized, w_q: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        if torch._C._len_torch_function_stack() and is_active():
            return kernels.rows.fp8_product(x_q, w_q, out_dtype, bias)
        return kernels.gemm.gemm(x_q, 1, w_q, 1, out_dtype, bias)

    def gemm_decode(self, x_q: Quantized, w_q: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        if torch._C._len_torch_function_stack() and is_active():
            return kernels.rows.fp8_product(x_q, w_q, out_dtype, bias)
        return kernels.decode.decode(x_q, w_q, out_dtype, bias)

    def gemm_dgrad(self, dy_q: Quantized, w_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        return kernels.gemm.gemm(dy_q, 1, w_q, 0, out_dtype)

    def gemm_wgrad(self, dy_q: Quantized, x_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        return kernels.gemm.gemm(dy_q, 0, x_q, 0, out_dtype)

    def quantize_rows(self, x: Tensor, spec: CastSpec, groups: Groups, contract: int = 1) -> Quantized:
        return kernels.grouped_cast.quantize_rows(x, spec, groups, contract)

    def quantize_rows_both(
        self, x: Tensor, row: CastSpec, col: CastSpec, groups: Groups
    ) -> tuple[Quantized, Quantized]:
        return kernels.grouped_cast.quantize_rows_both(x, row, col, groups)

    def quantize_experts(self, w: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        return kernels.grouped_cast.quantize_experts(w, spec, contract)

    def grouped_fwd(
        self, x_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        if torch._C._len_torch_function_stack() and is_active():
            return kernels.rows.fp8_grouped_product(x_q, w_q, groups, out_dtype, bias)
        return kernels.grouped.fwd(x_q, w_q, groups, out_dtype, bias)

    def grouped_dgrad(self, dy_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype) -> Tensor:
        return kernels.grouped.dgrad(dy_q, w_q, groups, out_dtype)

    def grouped_wgrad(self, dy_q: Quantized, x_q: Quantized, groups: Groups, out_dtype: torch.dtype) -> Tensor:
        return kernels.grouped.wgrad(dy_q, x_q, groups, out_dtype)

    def rmsnorm_quantize(
        self, x: Tensor, weight: Tensor, eps: float, row: CastSpec | None, col: CastSpec | None,
        out: torch.dtype | None = None, low: torch.dtype | None = None, rstd: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Quantized | None, Quantized | None]:  # fmt: skip
        return kernels.fused.rmsnorm_quantize(x, weight, eps, row, col, out, low, rstd)

    def rmsnorm_codes(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        row: CastSpec | None,
        col: CastSpec | None,
        out: torch.dtype | None = None,
        low: torch.dtype | None = None,
        rstd: Tensor | None = None,
    ) -> tuple[Tensor, Quantized | None, Quantized | None]:
        return kernels.fused.rmsnorm_codes(x, weight, eps, row, col, out, low, rstd)

    def rmsnorm_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, needs_x: bool, needs_w: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return kernels.fused.rmsnorm_backward(dy, x, weight, rstd, needs_x, needs_w)

    def swiglu_quantize(
        self, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
    ) -> tuple[Tensor, Quantized | None, Quantized | None]:
        return kernels.fused.swiglu_quantize(gate, up, row, col)

    def swiglu_codes(
        self, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
    ) -> tuple[Quantized | None, Quantized | None]:
        return kernels.fused.swiglu_codes(gate, up, row, col)

    def swiglu_backward_quantize(
        self, dh: Tensor, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
    ) -> tuple[Quantized | None, Quantized | None, Quantized | None, Quantized | None]:
        return kernels.fused.swiglu_backward_quantize(dh, gate, up, row, col)

    def adamw(
        self, pieces: Sequence[Piece], hyper: Hyper, factor: float | Tensor | None, agree: MaxOverRanks | None = None
    ) -> None:
        kernels.adamw.step(pieces, hyper, factor, agree)


class PagedKernels(Protocol):
    """The kernels of a paged key-value cache for one new token per sequence, in ``triton_kernels/paged.py``."""

    def write(
        self, k: Tensor, v: Tensor, where: Tensor, codes: Tensor, scales: Tensor | None, dtype: torch.dtype
    ) -> None: ...

    def attend(
        self, q: Tensor, codes: Tensor, scales: Tensor | None, table: Tensor, lengths: Tensor, scale: float, page: int
    ) -> Tensor: ...


def paged_kernels() -> PagedKernels:
    """Import triton and return the kernels of a paged cache, for devices for which :func:`why_not_paged` is None."""
    module: PagedKernels = kernels.paged
    return module


def row_kernels() -> RowKernels:
    """Import triton and return the batch-invariant kernels. The import fails on devices for which :func:`why_not_rows`
    returns a reason."""
    module: RowKernels = kernels.rows
    return module


KERNELS["cuda"] = row_kernels


def why_not_rows(device: torch.device) -> str | None:
    """Return why there are no batch-invariant kernels for this device, or None. A CPU needs no such kernels, because
    its products are batch-invariant."""
    return None if device.type == "cpu" else _why_not(device.type, device.index)


def why_not_gemm(op: str, recipe: Recipe) -> str | None:
    """Return why no GPU has a Triton kernel for this GEMM of a recipe, or None if all since :data:`MIN_CAPABILITY`
    have one."""
    gemm = op.removeprefix("grouped_")
    dims, casts = CONTRACTED[gemm], recipe.gemm(gemm)
    if casts is None:
        return f"the recipe keeps {op} in high precision: there is no FP8 GEMM"
    return _why_not_operand(casts.a, dims[0]) or _why_not_operand(casts.b, dims[1])


@lru_cache(maxsize=64)
def why_not_paged(device: torch.device) -> str | None:
    """Return why the kernels of a paged cache are not used on this device, or None if they are."""
    return _why_not(device.type, device.index) if device.type == "cuda" else "they run only on GPUs"


@lru_cache(maxsize=1)
def _version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@lru_cache(maxsize=64)
def _why_not(kind: str, index: int | None) -> str | None:
    """Return why the Triton kernels cannot run on this type of device, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if kind == "cuda":
        if torch.version.hip is not None:
            return "it needs an NVIDIA GPU, but this torch is built for AMD GPUs"
        if not torch.cuda.is_available():
            return None  # planning for another machine
        capability = torch.cuda.get_device_capability(index)
        here = f"this GPU has {capability[0]}.{capability[1]}"
        return None if capability >= MIN_CAPABILITY else f"FP8 needs compute capability 8.9 or later, {here}"
    if kind == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return "it runs on NVIDIA GPUs (on the CPU only in Triton's interpreter, TRITON_INTERPRET=1, for tests)"
    return f"it runs on NVIDIA GPUs, not on {kind}"


def quantize_both_by_warps(x: Tensor, row: CastSpec, col: CastSpec, warps: int) -> tuple[Quantized, Quantized]:
    """``TritonBackend.quantize_both`` with tiles of 8 or 16 warps, for blocks of 128: to measure which is faster."""
    first, second = kernels.cast.quantize_both(x, row, col, warps)
    return first, second


def _why_not_cast(spec: CastSpec) -> str | None:
    if spec.block in WHOLE_BLOCKS or all(side in CAST_SIDES for side in spec.block):
        return None
    return f"it has no kernel for blocks of {spec}"


def _why_not_operand(spec: CastSpec, contract: int) -> str | None:
    if spec.block[contract] in ALONG and spec.block[1 - contract] in ACROSS:
        return _why_not_cast(spec)
    return (
        "its GEMMs support blocks with 32, 128 or all elements along the contraction and 1, 128 or all elements across "
        f"it, not {spec} contracted along dimension {contract}"
    )
