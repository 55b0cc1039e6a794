"""Exports a run or a model folder as a checkpoint that servers load.

A run is opened as in training, at its newest complete checkpoint or at a given step; the exported codes are the codes
of its forward GEMMs. A folder is read tensor by tensor, without building a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from octavo import models
from octavo.base import accelerator
from octavo.base.recipe_specs import RECIPES_OF_KIND
from octavo.checkpoint.export import MAX_FILE_BYTES, ExportResult, Progress, check_target, export
from octavo.checkpoint.export.formats import FP8, FormatChoice, choose_format
from octavo.checkpoint.export.layout import plan_layout
from octavo.checkpoint.export.values import Value, iter_values
from octavo.config import Config
from octavo.models.weights.ties import keeps_weights_apart
from octavo.train.artifacts.load_target import Target, inspect_target
from octavo.train.errors import TrainError


def is_trained_in_fp8(cfg: Config) -> bool:
    """Return whether the forward of a run's language model is in FP8, or its base is. Weights that never met rounding
    in the forward may answer differently with it."""
    fp8, part = cfg.fp8, cfg.fp8.foundation
    forward = (part and part.fwd) or fp8.fwd
    in_fp8 = forward == "fp8" and fp8.recipe_of("foundation") != "off"
    in_fp8 |= any(rule.recipe not in (None, "off") and (rule.fwd or forward) == "fp8" for rule in fp8.rules)
    return in_fp8 or fp8.plan is not None or "foundation" in cfg.model.load_in_fp8.kinds


def choose_target_format(target: Target, include: Iterable[str] = ()) -> FormatChoice:
    """Return the FP8 format of an export or a merge: what the model's shapes permit, and of several formats the one
    with the scales of the weights' codes.

    Raises CheckpointError if no layer can be in FP8, and ModelError for the folder.
    """
    return choose_format(target.base, include, _kind_of_codes(target))


def _kind_of_codes(target: Target) -> str | None:
    """Return the unit of the scales of a target's codes in the language model (row, block, tensor), if an export can
    keep them."""
    kinds = target.kinds or target.trained_kinds
    if "foundation" in kinds:
        return kinds["foundation"]
    if target.quantization is not None:
        return target.quantization.kind
    if target.cfg is None or target.cfg.fp8.plan is not None:
        return None
    recipe = target.cfg.fp8.recipe_of("foundation")
    # Of one scale for each tensor few codes can be kept: q, k and v, and gate and up share one in a folder.
    return next((kind for kind in ("row", "block") if recipe in RECIPES_OF_KIND[kind]), None)


def export_model(
    path: str | Path,
    directory: str | Path,
    format: str,
    *,
    include: Iterable[str] = (),
    largest: int = MAX_FILE_BYTES,
    step: int | None = None,
    device: torch.device | str | None = None,
    log: Callable[[str], None] = lambda text: None,
    progress: Progress = lambda done, total, name: None,
) -> ExportResult:
    """Export a run directory or a model folder (also one in FP8) to `directory`.

    format   bf16, fp8-block, fp8-dynamic, fp8-tensor, or fp8: the one that fits the model (`choose_target_format`)
    include  components in FP8 in addition to the foundation
    largest  maximum bytes per file
    step     the checkpoint of a run; by default the newest complete one
    device   the device on which a run is opened and weights are cast; by default a GPU if there is one

    Raises TrainError for adapters (use octavo merge) and for `step` with a folder, and the errors of
    `checkpoint.export.export` and `Target.open`.
    """
    target = inspect_target(path)
    if target.lora:
        if format != FP8:
            plan_layout(target.base, format, include)  # a format that fails is not advised
        kind = "a LoRA run" if target.kind == "run" else "an adapter"
        raise TrainError(
            f"{path} is {kind} on {target.base}: serve the adapter with its base, or merge both into one model: "
            f"octavo merge {path} DIR --format {format}"
        )
    if step is not None and target.kind != "run":
        raise TrainError(f"step {step} chooses a checkpoint of a run, but {path} is not a run directory")
    check_target(Path(directory), (target.path, target.base))  # before anything is loaded
    include = tuple(include)
    if format == FP8:
        choice = choose_target_format(target, include)
        log(f"format {choice}")
        format = choice.format
    device = torch.device(device or accelerator.default_device())
    values: Iterator[tuple[str, Value]]
    untied = None
    if target.kind == "run":
        opened = target.open(step=step, device=device, log=log)
        log(f"{path}: {', '.join(opened.notes)}" if opened.notes else str(path))
        values, untied = iter_values(opened.model), keeps_weights_apart(opened.model, models.empty(target.base))
    else:
        log(f"{path}: {target.quantization or 'high precision'}")
        values = models.iter_weights(target.base)
    return export(
        values, target.base, directory, format, include=include, largest=largest, device=device,
        random=target.random is not None, untied=untied, protect=(target.path,), log=log, progress=progress,
    )  # fmt: skip
