"""The values of a model for an export: the codes that it computes with and the values from which they were cast.

An FP8 layer multiplies by the codes of its forward's cast, and an export in the same blocks holds these codes. An
export in other blocks is cast from the parameter itself, not from its codes, whose error would add up. So a trained
weight is passed as both (:class:`TrainedWeight`); a frozen one has only its codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo import fp8
from octavo.checkpoint.errors import CheckpointError
from octavo.fp8.arithmetic import scale_fp32
from octavo.fp8.planning import required_casts
from octavo.fp8.weights import CachesWeights, codes_of_frozen, is_frozen, is_whole, master_of


class TrainedWeight(NamedTuple):
    """A weight that is trained in FP8.

    values  as the parameter is stored
    codes   the codes that forwards multiply by, [N, K], or [E, N, K] for experts in either storage order
    """

    values: Tensor
    codes: fp8.Quantized


Value = Tensor | fp8.Quantized | TrainedWeight


def iter_values(model: nn.Module) -> Iterator[tuple[str, Value]]:
    """Yield (name, value) of a model's parameters and persistent buffers, tied ones once, each cast when it is yielded.

    The whole model must be in one process. Raises CheckpointError for a shard, and for adapters, which are not part of
    a model's weights until they are merged.
    """
    state = model.state_dict(keep_vars=True)
    if adapters := [name for name in state if ".lora_" in name or ".base_layer." in name]:
        raise CheckpointError(
            f"the model has adapters (first {adapters[0]}), which a model folder cannot hold. Merge them into the "
            "weights with octavo merge, or serve the adapter together with its base"
        )
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    layers = {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules()
        if isinstance(module, CachesWeights)
        for name in module._weight_caches()
    }
    for name, value in state.items():
        if name in tied:
            continue
        if not is_whole(value):
            raise CheckpointError(f"{name} is the shard of one rank; export from a checkpoint in one process")
        if is_frozen(value):
            yield name, codes_of_frozen(value)
        elif name in layers:
            yield name, _trained_weight(*layers[name], master_of(value).detach())
        else:
            yield name, value.detach()


def _trained_weight(module: Any, name: str, values: Tensor) -> Value:
    sites = module.__dict__.get("_sites")
    site = sites[name] if sites is not None else module._site
    if site.recipe.fwd is None:  # its forward runs in high precision
        return values
    with torch.no_grad():
        weight_cast = required_casts(module, name, site)[0]
        return TrainedWeight(values, weight_cast.cast(values))


def select_matrix(value: Value, slot: int | None, rows: tuple[int, int], transposed: bool) -> tuple[Tensor | None, Any]:
    """Return (values, codes) of one matrix of a parameter; None for the one that `value` does not have.

    slot    index of the expert; None for a linear layer
    rows    (first, last + 1)
    transposed  whether the values are stored as [.., K, N]
    """
    values = value.values if isinstance(value, TrainedWeight) else value if isinstance(value, Tensor) else None
    codes = value.codes if isinstance(value, TrainedWeight) else value if isinstance(value, fp8.Quantized) else None
    if values is not None:
        values = values if slot is None else values[slot]
        values = (values.mT if transposed else values)[rows[0] : rows[1]]
    if codes is not None:
        data, scale = codes.data, codes.scale
        if slot is not None:
            data, scale = data[slot], scale[slot]
        codes = _select_rows(fp8.Quantized(data, scale, codes.spec), rows)
    return values, codes


def _select_rows(q: fp8.Quantized, rows: tuple[int, int]) -> fp8.Quantized:
    """Return some rows of codes, each row with its own scales: blocks become one row high and keep their width."""
    n, (height, width) = q.data.shape[0], q.spec.block
    scale = scale_fp32(q)
    if rows == (0, n):
        return fp8.Quantized(q.data, scale, q.spec)
    if height != 1:
        block = torch.arange(rows[0], rows[1], device=scale.device)
        scale = scale[torch.zeros_like(block) if height == -1 else block // height]
    else:
        scale = scale[rows[0] : rows[1]]
    return fp8.Quantized(q.data[rows[0] : rows[1]], scale, fp8.CastSpec(q.spec.format, (1, width), "fp32"))


def dequantize_codes(q: fp8.Quantized) -> Tensor:
    """Dequantize codes [N, K], to fp32."""
    return fp8.dequantize(fp8.Quantized(q.data.contiguous(), q.scale.contiguous(), q.spec))


def regrid(q: fp8.Quantized, spec: fp8.CastSpec) -> fp8.Quantized | None:
    """Return the codes with the blocks of `spec`, which requires that all old blocks within a new one have the
    same scale. Returns None otherwise, and for codes of another format."""
    if q.spec.format != spec.format:
        return None
    if q.spec.block == spec.block:
        return fp8.Quantized(q.data, q.scale, spec)
    n, k = q.data.shape
    scale = _merge_scales(q.scale, n, q.spec.block[0], spec.block[0])
    scale = None if scale is None else _merge_scales(scale.mT, k, q.spec.block[1], spec.block[1])
    return None if scale is None else fp8.Quantized(q.data, scale.mT.contiguous(), spec)


def _merge_scales(scale: Tensor, size: int, old: int, new: int) -> Tensor | None:
    """Convert scales along the first dimension from blocks of `old` to blocks of `new`, -1 for all `size` elements.

    Returns None if a new block would weight_cast two different scales.
    """
    if old == new:
        return scale
    element = torch.arange(size, device=scale.device)
    old_block = torch.zeros_like(element) if old == -1 else element // old
    height = size if new == -1 else new
    first = torch.arange(0, size, height, device=scale.device)
    merged = scale[old_block[first]]
    # The elements at which old blocks begin: only there can the scale change.
    begins = torch.arange(0, size, size if old == -1 else old, device=scale.device)
    same = (scale[old_block[begins]] == merged[begins // height]).all()
    return merged if bool(same) else None
