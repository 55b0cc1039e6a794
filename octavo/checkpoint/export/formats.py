"""Which FP8 formats can hold a model, and which of them an export should have.

Formats are compared by the check of the export itself (`layout.choose_layers`), so that an advised command cannot be
refused for its format. Weights are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.base.recipe_specs import NAME_OF_KIND
from octavo.base.wording import count_noun
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.export.layout import (
    FORMATS,
    INCLUDABLE,
    ExportModel,
    check_include,
    choose_layers,
)

#: the formats in FP8
FP8_FORMATS = tuple(name for name, kind in FORMATS.items() if kind is not None)
#: a value of --format: the FP8 format that fits the model (`choose_format`)
FP8 = "fp8"
#: the formats from which `choose_format` chooses if no codes prefer another one
_DEFAULTS = ("fp8-block", "fp8-dynamic")


@dataclass(frozen=True)
class Fit:
    """How much of a model a format takes.

    format      one of FP8_FORMATS
    taken       layers in FP8
    of          linear layers and stacks of experts in the model, without lm_head, patch embeddings and routers
    components  component -> its layers in FP8
    why         the most common size that the format cannot hold, in words; empty if there is none
    """

    format: str
    taken: int
    of: int
    components: Mapping[str, int]
    why: str = ""


@dataclass(frozen=True)
class FormatChoice:
    """The format of an export, with the reason in words."""

    format: str
    reason: str
    fit: Fit

    def __str__(self) -> str:
        return f"{self.format}, because {self.reason}"


def fits(model: ExportModel, include: Iterable[str] = ()) -> dict[str, Fit]:
    """Return format -> how much of a model it takes, for all FP8 formats; nothing for names that a skip list cannot
    distinguish. Raises CheckpointError for a component that cannot be included."""
    include = tuple(include)
    check_include(model, include)
    by_format: dict[str, Fit] = {}
    for format in _DEFAULTS:
        try:
            chosen = choose_layers(model, format, include)
        except CheckpointError as error:
            by_format[format] = Fit(format, 0, model.linear, {}, str(error))
            continue
        components = Counter(row.component for row in model.rows if row.name not in chosen.stays)
        reasons = Counter(chosen.stays[name] for name in chosen.ragged)
        why = reasons.most_common(1)[0][0] if reasons else ""
        by_format[format] = Fit(format, components.total(), model.linear, components, why)
    # Scales of rows and of tensors fit all sizes.
    by_format["fp8-tensor"] = replace(by_format["fp8-dynamic"], format="fp8-tensor")
    return by_format


def choose_format(
    source: str | Path | ExportModel, include: Iterable[str] = (), codes: str | None = None
) -> FormatChoice:
    """Return the FP8 format that takes most layers of the model.

    If several do, it is the one whose scales have the kind of the weights' codes (`codes`: row, block, tensor, or
    None), because an export then keeps the codes; else fp8-block, else fp8-dynamic.

    Raises CheckpointError if no format takes a layer, and for a component that cannot be included; ModelError for the
    folder.
    """
    model = source if isinstance(source, ExportModel) else ExportModel.read(source)
    by_format = fits(model, include)
    most = max(fit.taken for fit in by_format.values())
    if not most:
        whys = sorted({fit.why for fit in by_format.values() if fit.why})
        raise CheckpointError(
            f"no layer of {model.where} could be written in FP8{': ' if whys else ''}{'; '.join(whys)}. Choose bf16"
        )
    same = next((format for format in FP8_FORMATS if codes is not None and FORMATS[format] == codes), None)
    order = dict.fromkeys(name for name in (same, *_DEFAULTS, *FP8_FORMATS) if name is not None)
    format = next(name for name in order if by_format[name].taken == most)
    fit, first = by_format[format], by_format[next(iter(order))]
    layers = f"{fit.taken} of {fit.of} linear layers"
    if format == same:
        assert codes is not None
        reason = f"it takes {layers}, with scales of the same kind as the model's ({NAME_OF_KIND[codes]})"
    elif first is fit:
        reason = f"blocks of 128 x 128 fit {layers}, as many as any format takes"
    else:
        reason = f"it takes {layers}, and {first.format} {first.taken}{f' ({first.why})' if first.why else ''}"
    return FormatChoice(format, reason, fit)


def describe_fits(model: ExportModel) -> tuple[str, dict[str, object]]:
    """Return (one line: how many layers the formats take without --include, the same as JSON with the layers that each
    component would have with it)."""
    whole = fits(model, [name for name in INCLUDABLE if name in model.family.components])
    layers = {name: fit.components.get("foundation", 0) for name, fit in whole.items()}
    if any(layers.values()):
        first, second = _DEFAULTS
        line = f"export: {first} takes {layers[first]} of {count_noun(model.linear, 'layer')}; "
        line += f"{second} takes {layers[second]} of {model.linear}"
    else:
        why = next((f" ({fit.why})" for fit in whole.values() if fit.why), "")
        line = f"export: bf16; no layer of the language model can be in FP8{why}"
    document: dict[str, object] = {
        name: {"layers": layers[name], "of": fit.of, "components": dict(fit.components)} for name, fit in whole.items()
    }
    return line, document
