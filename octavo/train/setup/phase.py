"""What a run learns from: where its batches come from, and what makes a step of them.

`Phase` itself is pretraining and supervised fine-tuning. The package rl has those of preferences and of reinforcement
learning: each is a subclass with a loader and a :class:`octavo.train.step.step.Stepper` of its own. All else of a run,
from the plan to its checkpoints, is the same in every phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.config import Config
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.from_config import eval_set, train_loader
from octavo.train.errors import TrainError
from octavo.train.forward.evaluation import Answer, evaluate
from octavo.train.step.step import Stepper


class Phase:
    """Pretraining and supervised fine-tuning: rows that hold what is to be said.

    names        values of `train.phase` that it is for
    tensorboard  figures of its rows that TensorBoard has under another name
    starved      what mends a run of steps that hold nothing to learn from
    exhausts     whether a run that has learnt may come to a point where nothing is left to learn, and still finish
    """

    names: tuple[str, ...] = ("pretrain", "sft")
    tensorboard: Mapping[str, str] = {}
    starved: str = "Raise train.seq_length, lower data.max_pixels or data.min_pixels, or mend the rows"
    exhausts: bool = False

    def check(self, cfg: Config) -> None:
        """Raises TrainError where the configuration asks for another phase."""
        if cfg.train.phase not in self.names:
            raise TrainError(
                f"train.phase is {cfg.train.phase}, and this runs {' and '.join(self.names)}; `octavo train FILE` "
                "runs every phase"
            )

    def prints(self, cfg: Config) -> Mapping[str, str]:
        """Digests of what else decides the run's numbers, by name: a resumed run must have the same."""
        return {}

    def loader(self, cfg: Config, processor: Any, **share: Any) -> Any:
        """The batches of each step: :class:`octavo.data.Loader`, or what is used as one."""
        return train_loader(cfg, processor, **share)

    def evalset(self, cfg: Config, processor: Any, **share: Any) -> EvalSet | None:
        """The held-out data; None where the configuration names none."""
        return eval_set(cfg, processor, **share)

    def stepper(
        self, plain: Stepper, processor: Any, directory: Path, step: int, say: Callable[[str], None]
    ) -> Stepper:
        """What makes a step of a loader's batches, with all that `plain` has. The run is going to be resumed after
        `step`; nothing of its directory may change yet. Arguments as those of `begin`."""
        return plain

    def begin(self, stepper: Stepper, processor: Any, directory: Path, step: int, say: Callable[[str], None]) -> None:
        """Everything is assembled, and resumed after `step`. `directory` is the run's; `say` takes lines for people."""

    def evaluate(self, stepper: Stepper, evalset: EvalSet, shown: list[Answer] | None = None) -> Mapping[str, Any]:
        """What the weights as they stand make of the held-out data: numbers by name, `loss`, `questions`, `tokens` and
        where there are questions `exact_match` (:func:`octavo.train.evaluate`) among them. `shown` gets a few answers
        of this rank. A collective."""
        return evaluate(stepper.model, evalset, stepper.forward, stepper.world, shown=shown)

    def proof(self, stepper: Stepper) -> Mapping[str, Any]:
        """What the run has proven so far beside its GEMMs, as JSON; it goes into proof.json. A collective."""
        return {}

    def close(self) -> None:
        """The run ends, in whatever way: end processes and free memory."""


SFT = Phase()
