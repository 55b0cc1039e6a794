"""What was trained, opened again: as a model, evaluated, merged with its adapters, exported for servers."""

from octavo.train.finished.evaluate import compare_bases, evaluate_run, evaluate_target, load_run
from octavo.train.finished.export import export_model
from octavo.train.finished.merge import BASES, Merged, merge_model
from octavo.train.finished.target import HIGH, Opened, Target, checkpoint_of, look

__all__ = [
    "BASES", "HIGH", "Merged", "Opened", "Target", "checkpoint_of", "compare_bases", "evaluate_run",
    "evaluate_target", "export_model", "load_run", "look", "merge_model",
]  # fmt: skip
