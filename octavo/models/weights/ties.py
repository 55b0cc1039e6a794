"""Which weights of a folder are tied: the ones that config.json ties, unless the folder has both with other values.

transformers decides so (`PreTrainedModel.tie_weights`): where both tensors are on disk and differ, config.json is
wrong, and the model keeps two weights. Such a model is saved with both tensors and `tie_word_embeddings: false`: vLLM
reads an `lm_head` on disk under either config, but a loader may follow config.json and leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from octavo.models.errors import ModelError
from octavo.models.folder.folder import TIED
from octavo.models.folder.quantization import read_quantization
from octavo.models.structure.skeleton import empty, read_config, untie
from octavo.models.weights.fp8_codes import pair_scales
from octavo.models.weights.name_mapping import Origin, map_sources
from octavo.models.weights.shards import Shards, has_weights, open_weights
from octavo.models.weights.streaming import chunks


def ties_of(model: object) -> dict[str, str]:
    """Return second name -> first name of a model's tied parameters."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def empty_without_ties(folder: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model of a folder on the meta device, with no tied weights, whatever config.json says.

    Raises ModelError if the family ties them independently of `tie_word_embeddings`.
    """
    config = read_config(folder)
    untie(config)
    model = empty(config, dtype)
    if ties := ties_of(model):
        second, first = next(iter(ties.items()))
        raise ModelError(
            f"{folder} has a {second} that differs from {first}, but a {config.model_type} always ties the two: a "
            "folder with both cannot be written. Remove one of them from it, and from its index."
        )
    return model


def empty_like_load(folder: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model of a folder on the meta device, with the ties that `models.load` gives it.

    Like `models.empty`, but a folder that holds tied weights twice is read to compare them. Weights may be missing.
    Raises ModelError.
    """
    folder, model = Path(folder), empty(folder, dtype)
    if not ties_of(model) or not has_weights(folder):
        return model
    quantization = read_quantization(folder)
    with open_weights(folder, quantization is not None)[0] as shards:
        paired = pair_scales(shards.stored.values(), quantization, folder)
        origins = map_sources(model, paired.weights).origins
        compared = compare_copies(ties_of(model), origins, shards)
    return model if all(is_equal for *_, is_equal in compared) else empty_without_ties(folder, dtype)


def keeps_weights_apart(model: object, stock: PreTrainedModel) -> bool:
    """Return whether weights of a model are separate that config.json of its folder ties. stock: `models.empty` of the
    folder."""
    return hasattr(model, "all_tied_weights_keys") and bool(ties_of(stock).keys() - ties_of(model).keys())


def compare_copies(
    ties: dict[str, str], origins: Iterable[Origin], shards: Shards, dtype: Callable[[str], torch.dtype] | None = None
) -> list[tuple[str, str, bool]]:
    """Return (second name, first name, whether their values are equal) of tied parameters that are both on disk.

    dtype: parameter -> the dtype in which it is compared; by default one that represents both exactly. Reads both.
    """
    stored = {o.name: o.slots[0][0].stored for o in origins if o.converter is None}
    compared = []
    for second, first in ties.items():
        if second not in stored or first not in stored:
            continue
        one, other = stored[second], stored[first]
        common = torch.float64 if dtype is None else dtype(first)
        in_fp8 = one.is_codes or other.is_codes  # codes are values only with their scales
        is_equal = one.shape == other.shape and not in_fp8
        is_equal = is_equal and all(
            torch.equal(*(shards.read(entry, rows).to(common) for entry in (one, other))) for rows in chunks(one.shape)
        )
        compared.append((second, first, is_equal))
    return compared


def settle_config(folder: Path, model: PreTrainedModel, log: Callable[[str], None]) -> None:
    """Set `tie_word_embeddings` of a loaded model's configuration to false, and log why, if its weights are not tied
    although config.json ties them. Else a later `tie_weights` would tie them again."""
    configured, tied = model.get_expanded_tied_weights_keys(all_submodels=True), ties_of(model)
    separate = sorted(configured.keys() - tied.keys())
    if not separate:
        return
    untie(model.config)
    log(
        f"{folder}: {separate[0]} differs from {configured[separate[0]]}, although config.json ties them: both are "
        f"kept, and a folder that is written from this model has {TIED}: false"
    )
