"""The names of files and folders in a run directory (:mod:`octavo.train.run_dir.run_dir` describes them)."""

from __future__ import annotations

from octavo.base.encryption import SUFFIX

CONFIG, PLAN, PROOF, GAIN, RESULT = "config.yaml", "plan.json", "proof.json", "gain.json", "result.json"
ENVIRONMENT = "environment.json"
METRICS, ADAPT, CHECKS = "metrics.jsonl", "adapt.jsonl", "checks.jsonl"
CHECKPOINTS, MILESTONES = "checkpoints", "milestones"
NCCL_TRACE = "nccl_trace_rank_"  # followed by the rank; may precede the configuration

REFERENCE = "reference.safetensors"  # log-probabilities under the initial weights, bound to model, rows and settings
_MAY_BE_ENCRYPTED = ("skipped.jsonl", "answers.jsonl", "completions.jsonl", REFERENCE)
# All that a run, its page and its trackers write, except its checkpoints.
_WRITTEN = frozenset({
    *(CONFIG, ENVIRONMENT, PLAN, PROOF, GAIN, RESULT, METRICS, ADAPT, CHECKS, "memory.json", "page.html", "page.png"),
    *("base.json", "hf", "adapter", "tensorboard", "trackers.json", "wandb", "swanlog"),
    *_MAY_BE_ENCRYPTED, *(name + SUFFIX for name in _MAY_BE_ENCRYPTED),
})  # fmt: skip


def is_written_by_run(name: str) -> bool:
    """Return True if a run writes a file or folder of this name, apart from its checkpoints."""
    return name in _WRITTEN or name.startswith(NCCL_TRACE)
