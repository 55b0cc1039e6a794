"""What vLLM's build for CPUs lacks, in plain torch: operations for one scale per tensor, a kernel for blocks.

Used by `driver.py` for the folders that name a kernel, and removed again when the next folder is loaded. Names, shapes
and loading stay vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import vllm._custom_ops as ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.utils import replace_parameter
from vllm.platforms.interface import PlatformEnum

FP8 = torch.float8_e4m3fn
FMAX = torch.finfo(FP8).max


def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast [M, K] to E4M3, with one scale or one per row; arguments and result as in vLLM's operation.

    Raises NotImplementedError for arguments that no folder of these tests uses.
    """
    if scale_ub is not None or group_shape is not None or output is not None:
        raise NotImplementedError("this kernel of the test takes no scale_ub, group_shape or output")
    values = input.float()
    if scale is None:
        amax = values.abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else values.abs().amax().view(1)
        scale = (amax / FMAX).clamp(min=1.0 / (FMAX * 512.0))
    codes = (values / scale).clamp(-FMAX, FMAX).to(FP8)
    if num_token_padding and num_token_padding > len(codes):
        padded = torch.zeros(num_token_padding, codes.shape[1], dtype=torch.uint8).view(FP8)
        padded[: len(codes)] = codes
        codes = padded
    return codes, scale


def silu_and_mul_quant(out: torch.Tensor, input: torch.Tensor, scale: torch.Tensor) -> None:
    """Write silu(gate) * up in E4M3 with a static scale into out [M, I]; input [M, 2 I] is gate and up."""
    gate, up = input.float().chunk(2, dim=-1)
    out.copy_(scaled_fp8_quant(torch.nn.functional.silu(gate) * up, scale)[0])


class DecodedBlocks(Fp8BlockScaledMMLinearKernel):
    """Decodes both operands and multiplies them in fp32. vLLM's own two kernels for CPUs need AMX tiles.

    Like the casts of vLLM's kernels for GPUs (per_token_group_quant_fp8) it takes whole groups of activations only.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        params = self._get_layer_params(layer)
        for name in (params.WEIGHT, params.block_scale_attr):
            replace_parameter(layer, name, getattr(layer, name).data)

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        """A [M, K] with scales As of 128 columns, B [N, K] with scales Bs of blocks; returns [M, N] in fp32."""
        rows, columns = self.weight_group_shape
        n, k = B.shape
        if k % 128:
            raise ValueError(f"the last dimension of the activations, {k}, must be divisible by 128")
        weight = B.float() * Bs.float().repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        inputs = A.float() * As.float().repeat_interleave(128, 1)
        return inputs @ weight.t()


@contextmanager
def tensor() -> Iterator[None]:
    """`scaled_fp8_quant` and `silu_and_mul_quant` instead of operations that the CPU build lacks
    (`_C::static_scaled_fp8_quant`, `_C::silu_and_mul_quant`)."""
    original, ops.scaled_fp8_quant = ops.scaled_fp8_quant, scaled_fp8_quant
    torch.ops._C.silu_and_mul_quant = silu_and_mul_quant
    try:
        yield
    finally:
        ops.scaled_fp8_quant = original
        del torch.ops._C.silu_and_mul_quant


@contextmanager
def block() -> Iterator[None]:
    """`DecodedBlocks` among the kernels for CPUs."""
    kernels = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    kernels.append(DecodedBlocks)
    try:
        yield
    finally:
        kernels.remove(DecodedBlocks)


KERNELS: dict[str, Callable[[], AbstractContextManager[None]]] = {"tensor": tensor, "block": block}
