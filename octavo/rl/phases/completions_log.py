"""completions.jsonl: the first completions of every step, with what they were worth, for people to read. With
`run.encrypt` it is completions.jsonl.aes, of encrypted lines."""

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
    """Appends the first `count` completions of each step to the file of a run."""

    def __init__(self, directory: Path, count: int, encrypt: bool = False) -> None:
        self.file, self.count = directory / (COMPLETIONS + SUFFIX * encrypt), count

    def begin(self, step: int) -> None:
        """Drop the lines of steps after `step`, where the run goes on."""
        truncate_metrics(self.file, step)

    def write(self, lines: list[str]) -> None:
        """The first lines of a step, of those that :func:`completion_lines` makes on each rank, in the ranks' order."""
        append_lines(self.file, lines[: self.count])


def completion_lines(step: int, rollout: Rollout, count: int, weights: int) -> list[str]:
    """A line for each of the first `count` completions of this rank: step, `weights` (the step whose update the weights
    that wrote it stood after; 0: the first ones), file, row, prompt, answer, completion, how it ended, rewards by name
    (None: it gave no number), their sum and the advantage."""
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
    """As JSON has it."""
    return float(score) if np.isfinite(score) else None
