"""The weights of a folder one by one, under the names of the modules, without a model that holds them all.

For whoever writes them elsewhere. Checks and rules are those of loading (`assembly`, `sources`); the model is on the
meta device, and each parameter lives there for as long as it takes to hand it on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from octavo import fp8
from octavo.fp8.weights import codes_of_frozen, is_frozen
from octavo.models.folder.quantization import read_quantization
from octavo.models.structure.skeleton import empty
from octavo.models.weights.assembly import checked
from octavo.models.weights.name_mapping import Origin
from octavo.models.weights.shards import open_weights
from octavo.models.weights.streaming import Stream


def stream(path: str | Path, keep_fp8: bool = True) -> Iterator[tuple[str, Tensor | fp8.Quantized]]:
    """(name, value) of a folder's parameters and persistent buffers, in the order of its files, in the dtype on disk.

    FP8 weights come as their codes ([N, K], or [E, N, K] for experts, as GEMMs have them) with fp32 scales; with
    `keep_fp8=False`, dequantized, in BF16. Of tied parameters the folder may hold one or both; each comes once, under
    the first name. Raises ModelError as `models.load` does; for what headers tell, before the first value.
    """
    folder = Path(path)
    quantization = read_quantization(folder)
    shards, _ = open_weights(folder, quantization is not None)
    with shards:
        model = empty(folder)
        paired, found, _ = checked(folder, model, shards, quantization, keep_fp8)
        dtypes: dict[str, torch.dtype] = {}
        ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        stream = Stream(
            shards, model, paired.scales, quantization, {}, dtypes.__getitem__, torch.device("cpu"), keep_fp8=keep_fp8
        )
        given: set[str] = set()
        for origin in sorted(found.origins, key=lambda origin: (origin.stored[0].file, origin.stored[0].begin)):
            makes = origin.makes or (origin.name,)
            names = {name: ties.get(name, name) for name in makes if ties.get(name, name) not in given}
            if not names:
                continue
            before = {name: model.get_parameter_or_buffer(name) for name in makes}
            dtypes.update(dict.fromkeys(makes, _dtype(origin)))
            stream.fill(origin)
            for name, first in names.items():
                value = model.get_parameter_or_buffer(name)
                given.add(first)
                yield first, codes_of_frozen(value) if is_frozen(value) else value.detach()
                del value
            for name, meta in before.items():
                module, _, leaf = name.rpartition(".")
                owner = model.get_submodule(module)
                (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf] = meta


def stored_dtypes(path: str | Path) -> dict[str, torch.dtype]:
    """Parameter or persistent buffer -> the dtype of what `stream` gives of it, from headers alone."""
    folder = Path(path)
    quantization = read_quantization(folder)
    with open_weights(folder, quantization is not None)[0] as shards:
        model = empty(folder)
        _, found, _ = checked(folder, model, shards, quantization, True)
        ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        made = ((name, origin) for origin in found.origins for name in origin.makes or (origin.name,))
        return {ties.get(name, name): _dtype(origin) for name, origin in made}


def _dtype(origin: Origin) -> torch.dtype:
    """What the values of an origin are in: the widest of its tensors' dtypes, BF16 for codes."""
    found = {torch.bfloat16 if entry.is_codes else entry.dtype for entry in origin.stored}
    return max(found, key=lambda dtype: dtype.itemsize)
