"""Deferred loading: a model is built, frozen, converted and sharded on the meta device, and then filled with weights.

If several ranks share a model, none of them needs all of it. So the model of a folder is built without memory (except
for buffers, which are small) and prepared for training. Once each rank knows its rows of each parameter, these are
read, cast and quantized (:mod:`octavo.models.weights.streaming`): a rank never holds more than its shard and one piece
of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo import fp8
from octavo.models.structure.skeleton import read_config, skeleton
from octavo.models.weights.assembly import (
    PreparedModel,
    finish_loading,
    prepare,
    requested_kinds,
    sort_by_offset,
    trim_heap_if_due,
)
from octavo.models.weights.loading import WIDER_THAN_BF16, open_folder
from octavo.models.weights.name_mapping import Origin, is_transposed
from octavo.models.weights.ties import compare_copies, settle_config, ties_of

#: parameter (its name in the folder's model, its module, its name in the module), values, lower halves or None
PlaceFn = Callable[[str, nn.Module, str, Tensor, Tensor | None], None]
#: module, name of its parameter -> the needed rows
WindowFn = Callable[[nn.Module, str], tuple[int, int]]


@dataclass
class DeferredModel:
    """A model with all parameters on the meta device, including frozen FP8 weights, and the folder with their values.
    Buffers have values. The model may be changed (classes, adapters around modules, sharding) as long as each parameter
    stays in its module under its name."""

    model: PreTrainedModel
    prepared: PreparedModel
    owners: Mapping[str, tuple[nn.Module, str]]
    split: bool
    log: Callable[[str], None] = lambda text: None

    def fill(self, window: WindowFn, place: PlaceFn, reduce_max: Callable[[Tensor], Tensor]) -> int:
        """Read the rows of `window` of each parameter, pass them to `place`, and return the bytes that were read.

        Parameters are in the order of the files, the same on all ranks. `reduce_max` returns the maximum of 0-d amaxes
        over all ranks. With `split`, fp32 weights are BF16 with their lower halves (int16). Raises ModelError for
        errors that are visible only in values.
        """
        stream = self.prepared.stream

        def rows(name: str, shape: torch.Size) -> tuple[int, int]:
            return window(*self.owners[name])

        def put(name: str, value: Tensor) -> None:
            low, (module, leaf) = None, self.owners[name]
            parameter = module._parameters[leaf]
            assert parameter is not None
            if self.split and value.dtype is torch.float32:
                value, low = fp8.arithmetic.split_master(value)
            elif value.dtype is torch.float32 and parameter.dtype is torch.bfloat16:
                value = value.to(torch.bfloat16)  # the parameter's dtype was changed after the model was built
            place(name, module, leaf, value, low)

        stream.window, stream.place, stream.reduce_max = rows, put, reduce_max
        before = stream.shards.bytes_read
        with stream.shards:
            trimmed = 0
            for origin in sort_by_offset(self._of_parameters()):
                stream.fill(origin)
                trimmed = trim_heap_if_due(stream.shards.bytes_read, trimmed)
        stream.finish()
        for note in stream.notes:
            self.log(note)
        return stream.shards.bytes_read - before

    def _of_parameters(self) -> list[Origin]:
        return [o for o in self.prepared.sources.origins if (o.targets or (o.name,))[0] in self.owners]


def load_deferred(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    load_in_fp8: str | bool | Mapping[str, str | None] | None = None,
    keep_fp8: bool = True,
    split: bool = False,
    log: Callable[[str], None] = lambda text: None,
) -> DeferredModel:
    """Build the model that `models.load`, or with `split` `models.load_split`, would return, without reading its
    parameters. Raises ModelError for all errors that do not depend on values."""
    folder, kinds = Path(path), requested_kinds(load_in_fp8)
    config = read_config(folder)
    quantization, shards = open_folder(folder, log)
    if split:
        dtype, keep_fp8, kinds = torch.bfloat16, False, {}
        split = quantization is not None or any(entry.dtype in WIDER_THAN_BF16 for entry in shards.stored.values())
    on = torch.device(device)

    def build() -> PreTrainedModel:
        return skeleton(config, dtype)

    prepared = prepare(folder, build, shards, quantization, kinds, dtype, on, keep_fp8, log)
    model, stream = prepared.model, prepared.stream
    if any(origin.converter is not None for origin in prepared.sources.origins):
        stream.rules = build()  # an unmodified model for transformers' rules: `model` is modified before it is filled
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    with shards:
        for origin in prepared.sources.origins:
            if not names & set(origin.targets or (origin.name,)):
                stream.fill(origin)  # a buffer in the folder
        casts = prepared.casts()
        _drop_equal_ties(prepared)
    stream.dtype_of = _record_dtypes(model, stream.dtype_of, split)
    for name in names:
        replace_meta_parameter(model, name, stream.dtype_of(name), casts.get(name))
    if split:
        stream.dtype_of = lambda name: torch.float32
    finish_loading(model, folder, prepared.sources)
    settle_config(folder, model, log)
    move_buffers(model, on)
    return DeferredModel(model, prepared, find_owners(model, names), split, log)


def find_owners(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[nn.Module, str]]:
    """Return parameter -> (its module, its name in the module)."""
    parts = ((name, name.rpartition(".")) for name in names)
    return {name: (model.get_submodule(path), leaf) for name, (path, _, leaf) in parts}


def _record_dtypes(
    model: PreTrainedModel, dtype_of: Callable[[str], torch.dtype], split: bool
) -> Callable[[str], torch.dtype]:
    """Return the dtypes of all parameters, recorded while they have the names of the folder's model."""
    dtypes = {name: dtype_of(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: torch.bfloat16 if split else dtype for name, dtype in dtypes.items()}.__getitem__


def replace_meta_parameter(model: PreTrainedModel, name: str, dtype: torch.dtype, cast: fp8.CastSpec | None) -> None:
    """Replace a parameter on the meta device by one with the dtype, or the codes, that it will have."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    old = module._parameters[leaf]
    assert old is not None
    if cast is not None:
        turned = old.dim() == 3 and is_transposed(module)
        module._parameters[leaf] = fp8.freeze_weight(old, cast, dtype, turned)
    elif old.dtype != dtype:
        module._parameters[leaf] = nn.Parameter(old.detach().to(dtype), requires_grad=old.requires_grad)


def _drop_equal_ties(prepared: PreparedModel) -> None:
    """Handle tied weights that the folder contains twice: skip the second if the values are equal, as in transformers;
    untie them if they differ. Reads both."""
    stream, origins = prepared.stream, prepared.sources.origins
    for target, _, same in compare_copies(ties_of(prepared.model), origins, stream.shards, stream.dtype_of):
        if same:
            origins.remove(next(origin for origin in origins if origin.name == target))
        else:
            prepared.model.all_tied_weights_keys.pop(target)
            path, _, leaf = target.rpartition(".")
            module = prepared.model.get_submodule(path)
            shared = module._parameters[leaf]
            assert shared is not None
            module._parameters[leaf] = nn.Parameter(shared.detach(), requires_grad=shared.requires_grad)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
