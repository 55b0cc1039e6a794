"""Load, evaluate, merge and export trained models."""

from octavo.train.artifacts.evaluate import compare_bases, evaluate_run, evaluate_target, load_run
from octavo.train.artifacts.export import choose_target_format, export_model, is_trained_in_fp8
from octavo.train.artifacts.load_target import HIGH, OpenedTarget, Target, find_checkpoint, inspect_target
from octavo.train.artifacts.merge import BASES, Merged, merge_model

__all__ = [
    "BASES", "HIGH", "Merged", "OpenedTarget", "Target", "choose_target_format", "find_checkpoint", "compare_bases",
    "evaluate_run", "evaluate_target", "export_model", "is_trained_in_fp8", "load_run", "inspect_target", "merge_model",
]  # fmt: skip
