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
from octavo.checkpoint.export import MAX_FILE_BYTES, ExportResult, Progress, check_target, export
from octavo.checkpoint.export.values import Value, iter_values
from octavo.train.artifacts.load_target import inspect_target
from octavo.train.errors import TrainError


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

    format   bf16, fp8-block, fp8-dynamic or fp8-tensor
    include  components in FP8 in addition to the foundation
    largest  maximum bytes per file
    step     the checkpoint of a run; by default the newest complete one
    device   the device on which a run is opened and weights are cast; by default a GPU if there is one

    Raises TrainError for adapters (use octavo merge) and for `step` with a folder, and the errors of
    `checkpoint.export.export` and `Target.open`.
    """
    target = inspect_target(path)
    if target.lora:
        kind = "a LoRA run" if target.kind == "run" else "an adapter"
        raise TrainError(
            f"{path} is {kind} on {target.base}: serve the adapter with its base, or merge both into one model: "
            f"octavo merge {path} DIR --format {format}"
        )
    if step is not None and target.kind != "run":
        raise TrainError(f"step {step} chooses a checkpoint of a run, but {path} is not a run directory")
    check_target(Path(directory), (target.path, target.base))  # before anything is loaded
    device = torch.device(device or accelerator.default_device())
    values: Iterator[tuple[str, Value]]
    if target.kind == "run":
        opened = target.open(step=step, device=device, log=log)
        log(f"{path}: {', '.join(opened.notes)}" if opened.notes else str(path))
        values = iter_values(opened.model)
    else:
        log(f"{path}: {target.quantization or 'high precision'}")
        values = models.iter_weights(target.base)
    return export(
        values, target.base, directory, format, include=include, largest=largest, device=device,
        random=target.random is not None, protect=(target.path,), log=log, progress=progress,
    )  # fmt: skip
