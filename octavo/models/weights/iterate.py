"""Iterates over the weights of a folder, by module names, without a model in memory.

Exports use it. Checks and rules are the same as in loading (`assembly`, `map_sources`); the model is on the meta
device, and each parameter has values only until it has been yielded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from octavo import fp8
from octavo.fp8.weights import codes_of_frozen, is_frozen
from octavo.models.folder.quantization import read_quantization
from octavo.models.weights.assembly import map_tensors
from octavo.models.weights.name_mapping import Origin
from octavo.models.weights.shards import open_weights
from octavo.models.weights.streaming import WeightStream
from octavo.models.weights.ties import empty_like_load, ties_of


def iter_weights(path: str | Path, keep_fp8: bool = True) -> Iterator[tuple[str, Tensor | fp8.Quantized]]:
    """Yield (name, value) of a folder's parameters and persistent buffers, in the order of its files, in the dtype on
    disk.

    FP8 weights are their codes ([N, K], or [E, N, K] for experts, in GEMM orientation) with fp32 scales; with
    `keep_fp8=False` they are dequantized to BF16. Tied parameters, of which the folder may contain one or both, are
    yielded once, under the first name; if it contains both with other values, they are not tied, and both are yielded
    (`octavo.models.weights.ties`). Raises ModelError like `models.load`; errors that are visible in headers are
    raised before the first value.
    """
    folder = Path(path)
    quantization = read_quantization(folder)
    shards, _ = open_weights(folder, quantization is not None)
    with shards:
        model = empty_like_load(folder)
        paired, sources, _ = map_tensors(folder, model, shards, quantization, keep_fp8)
        dtypes: dict[str, torch.dtype] = {}
        ties = ties_of(model)
        weight_stream = WeightStream(
            shards, model, paired.scales, quantization, {}, dtypes.__getitem__, torch.device("cpu"), keep_fp8=keep_fp8
        )
        yielded_names: set[str] = set()
        for origin in sorted(sources.origins, key=lambda origin: (origin.stored[0].file, origin.stored[0].begin)):
            targets = origin.targets or (origin.name,)
            names = {name: ties.get(name, name) for name in targets if ties.get(name, name) not in yielded_names}
            if not names:
                continue
            meta_tensors = {
                name: model.get_parameter_or_buffer(name) for name in targets
            }  # on meta; restored after the yield
            dtypes.update(dict.fromkeys(targets, _dtype(origin)))
            weight_stream.fill(origin)
            for name, first in names.items():
                value = model.get_parameter_or_buffer(name)
                yielded_names.add(first)
                yield first, codes_of_frozen(value) if is_frozen(value) else value.detach()
                del value
            for name, meta in meta_tensors.items():
                module, _, leaf = name.rpartition(".")
                owner = model.get_submodule(module)
                (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf] = meta


def stored_dtypes(path: str | Path) -> dict[str, torch.dtype]:
    """Return parameter or persistent buffer -> the dtype of its value from `iter_weights`; reads only headers."""
    folder = Path(path)
    quantization = read_quantization(folder)
    with open_weights(folder, quantization is not None)[0] as shards:
        model = empty_like_load(folder)
        _, sources, _ = map_tensors(folder, model, shards, quantization, True)
        ties = ties_of(model)
        pairs = ((name, origin) for origin in sources.origins for name in origin.targets or (origin.name,))
        return {ties.get(name, name): _dtype(origin) for name, origin in pairs}


def _dtype(origin: Origin) -> torch.dtype:
    """Return the dtype of an origin's values: the widest of its tensors' dtypes, BF16 for codes."""
    dtypes = {torch.bfloat16 if entry.is_codes else entry.dtype for entry in origin.stored}
    return max(dtypes, key=lambda dtype: dtype.itemsize)
