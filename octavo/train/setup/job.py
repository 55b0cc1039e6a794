"""The assembled run that the loop and its callbacks work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import checkpoint, fp8, parallel
from octavo.config import Config
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.loader import Loader
from octavo.data.loaders.pack_loader import PackLoader
from octavo.train.run_dir import run_dir
from octavo.train.setup import frozen_base
from octavo.train.setup.phase import Phase
from octavo.train.step.precision_schedule import PrecisionSchedule
from octavo.train.step.step import Stepper

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Job:
    """Everything that `build` assembles for a run."""

    cfg: Config
    world: parallel.World
    directory: Path
    processor: Any
    loader: Loader | PackLoader
    evalset: EvalSet | None
    plan: fp8.Plan
    notes: tuple[str, ...]
    stepper: Stepper
    progress: run_dir.Progress
    files: Mapping[str, Any]
    phase: Phase
    precision_schedule: PrecisionSchedule
    base: frozen_base.FrozenBase | None = None
    attention: Any = None  # see `attention_kernel.saved_choices`; None if torch chooses
    initial_weights: Mapping[str, Any] | None = None  # record of the checkpoint that they come from (`start_from`)
    background: checkpoint.BackgroundSaver | None = (
        None  # writes checkpoints while training continues (`run.save: async`)
    )

    @property
    def model(self) -> PreTrainedModel:
        return self.stepper.model
