"""The display of a run: a progress bar on a terminal, otherwise plain lines, or nothing if there is no console."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from octavo.train.forward.evaluation import judged_by_exact_match, token_loss

LINE_INTERVAL_S = 10.0  # seconds between plain lines


class Display:
    """Shows the steps of a run on a rich console, or nothing if the console is None.

    A watcher may set ``note``, which follows the figures of each step: the time left for more than this run.
    """

    def __init__(self, console: Any, label: str) -> None:
        self.console, self.label, self.steps, self.note = console, label, 0, ""
        self._bar: Any = None
        self._task: Any = None
        self._last = 0.0
        self._figures = self._part = ""

    def begin(self, done: int, steps: int) -> None:
        """Start after `done` of `steps` steps."""
        self.steps = steps
        if self.console is None or not self.console.is_terminal:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(), console=self.console, refresh_per_second=4,
        )  # fmt: skip
        self._task = self._bar.add_task(self.label or "train", total=self.steps, completed=done, figures="")
        self._bar.start()

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a finished step."""
        if self.console is None:
            return
        figures = "  ".join(text for text in (_figures(row), self.note) if text)
        if self._bar is not None:
            self._figures, self._part = figures, ""
            self._bar.update(self._task, completed=row["step"], figures=self._figures)
            return
        now = time.monotonic()
        if row["step"] in (1, self.steps) or "eval" in row or now - self._last >= LINE_INTERVAL_S:
            self._last = now
            self.log(f"step {row['step']}/{self.steps}  {figures}")

    def show_part(self, part: str) -> None:
        """Show the current part of a step in the bar; plain lines do not show parts."""
        if self._bar is not None and part != self._part:
            self._part = part
            self._bar.update(self._task, figures=f"{part}  {self._figures}")

    def log(self, text: str) -> None:
        """Print a line above the bar."""
        if self.console is not None:
            prefix = f"{self.label}: " if self.label and "\n" not in text else ""
            self.console.print(prefix + text, highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _figures(row: Mapping[str, Any]) -> str:
    if "reward" in row:  # reinforcement learning, where the loss is not informative
        # Replicas that generate during the update have no rate; they cost the wait for them.
        wait = f"waited {row['rollout_wait_s']:.1f} s" if "rollout_wait_s" in row else ""
        rates = wait or f"{row['rollout_tokens_per_s']:.0f} rollout"
        rates += f", {row['training_tokens_per_s']:.0f} training"
        parts = [
            f"reward {_format(row['reward'])}",
            f"length {_format(row['length'], '.1f')}",
            f"{'' if wait else 'tokens/s '}{rates}",
        ]
    else:
        name = "preference loss" if "rewards/margins" in row else "loss"
        parts = ["no loss tokens" if row.get("empty") else f"{name} {row['loss']:.4f}"]
        if "rewards/accuracies" in row:
            parts.append(f"accuracy {_format(row['rewards/accuracies'], '.1%')}")
        if "rewards/margins" in row:
            parts.append(f"margin {_format(row['rewards/margins'])}")
        parts += [f"lr {row['lr']:.2e}", f"{row['tokens_per_s']:.0f} tokens/s"]
    if row.get("skipped"):
        parts.append("skipped: not finite")
    if row.get("overflow"):
        parts.append("skipped: FP16 overflow")
    if "eval" in row:
        evaluation = row["eval"]
        exact = (
            f", exact match {evaluation['exact_match']:.1%} of {evaluation['questions']}"
            if "exact_match" in evaluation and judged_by_exact_match((*row, *evaluation))
            else ""
        )
        if "preference_loss" in evaluation:
            parts.append(f"held-out preference loss {_format(evaluation['preference_loss'], '.4f')}")
        name = "eval loss" if "loss" in evaluation else "held-out answer loss"
        parts.append(f"{name} {token_loss(evaluation):.4f}{exact}")
        if "reward" in evaluation:
            parts.append(f"held-out reward {_format(evaluation['reward'])}")
        if "rewards/accuracies" in evaluation:
            parts.append(f"held-out accuracy {_format(evaluation['rewards/accuracies'], '.1%')}")
        if "rewards/margins" in evaluation:
            parts.append(f"margin {_format(evaluation['rewards/margins'])}")
    return "  ".join(parts)


def _format(value: float | None, form: str = ".3f") -> str:
    """Format a figure; None becomes a dash."""
    return "-" if value is None else format(value, form)
