"""Training: one configuration, one job.

build (the ordered list) -> step (a page) -> loop (run directory, proof, evaluation, checkpoints)
"""

from octavo.train.errors import TrainError
from octavo.train.evaluation import evaluate
from octavo.train.finished import evaluate_run, load_run
from octavo.train.loop import RunResult, run

__all__ = ["RunResult", "TrainError", "evaluate", "evaluate_run", "load_run", "run"]
