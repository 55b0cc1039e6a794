"""Training: one configuration, one job.

build (the ordered list) -> step (a page) -> loop (run directory, proof, evaluation, checkpoints)
"""

from octavo.train.callback import Callback, Run, Step
from octavo.train.errors import TrainError
from octavo.train.evaluation import evaluate
from octavo.train.finished import evaluate_run, load_run
from octavo.train.loop import run
from octavo.train.result import RunResult
from octavo.train.step import Observe

__all__ = [
    "Callback", "Observe", "Run", "RunResult", "Step", "TrainError", "evaluate", "evaluate_run", "load_run", "run",
]  # fmt: skip
