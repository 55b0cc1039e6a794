"""The adapted linear layer: PEFT's LoRA linear with another forward.

Parameters, names, configuration, files, DoRA's magnitudes and the switching of adapters are PEFT's. Only the arithmetic
differs (:mod:`octavo.adapters.lowrank`). It is the same with an FP8 layer, a frozen FP8 weight in a stock layer
and a stock BF16 layer, so two runs with different bases differ only in these. The base layer is called with x itself,
so that q, k and v share its codes; dropout applies only to the input of A.

DoRA (Liu et al. 2024) scales each row of the adapted weight to a trained length m [N]::

    y = m / |W + s B A| * (W x + s B A x) + bias        |.| the 2-norm of each row, no gradient through it

W is the matrix that the base multiplies by; for frozen codes, their dequantized values, computed for the norm and
released. The product is computed as y0 + (m / |.| - 1) * (y0 - bias), where y0 is the output of plain LoRA, so that a
small change of m is not rounded away in BF16.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn

from octavo.adapters.errors import AdapterError
from octavo.adapters.lowrank import low_rank, low_rank_traced
from octavo.fp8.weights import Fp8Weight, is_frozen

_ROWS_AT_ONCE = 1024  # rows of a weight that are in fp32 at a time


class Linear(PeftLinear):
    """y = base(x) + s B (A d(x)); see the module's docstring."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute x [..., K] -> [..., N], in the dtype of the base layer's output."""
        if kwargs.get("adapter_names") is not None:
            raise AdapterError("adapter_names mixes adapters in one batch, which Octavo's layers do not support.")
        kwargs.pop("adapter_names", None)
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return y
        for name in self.active_adapters:
            if name in self.lora_A:
                y = self._add_adapter(y, x, name)
        return y

    def _add_adapter(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        down: Any = self.lora_A[name]
        up: Any = self.lora_B[name]
        a, b, scale, drop = down.weight, up.weight, self.scaling[name], self.lora_dropout[name]
        share = drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0
        if torch.compiler.is_compiling():
            y = low_rank_traced(y, x, a, b, scale, share)
        else:
            y = low_rank(y, x, a, b, scale, share, down)
        if not self.use_dora.get(name, False):
            return y
        if share:
            raise AdapterError(
                "DoRA with dropout would need the base layer's product of the dropped input as well, a second "
                "quantization and GEMM of every layer. Set lora.dropout: 0."
            )
        lengths: Any = self.lora_magnitude_vector[name]
        growth = lengths.weight / self.norms(name) - 1
        bias: Any = self.get_base_layer().bias
        return torch.addcmul(y, y if bias is None else y - bias.to(y.dtype), growth.to(y.dtype))

    @torch._disable_dynamo  # FP8 weights cannot be traced
    def norms(self, name: str) -> Tensor:
        """Return |W + s B A| of each row, [N] in fp32, for the adapter ``name``."""
        layer: Any = self
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        return row_norms(layer.get_base_layer().weight, a, b, layer.scaling[name])

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge like PEFT, for a base in high precision. Raises AdapterError for frozen FP8 codes, to which nothing can
        be added."""
        if is_frozen(self.get_base_layer().weight):
            raise AdapterError(
                "an adapter cannot be merged into frozen FP8 codes in place: they would have to be quantized again, "
                "which may round the adapter away. `octavo merge` writes a merged model and measures the loss."
            )
        super().merge(safe_merge, adapter_names)


@torch.no_grad()
def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the 2-norms [N] of the rows of W + scale B A in fp32; W [N, K] is dequantized temporarily."""
    if weight.is_meta:  # a model that is only planned
        return torch.empty(weight.shape[0], device="meta")
    values = weight.values() if isinstance(weight, Fp8Weight) else weight.detach()
    a32, b32 = a.detach().float(), b.detach().float()
    norms = []
    with torch.autocast(values.device.type, enabled=False):
        for rows, up in zip(values.split(_ROWS_AT_ONCE), b32.split(_ROWS_AT_ONCE), strict=True):
            norms.append(torch.addmm(rows.float(), up, a32, alpha=scale).norm(dim=1))
    return torch.cat(norms)
