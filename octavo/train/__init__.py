"""Training: one configuration, one job.

setup.build assembles a run, step makes one training step, and loop runs the steps with their callbacks.
"""

from octavo.train.artifacts import evaluate_run, load_run
from octavo.train.callbacks.callback import Callback, Run, Step
from octavo.train.callbacks.result import RunResult
from octavo.train.errors import TrainError
from octavo.train.forward.evaluation import evaluate
from octavo.train.loop.loop import run
from octavo.train.step.step import Observe

__all__ = [
    "Callback", "Observe", "Run", "RunResult", "Step", "TrainError", "evaluate", "evaluate_run", "load_run", "run",
]  # fmt: skip
