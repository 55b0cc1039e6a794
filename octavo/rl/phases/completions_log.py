"""Writes completions.jsonl: the first completions of every step with their rewards. With `run.encrypt` the file is
completions.jsonl.aes, with encrypted lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from octavo.base.encryption import SUFFIX
from octavo.rl.rollout.experience import Rollout
from octavo.train.run_dir.run_dir import append_lines, truncate_metrics

COMPLETIONS = "completions.jsonl"


class CompletionsLog:
    """Appends the first `count` completions of each step to a file in the run directory."""

    def __init__(self, directory: Path, count: int, encrypt: bool = False) -> None:
        self.file, self.count = directory / (COMPLETIONS + SUFFIX * encrypt), count

    def begin(self, step: int) -> None:
        """Remove the lines of steps after `step`, from which the run continues."""
        truncate_metrics(self.file, step)

    def write(self, lines: list[str]) -> None:
        """Append the first of a step's lines. `lines` come from :func:`completion_lines` of all ranks, in rank
        order."""
        append_lines(self.file, lines[: self.count])


def completion_lines(step: int, rollout: Rollout, count: int, weights: int) -> list[str]:
    """Return a line of JSON for each of the first `count` completions of this rank: step, `weights` (number of the last
    step before the weights that generated it, 0 for the initial weights), file, row, prompt, answer, completion, stop
    reason, rewards by name (None if a reward returned no number), their sum, and the advantage."""
    lines = []
    for number, completion in enumerate(rollout.completions[:count]):
        prompt = rollout.prompts[completion.prompt]
        line: dict[str, Any] = {
            "step": step, "weights": weights, "file": prompt.file, "row": prompt.row, "sample": completion.sample,
            "prompt": prompt.columns.get("prompt"), "answer": prompt.answer, "completion": rollout.texts[number],
            "tokens": len(completion.tokens), "ended": completion.reason, "reward": float(rollout.rewards[number]),
            "rewards": {name: _number(scores[number]) for name, scores in rollout.scores.items()},
            "advantage": None if rollout.advantages is None else float(rollout.advantages[number]),
        }  # fmt: skip
        lines.append(json.dumps(line) + "\n")
    return lines


def _number(score: float) -> float | None:
    """Return the score, or None for NaN and infinities, which JSON does not support."""
    return float(score) if np.isfinite(score) else None
