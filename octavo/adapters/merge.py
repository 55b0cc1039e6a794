"""Merges adapters into the weights of their layers: W' = W + s B A, added in fp32 and rounded once.

W is the matrix that the base multiplies by: for frozen FP8 codes their values (code * scale, exact in fp32), else the
parameter. DoRA scales the rows of the sum to their trained lengths, W' = m / |W + s B A| * (W + s B A). Experts are
merged one at a time, so that no matrix of the size of a layer exists in fp32.

PEFT's ``merge_and_unload`` rounds s B A to the weight's dtype and then rounds the sum: two roundings, of which the
first is small; in fp32 the results agree to the last bits. PEFT cannot merge into FP8 codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo import fp8
from octavo.adapters import experts
from octavo.adapters.errors import AdapterError
from octavo.adapters.inject import NAME, adapted_layers, is_adapter_parameter
from octavo.fp8.weights import codes_of_frozen, is_frozen, is_whole


@dataclass(frozen=True, eq=False)
class AdaptedWeight:
    """One adapted weight, and the adapter to merge into it.

    name        of the parameter in the stock model: "...q_proj.weight", "...experts.down_proj"
    layer       PEFT's layer
    weight      the base's parameter: high precision or frozen FP8
    count       number of experts; None for a linear layer
    transposed  the parameter is stored as [E, K, N]
    """

    name: str
    layer: Any
    weight: Tensor
    count: int | None
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of one matrix, in GEMM orientation."""
        n, k = self.weight.shape[-2:]
        return (k, n) if self.transposed else (n, k)

    @property
    def rank(self) -> int:
        return int(self.layer.r[NAME])

    @property
    def slots(self) -> tuple[int | None, ...]:
        """The indices of the experts; (None,) for a linear layer."""
        return (None,) if self.count is None else tuple(range(self.count))

    def base_values(self, slot: int | None = None) -> Tensor:
        """Return W in fp32, [N, K]: the dequantized codes, or the parameter."""
        if is_frozen(self.weight):
            q = codes_of_frozen(self.weight)
            if slot is not None:
                q = fp8.Quantized(q.data[slot], q.scale[slot], q.spec)
            return fp8.dequantize(q, torch.float32)
        values = self.weight.detach()
        values = values if slot is None else values[slot]
        return (values.mT if self.transposed else values).float()

    def merged(self, slot: int | None = None, base: Tensor | None = None) -> Tensor:
        """Return W' in fp32, [N, K]; ``base``: W, if the caller has computed it."""
        w = self.base_values(slot) if base is None else base
        a, b = self._factors(slot)
        out = torch.addmm(w, b, a, alpha=float(self.layer.scaling[NAME]))
        if self.count is None and self.layer.use_dora.get(NAME, False):
            m = self.layer.lora_magnitude_vector[NAME].weight.detach().float()
            out.mul_((m / out.norm(dim=1)).unsqueeze(1))
        return out

    def merged_parameter(self, dtype: torch.dtype) -> Tensor:
        """Return the merged parameter as the stock model stores it, each value rounded once."""
        if self.count is None:
            return self.merged().to(dtype)
        n, k = self.shape
        out = torch.empty(self.count, n, k, dtype=dtype, device=self.weight.device)
        for slot in range(self.count):
            out[slot] = self.merged(slot)
        return out.mT if self.transposed else out

    def _factors(self, slot: int | None) -> tuple[Tensor, Tensor]:
        """Return a [r, K] and B [N, r] in fp32."""
        if slot is None:
            a, b = self.layer.lora_A[NAME].weight, self.layer.lora_B[NAME].weight
        else:
            down, up = experts.factors(self.layer, NAME)
            a, b = down[slot], up[slot]
        return a.detach().float(), b.detach().float()


def adapted_weights(model: nn.Module, base: nn.Module | None = None) -> dict[str, AdaptedWeight]:
    """Return the adapted weights of a model by stock name, in model order.

    base: a stock model to merge into, instead of the model's own base.

    Raises AdapterError for a model without adapters, a sharded model, and adapters that were merged in place.
    """
    layers = adapted_layers(model)
    if not layers:
        raise AdapterError("the model has no adapters to merge; octavo.adapters.load attaches some.")
    by_name = {}
    for stock, layer in layers.items():
        if layer.merged:
            raise AdapterError(f"the adapter of {stock} is merged in place already; unmerge it (PEFT's unmerge) first.")
        base_layer = layer.get_base_layer()
        projection = getattr(layer, "parameter_name", None)
        name = stock if projection is not None else f"{stock}.weight"
        weight = base_layer._parameters[projection or "weight"] if base is None else _base_parameter(base, name)
        if not all(is_whole(p) for p in (weight, *layer.lora_A.parameters())):
            raise AdapterError(
                f"{name} is a rank's shard; merge from a checkpoint or an adapter folder, in one process."
            )
        if weight.shape != base_layer._parameters[projection or "weight"].shape:
            raise AdapterError(f"{name} has the shape {list(weight.shape)} in `base`, but another one in the model.")
        transposed = projection is not None and bool(getattr(base_layer, "is_transposed", False))
        by_name[name] = AdaptedWeight(name, layer, weight, None if projection is None else weight.shape[0], transposed)
    return by_name


def merged_weights(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, base: nn.Module | None = None
) -> Iterator[tuple[str, Tensor | fp8.Quantized]]:
    """Return (stock name, value) of every parameter and persistent buffer, with adapters merged; tied ones once.

    Adapted weights are W' as the stock model stores them, computed in fp32 and rounded once to ``dtype``, one at a
    time. All others are unchanged: frozen weights are their codes ([N, K], or [E, N, K] for experts), parameters and
    buffers keep their dtypes.

    base: a stock model of any precision to merge the adapters into, instead of their own base.

    Raises AdapterError as :func:`adapted_weights` does, before the first value.
    """
    by_name = adapted_weights(model, base)
    return _iter_values(model if base is None else base, by_name, dtype)


def _iter_values(
    source: nn.Module, by_name: dict[str, AdaptedWeight], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor | fp8.Quantized]]:
    tied = set(getattr(source, "all_tied_weights_keys", {}))
    for name, value in source.state_dict(keep_vars=True).items():
        stock = experts.stock_name(name)
        if is_adapter_parameter(name) or stock in tied:
            continue
        if stock in by_name:
            with torch.no_grad():  # not around the yield, where it would apply to the caller's code
                folded = by_name[stock].merged_parameter(dtype)
            yield stock, folded
        elif is_frozen(value):
            yield stock, codes_of_frozen(value)
        else:
            yield stock, value.detach()


def _base_parameter(base: nn.Module, name: str) -> Tensor:
    try:
        return base.get_parameter(name)
    except AttributeError as error:
        raise AdapterError(
            f"`base` has no parameter {name}, which the adapter changes: it is another model."
        ) from error
