"""Folders that stock transformers loads: config, safetensors, tokenizer, processor, chat template.

Weights go through transformers' own conversion (disk names differ from module names in Qwen2.5-VL and InternVL,
and Qwen3-VL-MoE's experts are transposed on disk), from a stock model on the meta device: nothing of what was swapped
into the trained model can leak into the folder.

What is written is what trains: a model of BF16 parameters gives a folder in BF16, also where it was loaded from fp32
and an optimizer keeps lower halves of its weights (master bf16+16), since forwards never saw those. Who wants them
gives `fp8.fp32_weight` of each parameter as the state dict. Frozen FP8 weights are written as their values, and the
folder says nothing of FP8, also where its source does: codes are for `octavo export` to write.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo import atomic, fp8
from octavo.models.errors import ModelError
from octavo.models.folder import INDEX, check_companions, companions, copy_companions, quiet, write_config
from octavo.models.skeleton import empty
from octavo.reading import printable


def save_hf(
    model: nn.Module,
    source_path: str | Path,
    directory: str | Path,
    dtype: torch.dtype | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write `model` as a Hugging Face folder and return the directory.

    source_path  the folder the model was loaded from: config, tokenizer and processor files are copied from it
    dtype        of the floating-point weights on disk; None keeps the model's
    state_dict   the full weights, when the model itself holds only shards (gathered by the caller); plain tensors

    Written aside (`.NAME.part`, where a killed export's leftovers are removed first), fsynced, then renamed: the
    directory is whole or absent. An earlier one is replaced where it holds nothing else; any other non-empty directory
    is refused. Raises ModelError when names or shapes are not those of the source's model, a tensor is a shard or not
    finite, a file to copy cannot be read or is a link out of the source, or the disk is full.
    """
    source, target = Path(source_path), Path(directory)
    check_target(target)
    check_companions(source, copied=True)
    stock = empty(source)
    weights = _checked(state_dict if state_dict is not None else model.state_dict(), stock)
    weights = _cast(weights, dtype)
    refuse_dead(fp8.not_finite(weights.items()), weights)
    with atomic.folder(target, ModelError) as made:
        _write(stock, weights, source, made)
    return target


def check_target(target: Path) -> None:
    """Raise ModelError for a directory that no model may replace."""
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not (target / "config.json").exists())):
        raise ModelError(f"{target} exists and is no model folder; name another directory, or delete it.")
    if foreign := _foreign(target):
        raise ModelError(
            f"{target} would be replaced, and {printable(foreign[0])} in it is no part of a model; move it away."
        )


def refuse_dead(bad: Sequence[str], of: Mapping[str, Tensor]) -> None:
    """Raise ModelError where tensors, the `bad` ones, hold NaN or infinity."""
    if bad:
        raise ModelError(
            f"{bad[0]} holds NaN or infinity ({len(bad)} of {len(of)} tensors do), and a model that does answers "
            "with NaN: nothing is written. Save an earlier checkpoint."
        )


def _foreign(target: Path) -> list[str]:
    """What is in a model folder that no saved model has, and would be gone with it."""
    names = os.listdir(target) if target.exists() else ()
    own = {"config.json", INDEX, *(file.name for file in companions(target))}
    return sorted(name for name in names if name not in own and not name.endswith(".safetensors"))


def _write(stock: PreTrainedModel, weights: dict[str, Tensor], source: Path, made: Path) -> None:
    sizes: Counter[torch.dtype] = Counter()
    for tensor in weights.values():
        sizes[tensor.dtype] += tensor.numel() if tensor.is_floating_point() else 0
    written = max(sizes, key=sizes.__getitem__, default=torch.float32)  # a router's fp32 bias does not make it fp32
    with quiet():
        stock.save_pretrained(made, state_dict=weights)
    write_config(source, made, written)
    copy_companions(source, made)
    atomic.sync_tree(made)


def check_names(weights: Mapping[str, Tensor], stock: nn.Module) -> None:
    """Raise ModelError where names or shapes are not those of the stock model; tied names may be left out."""
    wanted = stock.state_dict()
    tied = set(getattr(stock, "all_tied_weights_keys", {}))
    absent = [name for name in wanted if name not in weights and name not in tied]
    strange = [name for name in weights if name not in wanted]
    if absent or strange:
        raise ModelError(
            f"the weights are not those of the source's model: {len(absent)} missing (first {absent[:1]}), "
            f"{len(strange)} unknown (first {strange[:1]}). Save with the folder that the model was loaded from."
        )
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise ModelError(
                f"{name} has shape {tuple(tensor.shape)}, the source's model {tuple(wanted[name].shape)}. Save with "
                "the folder that the model was loaded from."
            )
        if tensor.is_meta:
            raise ModelError(f"{name} is on the meta device and has no values to save. Load the weights first.")


def _checked(weights: Mapping[str, Tensor], stock: nn.Module) -> dict[str, Tensor]:
    """The weights without the second names of tied ones; ModelError when they are not the stock model's."""
    if shards := [name for name, tensor in weights.items() if not fp8.is_whole(tensor)]:
        raise ModelError(
            f"{shards[0]} is a rank's shard of a DTensor; gather the weights and give them as state_dict, or let all "
            "ranks write (checkpoint.save_hf)."
        )
    check_names(weights, stock)
    tied = set(getattr(stock, "all_tied_weights_keys", {}))
    return {name: tensor for name, tensor in weights.items() if name not in tied}


def _cast(weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {
        name: (tensor.detach().dequantize() if fp8.is_frozen(tensor) else tensor.detach()).to(
            "cpu", dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        )
        for name, tensor in weights.items()
    }
