"""A phase of training: the source of a run's batches, and the training step that is computed from them.

`Phase` itself implements pretraining and supervised fine-tuning. The phases of preferences and of reinforcement
learning are subclasses in the package rl, with their own loader and their own
:class:`octavo.train.step.step.Stepper`. Everything else about a run, from the plan to its checkpoints, is the same in
every phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.config import Config
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.from_config import eval_set, train_loader
from octavo.train.errors import TrainError
from octavo.train.forward.evaluation import Answer, evaluate, name_loss
from octavo.train.step.step import Stepper


class Phase:
    """Pretraining and supervised fine-tuning, on rows that contain the text to learn.

    names             values of `train.phase` that it implements
    tensorboard       metrics that have a different name in TensorBoard
    no_loss_advice    advice in the error of a run whose steps have no loss tokens
    can_exhaust_data  True if a run may reach a point without further loss tokens and still finish
    """

    names: tuple[str, ...] = ("pretrain", "sft")
    tensorboard: Mapping[str, str] = {}
    no_loss_advice: str = "Raise train.seq_length, lower data.max_pixels or data.min_pixels, or fix the rows"
    can_exhaust_data: bool = False

    def check(self, cfg: Config) -> None:
        """Raise TrainError if `train.phase` is not one of `names`."""
        if cfg.train.phase not in self.names:
            raise TrainError(
                f"train.phase is {cfg.train.phase}, and this runs {' and '.join(self.names)}; `octavo train FILE` "
                "runs every phase"
            )

    def fingerprints(self, cfg: Config) -> Mapping[str, str]:
        """Return digests of further inputs that determine the results, by name; they must not change on resume."""
        return {}

    def loader(self, cfg: Config, processor: Any, **share: Any) -> Any:
        """Return the loader of each step's batches: :class:`octavo.data.Loader` or an object with its interface."""
        return train_loader(cfg, processor, **share)

    def evalset(self, cfg: Config, processor: Any, **share: Any) -> EvalSet | None:
        """Return the held-out data, or None if the configuration names none."""
        return eval_set(cfg, processor, **share)

    def stepper(self, base: Stepper, processor: Any, directory: Path, step: int, log: Callable[[str], None]) -> Stepper:
        """Return the stepper of this phase, built from `base`.

        The run will be resumed after `step`, and its directory may not be changed yet. The other arguments are as in
        `begin`.
        """
        return base

    def begin(self, stepper: Stepper, processor: Any, directory: Path, step: int, log: Callable[[str], None]) -> None:
        """Called when everything is assembled and resumed after `step`; `log` prints a line for the user."""

    def evaluate(self, stepper: Stepper, evalset: EvalSet, shown: list[Answer] | None = None) -> Mapping[str, Any]:
        """Evaluate the current weights on the held-out data; a collective.

        The results include `loss` or `answer_loss` (:func:`octavo.train.forward.evaluation.name_loss`), `questions`,
        `tokens` and, where there are questions, `exact_match`; see :func:`octavo.train.evaluate`. A few answers of this
        rank are appended to `shown`.
        """
        figures = evaluate(stepper.model, evalset, stepper.forward, stepper.world, shown=shown)
        return name_loss(figures, stepper.cfg.train.phase)

    def proof(self, stepper: Stepper) -> Mapping[str, Any]:
        """Return further evidence for proof.json, in addition to the GEMM counts, as JSON; a collective."""
        return {}

    def close(self) -> None:
        """Called when the run ends for any reason; stops processes and frees memory."""


SFT = Phase()
