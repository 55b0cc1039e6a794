"""Copies the tensors that a model does not load (:mod:`octavo.models.weights.unloaded`) into a folder, byte for byte.

They keep their dtype: an FP8 export lists their matrices as not quantized, so that servers load them. Codes are copied
only into a folder with the same quantization, whose configuration describes them. A part whose tensors cannot be copied
is left out, and with it the keys of config.json that announce it: a server that follows them would miss its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from octavo.base.wording import count_noun
from octavo.checkpoint.export.files import PlannedTensor
from octavo.checkpoint.export.names import fused_group
from octavo.models.errors import ModelError
from octavo.models.folder.folder import read_json
from octavo.models.folder.quantization import Quantization, read_quantization
from octavo.models.weights.shards import Shards, StoredTensor
from octavo.models.weights.unloaded import PREDICTION_KEYS, describe_names, find_unloaded, group_of, is_prediction

#: why nothing is copied for a model whose weights were not loaded from its folder
RANDOM = "training began with random weights, to which they do not belong"


@dataclass(frozen=True)
class Carried:
    """The tensors of a source folder that its model does not load.

    source   the folder
    stored   the tensors that are copied
    left     name -> why it is not copied
    skipped  names of layers that an FP8 export lists as not quantized
    config   keys of config.json that change because of `left` -> the new value, or None to remove the key
    lost     why the weights of the source can no longer be read; "" if they can
    """

    source: Path
    stored: tuple[StoredTensor, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    config: Mapping[str, int | None] = field(default_factory=dict)
    lost: str = ""

    def tensors(self) -> list[PlannedTensor]:
        """Return (name, dtype, shape) of the tensors that are copied."""
        return [(entry.name, entry.dtype, entry.shape) for entry in self.stored]

    def read(self, *names: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the tensors that are copied, by default all, one in memory at a time. Raises
        ModelError for a file that was moved, truncated or damaged."""
        with Shards(self.source, ()) as shards:
            for entry in self.stored:
                if not names or entry.name in names:
                    yield entry.name, shards.read(entry)

    def add_skipped(self, quantization: Quantization) -> Quantization:
        """Return the quantization of an export with the layers that are copied as not quantized."""
        return replace(quantization, skipped=tuple(sorted({*quantization.skipped, *self.skipped})))

    def sentences(self) -> list[str]:
        """Return a sentence for the user about what was copied, and one for each reason why something was not."""
        lines = []
        if self.lost:
            lines.append(
                f"the weights of {self.source} can no longer be read ({self.lost}): tensors that the model does not "
                "load, such as layers for multi-token prediction, could not be copied"
            )
        if self.stored:
            names = describe_names(entry.name for entry in self.stored)
            verb = "was" if len(self.stored) == 1 else "were"
            many = count_noun(len(self.stored), "tensor")
            lines.append(f"{many} that the model does not load ({names}) {verb} copied unchanged")
        for reason in dict.fromkeys(self.left.values()):
            omitted = [name for name, why in self.left.items() if why == reason]
            what = f"{count_noun(len(omitted), 'tensor')} that the model does not load ({describe_names(omitted)})"
            lines.append(f"{what} {'is' if len(omitted) == 1 else 'are'} left out: {reason}")
        if self.config:
            verb = "was" if len(self.config) == 1 else "were"
            lines.append(f"{', '.join(self.config)} of config.json announced them and {verb} removed")
        return lines

    def to_json(self) -> dict[str, object]:
        copied = [entry.name for entry in self.stored]
        return {"copied": copied, "left_out": dict(self.left), "config_keys_removed": list(self.config)}


def plan_carried(
    source: str | Path,
    model: PreTrainedModel,
    quantization: Quantization | None = None,
    quantized: Collection[str] = (),
    why_not: str | None = None,
) -> Carried:
    """Return what is copied from a source folder. Reads only headers.

    model         the folder's stock model, which may be on the meta device
    quantization  the quantization of the folder that is written, or None for high precision
    quantized     the fused GEMMs of that folder with FP8 weights (`names.fused_group`)
    why_not       why nothing is copied although the folder has such tensors

    Raises ModelError if the source's files are missing or damaged.
    """
    source = Path(source)
    unloaded = find_unloaded(source, model)
    codes = {group_of(entry.name) for entry in unloaded if entry.is_codes}
    stored_form = read_quantization(source) if codes else None
    if why_not is None and codes and not _same_codes(stored_form, quantization):
        form = "high precision" if quantization is None else str(quantization)
        why_not = f"they are codes of {stored_form}, which a folder in {form} does not describe"
        left = {entry.name: why_not for entry in unloaded if group_of(entry.name) in codes}
    else:
        left = {} if why_not is None else {entry.name: why_not for entry in unloaded}
    stored = tuple(entry for entry in unloaded if entry.name not in left)
    skipped = () if quantization is None else tuple(_skipped(stored, quantized))
    is_announced = any(is_prediction(model, name) for name in left)
    return Carried(source, stored, left, skipped, _find_announced(source, model) if is_announced else {})


def lost(source: str | Path, model: PreTrainedModel, cause: ModelError) -> Carried:
    """Return the outcome for a source folder whose weights can no longer be read: nothing is copied, and config.json
    announces nothing that could have been in them."""
    return Carried(Path(source), config=_find_announced(Path(source), model), lost=str(cause).rstrip("."))


def _same_codes(stored: Quantization | None, written: Quantization | None) -> bool:
    """Return whether a folder with the quantization `written` describes codes of `stored`."""
    if stored is None or written is None:
        return False
    form = ("method", "kind", "block", "activations", "scale_format", "targets")
    return all(getattr(stored, key) == getattr(written, key) for key in form)


def _skipped(stored: Iterable[StoredTensor], quantized: Collection[str]) -> Iterator[str]:
    """Yield the names of copied layers that are not quantized.

    Servers refuse a fused GEMM that is quantized in part. A layer of such a GEMM (the keys of a layer that uses the
    keys of another layer) is not listed, because servers do not compute with it.
    """
    for entry in stored:
        if entry.is_codes or len(entry.shape) < 2:
            continue
        layer = entry.name.removesuffix(".weight")
        if layer == entry.name and len(entry.shape) == 3:
            layer = layer.rpartition(".")[0]  # stacked experts: `mlp.experts.down_proj` is a parameter, not a layer
        if fused_group(layer) not in quantized:
            yield layer


def _find_announced(source: Path, model: PreTrainedModel) -> dict[str, int | None]:
    """Return the keys of config.json that announce layers for multi-token prediction -> 0 if the configuration's class
    has another default, else None: the key is removed."""
    raw = read_json(source / "config.json")
    parts = [raw, *(part for part in raw.values() if isinstance(part, dict))]
    defaults = type(model.config.get_text_config())
    announced = [key for key in PREDICTION_KEYS if any(part.get(key) for part in parts)]
    return {key: 0 if getattr(defaults, key, None) else None for key in announced}
