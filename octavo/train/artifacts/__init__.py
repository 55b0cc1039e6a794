"""Load, evaluate, merge and export trained models."""

from octavo.train.artifacts.evaluate import compare_bases, evaluate_run, evaluate_target, load_run
from octavo.train.artifacts.export import export_model
from octavo.train.artifacts.load_target import HIGH, OpenedTarget, Target, find_checkpoint, inspect_target
from octavo.train.artifacts.merge import BASES, Merged, merge_model

__all__ = [
    "BASES", "HIGH", "Merged", "OpenedTarget", "Target", "find_checkpoint", "compare_bases", "evaluate_run",
    "evaluate_target", "export_model", "load_run", "inspect_target", "merge_model",
]  # fmt: skip
