"""What was trained, opened again: as a model, evaluated, merged with its adapters, exported for servers."""

from octavo.train.artifacts.evaluate import compare_bases, evaluate_run, evaluate_target, load_run
from octavo.train.artifacts.export import export_model
from octavo.train.artifacts.load_target import HIGH, Opened, Target, checkpoint_of, look
from octavo.train.artifacts.merge import BASES, Merged, merge_model

__all__ = [
    "BASES", "HIGH", "Merged", "Opened", "Target", "checkpoint_of", "compare_bases", "evaluate_run",
    "evaluate_target", "export_model", "load_run", "look", "merge_model",
]  # fmt: skip
