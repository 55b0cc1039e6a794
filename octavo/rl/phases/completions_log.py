"""completions.jsonl: the first completions of every step with their rewards, for people to read. With `run.encrypt` it
is completions.jsonl.aes, whose lines are encrypted."""

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
        """Drop the lines of steps after `step`, from which the run continues."""
        truncate_metrics(self.file, step)

    def write(self, lines: list[str]) -> None:
        """Append the first of a step's lines, which :func:`completion_lines` made on each rank, in the order of
        ranks."""
        append_lines(self.file, lines[: self.count])


def completion_lines(step: int, rollout: Rollout, count: int, weights: int) -> list[str]:
    """A line of JSON for each of the first `count` completions of this rank: step, `weights` (the step after whose
    update the weights wrote it; 0: the initial weights), file, row, prompt, answer, completion, why it ended, rewards
    by name (None: no number), their sum, and the advantage."""
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
    """The score as JSON can hold it: None for NaN and infinities."""
    return float(score) if np.isfinite(score) else None
