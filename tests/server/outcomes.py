"""What vLLM does with a folder, in the words of `octavo verify`."""

from __future__ import annotations

import contextlib
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

from octavo.cli.main import main
from tests.server import reference
from tests.server.client import Server, ServerRefused

OK, REFUSES, WRONG = "ok", "refuses", "loads, wrong answers"


@dataclass(frozen=True)
class Outcome:
    """`detail` is vLLM's error, or the mean distance of its log-probabilities from the good folder's, in nats."""

    verdict: str
    detail: str


def observe(
    server: Server, folder: Path, kernel: str, rows: reference.Rows, good: reference.Scores, far: float
) -> Outcome:
    """Load a folder; its answers are right if their mean distance from `good` is at most `far` nats."""
    try:
        server.load(folder, kernel)
        scores = server.score(rows)
    except ServerRefused as error:
        return Outcome(REFUSES, str(error).splitlines()[0])
    mean = reference.distance(scores, good).mean
    if math.isnan(mean):
        return Outcome(WRONG, "NaN")
    return Outcome(OK if mean <= far else WRONG, f"{mean:.3g} nats")


def predict(folder: Path) -> str:
    """The verdict of `octavo verify --json` about vLLM."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["verify", str(folder), "--json"])
    return json.loads(printed.getvalue())["verdicts"]["vLLM"]["verdict"]
