"""Folds the adapters of a LoRA run or a PEFT folder into a model folder (`octavo merge`).

The adapter can be folded into different weights. A run that loads its base in FP8 trains on codes, whose values differ
from the folder's high-precision weights by FP8 rounding:

    fp8    the values of the codes in training, so the merged model equals the trained model. The default for a run or
           folder with codes
    high   the folder's high-precision weights, as PEFT merges into the stock model. Preserves small changes better
           when written in FP8, because weights between codes can round to a different code
    DIR    a different folder of the same model, in the precision of that folder

The format "fp8" is the one that fits the model, as in an export. "auto" is the same, or BF16 if no layer can be in FP8
or rounding would remove the adapter: it never fails for its format.

The choice is printed, with the size of the difference relative to the adapter's change. A merge into FP8 is measured on
the written codes (:mod:`octavo.adapters.merge_error`), and rejected without output if they round the adapter away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo import adapters, fp8, models
from octavo.adapters.merge import adapted_weights
from octavo.adapters.merge_error import MIN_KEPT, MergeErrors
from octavo.base.recipe_specs import NAME_OF_KIND
from octavo.base.wording import count_noun
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.export import ExportResult, Progress, check_target, export
from octavo.checkpoint.export.formats import FP8
from octavo.checkpoint.export.layout import FORMATS, INCLUDABLE
from octavo.models.weights.ties import keeps_weights_apart
from octavo.train.artifacts.export import choose_target_format
from octavo.train.artifacts.load_target import HIGH, OpenedTarget, Target, inspect_target
from octavo.train.errors import TrainError

BASES = ("fp8", "high")
#: a format: FP8 as `fp8` chooses it, or BF16 where FP8 would fail
AUTO = "auto"


class _AdapterLostError(adapters.AdapterError):
    """Rounding to FP8 would remove the adapter; `sentence` says by how much."""

    def __init__(self, sentence: str, advice: str) -> None:
        super().__init__(f"{sentence}. {advice}")
        self.sentence = sentence


@dataclass(frozen=True)
class Merged:
    """The result of a merge.

    base         "fp8" or "high": the precision of the weights into which the adapter was folded
    folder       the model folder of the base
    merge_error  the part of the adapter's change that survived rounding, by weight
    base_error   difference between the codes in training and the folder's high-precision weights, or None
    """

    exported: ExportResult
    base: str
    folder: Path
    merge_error: MergeErrors
    base_error: adapters.BaseErrors | None
    notes: tuple[str, ...]

    def sentences(self) -> list[str]:
        """Return the result as sentences."""
        lines = [*self.exported.sentences(), *_describe_errors(self.merge_error)]
        if self.base_error is not None:
            times = self.base_error.relative / self.merge_error.relative if self.merge_error.relative else math.inf
            lines.append(
                f"{self.base_error.summary()}: {times:.3g} times the adapter's own change. Training used the FP8 "
                "codes, which were merged; --base high folds into the high-precision weights"
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        error = self.base_error
        return {
            "base": self.base,
            "base_folder": str(self.folder),
            "gap": None if error is None else {"relative": error.relative, "sqnr": error.sqnr},
            "delta": self.merge_error.to_json(),
            "export": self.exported.to_json(),
            "notes": list(self.notes),
        }


def merge_model(
    path: str | Path,
    directory: str | Path,
    format: str = "bf16",
    *,
    base: str | None = None,
    anyway: bool = False,
    include: Iterable[str] = (),
    step: int | None = None,
    device: torch.device | str | None = None,
    log: Callable[[str], None] = lambda text: None,
    progress: Progress = lambda done, total, name: None,
) -> Merged:
    """Write a model with the adapters of a LoRA run or PEFT folder folded in.

    Args:
        path: a run directory, or a folder with adapter_config.json.
        directory: new, empty, or an earlier export, which is replaced.
        format: bf16, fp8-block, fp8-dynamic, fp8-tensor, fp8 or auto (see above).
        base: "fp8", "high" or a folder; by default the codes if training used codes (see above).
        anyway: write FP8 even if it rounds the adapter away.
        include: components in FP8 in addition to the foundation.
        step: the checkpoint of a run; by default the newest.
        device: the device on which weights are folded and cast; by default the GPU if there is one.

    Raises TrainError for a path without adapters or a missing base, AdapterError if rounding would remove the adapter,
    and the CheckpointError and ModelError of an export. `directory` is then unchanged.
    """
    source, include = Path(path), tuple(include)
    if format not in (*FORMATS, FP8, AUTO):
        raise TrainError(f"there is no format {format!r}; there are {', '.join((*FORMATS, FP8, AUTO))}")
    if unsupported := [name for name in include if name not in INCLUDABLE]:
        raise TrainError(
            f"{unsupported[0]!r} cannot be included; besides the foundation, FP8 is for {', '.join(INCLUDABLE)}"
        )
    if include and format == "bf16":
        raise TrainError(
            "--include selects components for FP8, but bf16 has none; leave it out, or choose an FP8 format"
        )
    origin = inspect_target(source, None if base in (None, *BASES) else base)
    if not origin.lora:
        what = "is a whole model" if origin.kind == "folder" else "trained all weights"
        raise TrainError(f"{source} {what}: there is no adapter to merge. Use octavo export")
    check_target(Path(directory), [source, origin.base])
    written_format = _choose_format(origin, format, include, log)
    kind, trained = _choose_base(origin, base)
    log(_describe_choice(origin, kind, trained))
    model, _, notes = _open(origin, kind, trained, step=step, device=device, log=log)
    # Weights that were quantized at load differ from those in the folder.
    base_error = None
    if trained and kind == "fp8":
        base_error = adapters.base_errors(model, models.load(origin.base, dtype=_dtype(origin.base)))

    untied = keeps_weights_apart(model, models.empty(origin.base))

    def write(format: str) -> tuple[ExportResult, MergeErrors]:
        merge_error = MergeErrors(adapted_weights(model))
        done = export(
            _iter_checked_values(model, merge_error, format, kind, anyway, log),
            origin.base, directory, format, include=include, protect=[source], device=device,
            random=origin.random is not None, untied=untied, progress=progress, written=merge_error.add,
        )  # fmt: skip
        return done, merge_error

    try:
        done, merge_error = write(written_format)
    except _AdapterLostError as error:
        if format != AUTO:
            raise
        other = "" if kind == "high" else "; --format fp8 --base high (or --base DIR) folds into high-precision weights"
        log(f"format bf16 instead: {error.sentence}{other}")
        include = ()
        done, merge_error = write("bf16")
    return Merged(done, kind, origin.base, merge_error, base_error, notes)


def _choose_format(origin: Target, format: str, include: tuple[str, ...], log: Callable[[str], None]) -> str:
    """Return the format of the files; fp8 and auto are chosen by the model."""
    if format not in (FP8, AUTO):
        return format
    try:
        choice = choose_target_format(origin, include)
    except CheckpointError as error:
        if format == FP8 or include:
            raise
        log(f"format bf16: {error}")
        return "bf16"
    log(f"format {choice}")
    return choice.format


def _iter_checked_values(
    model: nn.Module, merge_error: MergeErrors, format: str, kind: str, anyway: bool, log: Callable[[str], None]
) -> Iterator[tuple[str, Tensor | fp8.Quantized]]:
    """Yield the merged values; after the last, before the folder is renamed to its final name, check what survived."""
    yield from adapters.merged_weights(model, torch.bfloat16 if FORMATS[format] is None else torch.float32)
    if merge_error.is_lost:
        sentence = _describe_loss(merge_error, format, kind)
        if not anyway:
            other = "" if kind == "high" else " --base high (or --base DIR) folds into high-precision weights;"
            raise _AdapterLostError(
                sentence,
                f"Nothing was written. Serve the adapter with its base, or write --format bf16;{other} "
                f"--anyway writes {format} nevertheless",
            )
        log(f"warning: {sentence}; written anyway")


def _describe_loss(merge_error: MergeErrors, format: str, kind: str) -> str:
    worst = merge_error.worst()
    if merge_error.kept < MIN_KEPT:
        why = (
            f"{format} would round the adapter away: {merge_error.kept:.1%} of its change survives, and less than "
            f"{MIN_KEPT:.0%} is no longer the model that was trained"
        )
        if kind == "fp8":
            why += " (the base is on the grid of the codes, where a change below half a step has no effect)"
        named = ", ".join(f"{w.name} ({w.kept:.1%})" for w in worst)
    else:
        why = (
            f"{format} would drown the adapter: rounding noise is {merge_error.error:.3g} times its change, and "
            f"{merge_error.noise_ratio:.3g} times as large even on the inputs on which it has most effect"
        )
        named = ", ".join(f"{w.name} ({w.error:.3g} times)" for w in worst)
    return f"{why}; the worst: {named}"


def _describe_errors(merge_error: MergeErrors) -> list[str]:
    """Return sentences about a finished merge."""
    lines = []
    if not any(w.delta for w in merge_error.weights.values()):
        return ["the adapter changes nothing: its B is zero, as before training; the base was written"]
    if counted := merge_error.fp8_weights():
        worst, many = merge_error.worst(1)[0], count_noun(len(counted), "FP8 weight")
        lines.append(
            f"{merge_error.kept:.1%} of the adapter's change survives in {many}, with an error of "
            f"{merge_error.error:.3g} times the change; the worst, {worst.name}: {worst.kept:.1%}, {worst.error:.3g}"
        )
    if rounded := merge_error.rounded_weights():
        worst = min(rounded, key=lambda w: w.kept)
        lines.append(
            f"BF16 rounds more than {1 - MIN_KEPT:.0%} of the change away in {count_noun(len(rounded), 'weight')}; "
            f"the worst, {worst.name}, which the adapter changes by {worst.relative:.2%} of its norm, keeps "
            f"{worst.kept:.1%}"
        )
    return lines


# Bases ----------------------------------------------------------------------------------------------------------------


def _choose_base(target: Target, base: str | None) -> tuple[str, dict[str, str]]:
    """Return ("fp8" or "high", kinds to which the base was quantized at load). Raises TrainError for a missing base."""
    coded = target.quantization is not None
    trained = {} if target.moved else dict(target.trained_kinds) if target.cfg is None else target.kinds
    if base == "high" and coded:
        raise TrainError(
            f"the base {target.base} holds FP8 codes and no high-precision weights. Name the folder of the original "
            "model: --base DIR"
        )
    if base == "fp8" and not coded and not trained:
        raise TrainError(
            f"{target.path} has no record of training on FP8 codes, and {target.base} holds none. Leave "
            "--base fp8 out, or name a folder in FP8: --base DIR"
        )
    return ("fp8", trained) if base != "high" and (coded or trained) else ("high", {})


def _open(target: Target, kind: str, trained: Mapping[str, str], **how: Any) -> OpenedTarget:
    """Open the model with its adapters, with the base in the chosen precision."""
    if target.cfg is not None and kind == "fp8" and not target.moved:  # as in training, with a check that it is
        return target.open(recipe="off", **how)
    load_in_fp8 = HIGH if kind == "high" else trained or None
    return target.open(recipe="off", load_in_fp8=load_in_fp8, dtype=_dtype(target.base), **how)


def _describe_choice(target: Target, kind: str, trained: Mapping[str, str]) -> str:
    if kind == "high":
        return f"the adapter is folded into the high-precision weights of {target.base}"
    if trained:
        recipes = ", ".join(f"{name}: {NAME_OF_KIND[kind]}" for name, kind in trained.items())
        return f"the adapter is folded into the FP8 codes of training ({target.base}, loaded with {recipes})"
    return f"the adapter is folded into the FP8 codes of {target.base}"


def _dtype(folder: Path) -> torch.dtype:
    """Return the dtype that represents the folder's weights exactly."""
    return torch.bfloat16 if models.read_config(folder).dtype == torch.bfloat16 else torch.float32
