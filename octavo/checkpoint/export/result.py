"""The outcome of an export: what was written in which precision, as JSON and as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.base.byte_size import format_bytes
from octavo.base.wording import count_noun
from octavo.checkpoint.export.carried import Carried
from octavo.models.processors.stop_tokens import EndToken


@dataclass
class TensorStats:
    """Statistics of the tensors whose names differ only in numbers.

    count, bytes   number and bytes of the tensors, including scales
    fp8            whether they are codes and scales
    kept           how many have exactly the codes that the model computes with
    refit          how many were cast from the parameter because the model's codes are in other blocks
    cast           how many were cast from values in high precision
    recast         how many were cast from the values of codes in other blocks, so that both errors add up
    relative       largest |written - value| / |value| of a tensor, in norms; None if nothing was rounded to FP8
    largest        largest error of an element, relative to the largest value of its tensor
    """

    count: int = 0
    bytes: int = 0
    fp8: bool = False
    kept: int = 0
    refit: int = 0
    cast: int = 0
    recast: int = 0
    relative: float | None = None
    largest: float | None = None


@dataclass(frozen=True)
class ExportResult:
    """The outcome of an export.

    kinds    name with numbers replaced by "*" -> statistics of these tensors
    layers   (linear layers in FP8, linear layers of the model without lm_head, patch embeddings and routers)
    method   the quant_method of config.json; None in BF16
    skipped  why layers stay in BF16 -> number of layers
    stay     the same reasons -> names of the layers, with numbers replaced by "*"
    opened   component -> number of layers that compute with codes and are written in BF16
    end      the token that ends answers in the chat template, if the export added it to generation_config.json
    carried  the tensors that the model does not load
    """

    directory: Path
    format: str
    family: str
    files: tuple[str, ...]
    bytes: int
    kinds: Mapping[str, TensorStats]
    layers: tuple[int, int]
    method: str | None
    skipped: Mapping[str, int]
    stay: Mapping[str, tuple[str, ...]]
    opened: Mapping[str, int] = field(default_factory=dict)
    end: EndToken | None = None
    carried: Carried = Carried(Path())

    def total(self, what: str) -> int:
        """Return the sum over all tensors of "count", "kept", "refit", "cast" or "recast"."""
        return sum(getattr(kind, what) for kind in self.kinds.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            "format": self.format,
            "family": self.family,
            "files": list(self.files),
            "bytes": self.bytes,
            "tensors": {
                "fp8": sum(k.count for k in self.kinds.values() if k.fp8),
                "high_precision": sum(k.count for k in self.kinds.values() if not k.fp8),
            },
            "codes": {what: self.total(what) for what in ("kept", "refit", "cast", "recast")},
            "kinds": {name: vars(kind) for name, kind in self.kinds.items()},
            "layers": {"fp8": self.layers[0], "of": self.layers[1]},
            "quant_method": self.method,
            "stay_in_bf16": dict(self.skipped),
            "names_in_bf16": {reason: list(names) for reason, names in self.stay.items()},
            "codes_written_in_bf16": dict(self.opened),
            "end_token_added": None if self.end is None else vars(self.end),
            "not_loaded": self.carried.to_json(),
        }

    def sentences(self) -> list[str]:
        """Return the outcome as sentences for the user."""
        size = format_bytes(self.bytes)
        tensors = count_noun(self.total("count") + len(self.carried.stored), "tensor")
        files, layers = count_noun(len(self.files), "file"), count_noun(self.layers[1], "linear layer")
        in_fp8 = "" if self.method is None else f"{self.layers[0]} of {layers} in FP8, "
        lines = [f"wrote {self.directory}: {self.format}, {in_fp8}{tensors}, {size} in {files}"]
        if (self.format, self.method) == ("fp8-block", "compressed-tensors"):
            lines.append(
                "blocks are stored by compressed-tensors: in DeepSeek's layout transformers cannot dequantize weights "
                "whose number of outputs is not a multiple of 128"
            )
        words = {
            "kept": "exactly the codes that the model computes with",
            "refit": "cast from the parameters, because the model's codes are in other blocks",
            "cast": "cast from high precision",
            "recast": "cast again from the values of codes in other blocks, so rounded twice",
        }
        for what, meaning in words.items():
            if count := self.total(what):
                lines.append(f"{count_noun(count, 'FP8 weight')}: {meaning}{self._error(what)}")
        for reason, count in self.skipped.items():
            # Whole components and lm_head need no names.
            names = self.stay[reason] if "128" in reason else ()
            lines.append(f"{count_noun(count, 'layer')} in BF16: {reason}{_list_names(names)}")
        for component, count in self.opened.items():
            includable = any(reason.startswith(f"part of the {component} ") for reason in self.skipped)
            include = f"; --include {component} keeps codes" if includable else ""
            lines.append(f"{count_noun(count, 'weight')} of the {component} with codes, written in BF16{include}")
        lines += self.carried.sentences()
        if self.end is not None:
            lines.append(
                f"generation_config.json now names {self.end} as an end token, too: the chat template ends answers "
                "with it"
            )
        return lines

    def _error(self, what: str) -> str:
        worst = [kind.relative for kind in self.kinds.values() if getattr(kind, what) and kind.relative]
        return f" (relative error up to {max(worst):.2%})" if worst and what != "kept" else ""


def _list_names(names: tuple[str, ...], most: int = 8) -> str:
    rest = len(names) - most
    listed = ", ".join(names[:most]) + (f" and {rest} more (octavo_export.json lists them)" if rest > 0 else "")
    return f": {listed}" if names else ""
