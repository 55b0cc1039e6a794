"""Two callbacks: an additional column in metrics.jsonl with a summary line, and early stopping.

python examples/callback.py run.yaml
"""

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from octavo import train
from octavo.config import load_config


class BestLoss(train.Callback):
    """Logs the lowest loss so far. Checkpoints have no callback state, so a resumed run takes it from the last row."""

    def begin(self, run: train.Run) -> None:
        self.best = run.row.get("best_loss", float("inf"))

    def after_step(self, run: train.Run, step: train.Step) -> None:
        self.best = min(self.best, step.row["loss"])
        step.row["best_loss"] = self.best

    def end(self, run: train.Run, result: train.RunResult) -> None:
        run.say(f"best loss {self.best:.4f} in {result.steps} steps")


class EarlyStop(train.Callback):
    """Stops the run after `patience` consecutive evaluations without a better loss in this session."""

    def __init__(self, patience: int) -> None:
        self.patience, self.worse, self.best = patience, 0, float("inf")

    def evaluated(self, run: train.Run, figures: Mapping[str, Any]) -> None:
        self.worse = self.worse + 1 if figures["loss"] >= self.best else 0
        self.best = min(self.best, figures["loss"])
        if self.worse >= self.patience:
            run.stop()


if __name__ == "__main__":
    train.run(load_config(sys.argv[1]), console=Console(), callbacks=[BestLoss(), EarlyStop(patience=3)])
