"""A unit of a study: one training with the evaluation of its weights on held-out data, or one task without training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.config import Config


@dataclass(frozen=True)
class Unit:
    """One training, or one task.

    name     its folder
    cfg      what is trained; None for a task
    begins   the step after which it begins, where ``cfg.run.fork`` names a checkpoint
    average  whether the mean of the weights over the last tenth of its steps is judged too
    plant    (module, function, arguments ...) of this folder that changes the model before its first step
    look     (module, function, arguments ...) that makes further figures of the trained model
    watch    (module, function, arguments ...) that makes figures of the model after each of the steps ``watch_at``
    keeps    whether the trained weights stay, as others begin from them; else the run directory is deleted
    task     (module, function, arguments ...) of this folder that makes the figures of a task, a JSON object
    """

    name: str
    cfg: Config | None
    begins: int = 0
    average: bool = False
    plant: tuple[Any, ...] = ()
    look: tuple[Any, ...] = ()
    watch: tuple[object, ...] = ()
    watch_at: tuple[int, ...] = ()
    keeps: bool = False
    task: tuple[object, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a unit found. ``losses``: by step, from the one after ``begins`` on, nats a token. ``held``: mean loss on
    the held-out data by how it was judged: "own" and "high" precision, "averaged_own" and "averaged_high" by the mean
    of the weights. ``more``: the figures of ``look``, of ``watch`` by step, or of a task. ``failure``: the sentence
    that the training failed with."""

    name: str
    begins: int
    losses: tuple[float, ...]
    held: Mapping[str, float]
    more: Mapping[str, Any] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    failure: str = ""
