"""Writes the result of a search as ``bisect.html`` (self-contained) and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

import octavo
from octavo.base import atomic_write
from octavo.base.safe_read import replace_nonfinite
from octavo.bisect.search_result import FOUND, SOUND, UNSOLVED, Answer, Line, describe_figure, list_words, percent
from octavo.config import to_yaml
from octavo.report.run import page_parts, plots

HERE = Path(__file__).parent
PILLS = {FOUND: "fail", SOUND: "pass", UNSOLVED: "undecided"}


def document(answer: Answer) -> dict[str, Any]:
    """Return the content of ``bisect.json``: the answer and every run; numbers that are not finite are null."""
    content: dict[str, Any] = replace_nonfinite(
        {
            "octavo": octavo.__version__,
            "status": answer.status,
            "answer": answer.sentence,
            "by": answer.by,
            "bar": answer.bar,
            "steps": answer.steps,
            "candidates": answer.candidates,
            "sets": [[_candidate(candidate) for candidate in culprits] for culprits in answer.sets],
            "out": [_candidate(candidate) for candidate in answer.out],
            "works": answer.how or None,
            "rules": [] if answer.works is None else [_rule(rule) for rule in answer.works.fp8.rules],
            "runs": [_line(line) for line in answer.lines],
            "trained": answer.trained,
        }
    )
    return content


def write(answer: Answer, directory: Path) -> Path:
    """Write the page and its plots; returns the path of the page."""
    curves = make_curves(answer)
    drawings = []
    with matplotlib.rc_context(plots.STYLE):
        if len(curves) > 1:
            drawings.append(plots.save(lambda width: plots.loss_figure(curves, width), directory / "loss.png"))
            drawings.append(
                plots.save(lambda width: plots.gap_figure(curves, answer.bar, width), directory / "gap.png")
            )
    page = directory / "bisect.html"
    text = page_parts.render(
        "bisect.html.jinja",
        folder=HERE,
        answer=answer,
        pill=PILLS.get(answer.status, "warn"),
        bar=percent(answer.bar),
        lines=[(line, describe_figure(answer.by, line.figure)) for line in answer.lines],
        drawings=drawings,
        works=""
        if answer.works is None
        else to_yaml(answer.works.model_copy(update={"run": type(answer.works.run)()})),
    )
    atomic_write.write_text(page, text)
    return page


def make_curves(answer: Answer) -> list[plots.Curve]:
    """Return the runs to plot: high precision, the unchanged configuration, each smallest set, and the change that
    works."""
    reference, unchanged, *trial_lines = answer.lines
    chosen = [("high precision", "base", reference), ("unchanged", "fp8-0", unchanged)]
    for number, causes in enumerate(answer.sets, 1):
        set_lines = [line for line in trial_lines if line.broken and line.words == f"with {list_words(causes)}"]
        chosen += [(f"only set {number}", f"fp8-{1 + number % 3}", line) for line in set_lines[:1]]
    if answer.works is not None:
        chosen += [("what works", "fp8-4", line) for line in [line for line in trial_lines if not line.broken][-1:]]
    return [_curve(*entry) for entry in chosen if entry[2].outcome.losses.size]


def _curve(label: str, color: str, line: Line) -> plots.Curve:
    losses = line.outcome.losses
    steps = line.outcome.begins + 1 + np.arange(len(losses))
    return plots.Curve(label, "reference" if color == "base" else "fp8", color, steps, losses)


def _candidate(candidate: Any) -> dict[str, Any]:
    return {"name": candidate.name, "gemm": candidate.gemm or None, "component": candidate.component or None}


def _rule(rule: Any) -> dict[str, Any]:
    return {key: value for key, value in rule if value is not None}


def _line(line: Line) -> dict[str, Any]:
    return {
        "words": line.words, "figure": line.figure, "broken": line.broken, "run": line.outcome.name,
        "steps": len(line.outcome.losses), "failure": line.outcome.failure or None,
    }  # fmt: skip
