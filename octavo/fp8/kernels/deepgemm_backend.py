"""The DeepGEMM backend: DeepSeek's block-scaled GEMMs for Hopper and datacenter Blackwell, if installed.

DeepGEMM is built from source (github.com/deepseek-ai/DeepGEMM, 2.0 or later). It has GEMMs but no casts. Its operands
have the layout of :mod:`octavo.fp8.kernels.layout`. It is used for these products, all in E4M3::

    blockwise             1x128 by 128x128                fp8_gemm_nt, recipe (1, 128, 128), BF16 out
    wgrad, blockwise_1d   1x128 by 1x128                  fp8_gemm_nt, recipe (1, 1, 128), added to fp32
    grouped fwd, dgrad    1x128 by 128x128 of an expert   m_grouped_fp8_gemm_nt_contiguous, BF16 out

The first form writes only BF16. A product with another output dtype, or with a bias, uses the second form, with the
scales of the 128x128 blocks repeated. Grouped products have no second form; if the call requests another output dtype
or a bias, Triton computes them, which supports the same GPUs and operands. torch, or Triton if torch has no kernel,
computes a wgrad of the second form in 16 bits: DeepGEMM would add it to zeros in fp32 and then cast, which moves 18
bytes per weight instead of 2. A grouped wgrad needs the number of rows of each expert on the host, and every step would
wait for the device; other backends compute it.
(Rules: csrc/apis/gemm.hpp and layout.hpp.)
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.kernels.groups import TILE, Groups
from octavo.fp8.kernels.layout import CONTRACTED, CopyToLayout, Operand, experts_k_major, k_major, padded_scales
from octavo.fp8.kernels.registry import GEMMS, GemmOnlyBackend, get
from octavo.fp8.kernels.torch_backend import add_bias_and_round, scaling_kind

SOURCE = "github.com/deepseek-ai/DeepGEMM"
REQUIRED_FUNCTIONS = ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "get_mk_alignment_for_contiguous_layout")
RECIPE_BLOCK_WEIGHTS, RECIPE_ROW_BLOCKS = (
    (1, 128, 128),
    (1, 1, 128),
)  # DeepGEMM's "recipes": block sides along m, n and k


class DeepGemmBackend(GemmOnlyBackend):
    """Blockwise GEMMs of DeepGEMM, with the casts of another backend."""

    name, ops = "deepgemm", GEMMS

    def version(self) -> str:
        for distribution in ("deep_gemm", "deep-gemm"):
            try:
                return f"deep_gemm {importlib.metadata.version(distribution)}"
            except importlib.metadata.PackageNotFoundError:
                continue
        return "deep_gemm, not installed" if importlib.util.find_spec("deep_gemm") is None else "deep_gemm"

    def why_not_auto(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "it runs only on NVIDIA GPUs"

    def why_not_here(self, device: torch.device) -> str | None:
        return _why_not(device.type, device.index)

    def why_not_casts(
        self, op: str, a: CastSpec, b: CastSpec, device: torch.device, shape: Sequence[int | None] | None
    ) -> str | None:
        if op == "grouped_wgrad":
            return (
                "its grouped_wgrad needs the rows of each expert on the host, and every step would wait for the device"
            )
        return _why_not_casts(op.removeprefix("grouped_"), a, b, device)

    def gemm(
        self, op: str, a_q: Quantized, b_q: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        a_dim, b_dim = CONTRACTED[op]
        _check(op, a_q, b_q, a_q.data.dim() == b_q.data.dim() == 2 and a_q.data.shape[a_dim] == b_q.data.shape[b_dim])
        rows, cols = a_q.data.shape[1 - a_dim], b_q.data.shape[1 - b_dim]
        if not (rows and cols and a_q.data.shape[a_dim]):
            empty = a_q.scale.new_zeros(rows, cols, dtype=out_dtype)
            return empty if bias is None else empty + bias.to(out_dtype)
        squares = b_q.spec.block == (128, 128)
        if op == "wgrad" and not squares and out_dtype is not torch.float32:
            # DeepGEMM's second form adds to fp32: see the top of this file.
            why_not = get("torch").supports(op, recipe("blockwise_1d"), a_q.data.device, None)
            return get("torch" if why_not is None else "triton").gemm_wgrad(a_q, b_q, out_dtype)
        a, b = k_major(a_q, a_dim, self.copy_to_layout), k_major(b_q, b_dim, self.copy_to_layout)
        shape = (a.codes.shape[0], b.codes.shape[0])
        # DeepGEMM compiles a kernel for each value of these sizes. Weights have few; the number of tokens, k in wgrad,
        # changes from step to step.
        fixed = "mn" if op == "wgrad" else "nk"
        if squares and bias is None and out_dtype is torch.bfloat16:
            out = torch.empty(shape, dtype=out_dtype, device=a.codes.device)
            _import_deep_gemm().fp8_gemm_nt(
                (a.codes, padded_scales(a)),
                (b.codes, b.scale.contiguous()),
                out,
                recipe=RECIPE_BLOCK_WEIGHTS,
                compiled_dims=fixed,
            )
            return out[:rows, :cols].contiguous()
        # This form adds to its output, so that the output begins with zeros.
        out = torch.zeros(shape, dtype=torch.float32, device=a.codes.device)
        scale_b = _repeat_block_scales(b) if squares else padded_scales(b)
        _import_deep_gemm().fp8_gemm_nt(
            (a.codes, padded_scales(a)), (b.codes, scale_b), out, c=out, recipe=RECIPE_ROW_BLOCKS, compiled_dims=fixed
        )
        return add_bias_and_round(out[:rows, :cols], bias, out_dtype)

    def grouped_fwd(
        self, x_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        if bias is not None:
            return get("triton").grouped_fwd(x_q, w_q, groups, out_dtype, bias)
        return _grouped(self.copy_to_layout, "fwd", x_q, w_q, groups, out_dtype)

    def grouped_dgrad(self, dy_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype) -> Tensor:
        return _grouped(self.copy_to_layout, "dgrad", dy_q, w_q, groups, out_dtype)


@lru_cache(maxsize=64)
def _why_not(kind: str, index: int | None) -> str | None:
    """Return why DeepGEMM cannot run on this type of device, or None. Cached, because looking up a package is slow."""
    if importlib.util.find_spec("deep_gemm") is None:
        return "deep_gemm is not installed"
    if kind != "cuda" or torch.version.hip is not None:
        return f"it runs on NVIDIA GPUs, not on {'AMD' if kind == 'cuda' else kind}"
    if not torch.cuda.is_available():
        return "it depends on the GPU, but this process sees no GPU"
    return why_not_on_gpu(torch.cuda.get_device_capability(index)) or _why_not_library()


def why_not_on_gpu(capability: tuple[int, int]) -> str | None:
    """Return why DeepGEMM does not run on a GPU of this compute capability, or None if it does."""
    if capability[0] in (9, 10):
        return None
    return f"it supports compute capabilities 9.0 and 10.x, but this GPU has {capability[0]}.{capability[1]}"


def _why_not_library() -> str | None:
    """Return why the installed deep_gemm cannot be used (it is broken, or another project of that name), or None."""
    try:
        module = _import_deep_gemm()
    except Exception as error:  # the error of the import is the reason to report
        lines = str(error).strip().splitlines() or [""]
        return f"importing deep_gemm failed: {type(error).__name__}: {lines[0]}"
    missing = [name for name in REQUIRED_FUNCTIONS if not hasattr(module, name)]
    if missing:
        return f"the installed deep_gemm has no {missing[0]}: it is not {SOURCE} 2.0 or later (PyPI's deep-gemm is not)"
    if TILE % module.get_mk_alignment_for_contiguous_layout():
        return f"its groups begin at multiples of {module.get_mk_alignment_for_contiguous_layout()} rows, not {TILE}"
    return None


def _why_not_casts(op: str, a: CastSpec, b: CastSpec, device: torch.device) -> str | None:
    formats, scales = {a.format, b.format}, {a.scale, b.scale}
    if scaling_kind(op, a, b) not in ("block", "line") or formats != {"e4m3"} or not scales <= {"pow2", "fp32"}:
        return f"it supports E4M3 with pow2 scales, 1x128 by 128x128 or by 1x128, not {a} by {b}"
    if "fp32" in scales and not _supports_fp32_scales(device.type, device.index):
        return f"on this GPU DeepGEMM uses only the exponents of scales, but scales of {a} by {b} are not powers of two"
    return None


@lru_cache(maxsize=64)
def _supports_fp32_scales(kind: str, index: int | None) -> bool:
    """True if scales may be arbitrary fp32 numbers, as in checkpoints. This holds on Hopper; on Blackwell the library
    converts them to UE8M0."""
    return kind == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(index)[0] == 9


def _import_deep_gemm() -> ModuleType:
    return importlib.import_module("deep_gemm")


def _repeat_block_scales(operand: Operand) -> Tensor:
    """Repeat the scales of 128x128 blocks for each row, as scales [padded free, blocks] of 1x128 blocks."""
    rows = operand.codes.shape[0]
    repeated = operand.scale.t()[:, :, None].expand(-1, -1, 128).flatten(1)  # [blocks, free blocks * 128]
    scales = repeated.new_ones(repeated.shape[0], rows)
    scales[:, : repeated.shape[1]] = repeated[:, :rows]
    return scales.t()


def _grouped(
    copy_codes: CopyToLayout, op: str, a_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype
) -> Tensor:
    """Multiply the rows [R, contracted] of all experts by each expert's weight; tiles of no expert get zeros."""
    dim = CONTRACTED[op][1]
    fits = a_q.data.dim() == 2 and w_q.data.dim() == 3 and a_q.data.shape[1] == w_q.data.shape[1 + dim]
    _check(f"grouped_{op}", a_q, w_q, fits and a_q.data.shape[0] == groups.rows)
    if out_dtype is not torch.bfloat16:
        return getattr(get("triton"), f"grouped_{op}")(a_q, w_q, groups, out_dtype)
    a, w = k_major(a_q, 1, copy_codes), experts_k_major(w_q, dim, copy_codes)
    out = torch.zeros(groups.rows, w.codes.shape[1], dtype=out_dtype, device=a.codes.device)
    if not (w.free and w.contracted and groups.experts):
        return out[:, : w.free]
    experts = groups.tiles[:, None].expand(-1, TILE).reshape(-1)
    _import_deep_gemm().m_grouped_fp8_gemm_nt_contiguous(
        (a.codes, padded_scales(a)), (w.codes, w.scale.contiguous()), out, experts, recipe=RECIPE_BLOCK_WEIGHTS
    )
    return out[:, : w.free].contiguous()


def _check(op: str, a_q: Quantized, b_q: Quantized, fits: bool) -> None:
    gemm = op.removeprefix("grouped_")
    if not fits:
        raise CastError(
            f"{op}: operands of {list(a_q.data.shape)} and {list(b_q.data.shape)} do not match. "
            "Flatten leading dimensions first, and arrange the rows of experts with groups.group_rows."
        )
    why_not = _why_not_casts(gemm, a_q.spec, b_q.spec, a_q.data.device)
    if why_not is not None:
        raise CastError(f"{op} on deepgemm: {why_not}. Use the casts of the blockwise recipe, or another backend.")
