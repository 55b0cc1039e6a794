"""The values of a model for an export: codes where it computes with codes, and what they were cast from.

A layer in FP8 multiplies by the codes of its forward's cast; a checkpoint in the same blocks holds those. One in other
blocks is cast again, from the parameter itself, not from its codes: that error would come on top. So a trained weight
comes as both (:class:`Trained`); a frozen one has nothing but its codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo import fp8
from octavo.checkpoint.errors import CheckpointError
from octavo.fp8.arithmetic import scale_fp32
from octavo.fp8.planning import needs_of
from octavo.fp8.weights import CachesWeights, codes_of_frozen, is_frozen, is_whole, master_of


class Trained(NamedTuple):
    """A weight that trains in FP8: its values, as the parameter is stored, and the codes that forwards multiply by
    ([N, K], or [E, N, K] for experts, however they are stored)."""

    values: Tensor
    codes: fp8.Quantized


Value = Tensor | fp8.Quantized | Trained


def values_of(model: nn.Module) -> Iterator[tuple[str, Value]]:
    """(name, value) of a model's parameters and persistent buffers, tied ones once; codes are cast one at a time.

    The model lies in one process. Raises CheckpointError for a shard of a sharded one, and for adapters, which are not
    part of a model's weights until they are merged.
    """
    state = model.state_dict(keep_vars=True)
    if adapters := [name for name in state if ".lora_" in name or ".base_layer." in name]:
        raise CheckpointError(
            f"the model carries adapters (first {adapters[0]}), which no model folder has. Fold them into the weights "
            "with octavo merge, or serve the adapter as it is beside its base"
        )
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    layers = {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules()
        if isinstance(module, CachesWeights)
        for name in module._weight_codes()
    }
    for name, value in state.items():
        if name in tied:
            continue
        if not is_whole(value):
            raise CheckpointError(f"{name} is a rank's shard; export from a checkpoint, in one process")
        if is_frozen(value):
            yield name, codes_of_frozen(value)
        elif name in layers:
            yield name, _trained(*layers[name], master_of(value).detach())
        else:
            yield name, value.detach()


def _trained(module: Any, name: str, values: Tensor) -> Value:
    sites = module.__dict__.get("_sites")
    site = sites[name] if sites is not None else module._site
    if site.recipe.fwd is None:  # its forward is in high precision
        return values
    with torch.no_grad():
        need = needs_of(module, name, site)[0]
        return Trained(values, need.cast(values))


def part(value: Value, slot: int | None, rows: tuple[int, int], turned: bool) -> tuple[Tensor | None, Any]:
    """(values, codes) of one matrix of a parameter: an expert's, and some of its rows. None for what there is not.

    turned: the values are stored as [.., K, N].
    """
    values = value.values if isinstance(value, Trained) else value if isinstance(value, Tensor) else None
    codes = value.codes if isinstance(value, Trained) else value if isinstance(value, fp8.Quantized) else None
    if values is not None:
        values = values if slot is None else values[slot]
        values = (values.mT if turned else values)[rows[0] : rows[1]]
    if codes is not None:
        data, scale = codes.data, codes.scale
        if slot is not None:
            data, scale = data[slot], scale[slot]
        codes = _rows(fp8.Quantized(data, scale, codes.spec), rows)
    return values, codes


def _rows(q: fp8.Quantized, rows: tuple[int, int]) -> fp8.Quantized:
    """Some rows of codes, each with its own scales: blocks become one row high, as wide as they were."""
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


def decoded(q: fp8.Quantized) -> Tensor:
    """The values of codes [N, K], in fp32."""
    return fp8.dequantize(fp8.Quantized(q.data.contiguous(), q.scale.contiguous(), q.spec))


def regrid(q: fp8.Quantized, spec: fp8.CastSpec) -> fp8.Quantized | None:
    """The same codes under the blocks of `spec`: possible where all blocks that meet in a new one have one scale.

    Returns None where they have not, or where the codes are of another format.
    """
    if q.spec.format != spec.format:
        return None
    if q.spec.block == spec.block:
        return fp8.Quantized(q.data, q.scale, spec)
    n, k = q.data.shape
    scale = _meeting(q.scale, n, q.spec.block[0], spec.block[0])
    scale = None if scale is None else _meeting(scale.mT, k, q.spec.block[1], spec.block[1])
    return None if scale is None else fp8.Quantized(q.data, scale.mT.contiguous(), spec)


def _meeting(scale: Tensor, size: int, old: int, new: int) -> Tensor | None:
    """Scales [blocks of `old` along `size`, ...] for blocks of `new`; None if a new block would need two of them."""
    if old == new:
        return scale
    element = torch.arange(size, device=scale.device)
    of_old = torch.zeros_like(element) if old == -1 else element // old
    height = size if new == -1 else new
    first = torch.arange(0, size, height, device=scale.device)
    found = scale[of_old[first]]
    # Elements at which an old block begins: the only ones whose scale may differ from that of the one before.
    begins = torch.arange(0, size, size if old == -1 else old, device=scale.device)
    same = (scale[of_old[begins]] == found[begins // height]).all()
    return found if bool(same) else None
