"""Arms in processes of their own: what a failing one says, that the others are asked to leave, and what is shown."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from octavo.report import ReportError, compare, side_by_side
from octavo.report.compare import arms_of


def sleeping(marker: Path) -> list[str]:
    """A process that says when it was asked to leave."""
    code = (
        "import pathlib, signal, sys, time\n"
        f"def leave(*_): pathlib.Path({str(marker)!r}).write_text('asked'); sys.exit(143)\n"
        f"signal.signal(signal.SIGTERM, leave); pathlib.Path({str(marker) + '.up'!r}).touch(); time.sleep(60)"
    )
    return [sys.executable, "-c", code]


def test_an_arm_that_fails_is_named_with_its_last_words(cfg, tmp_path: Path) -> None:
    """The model folder of the synthetic configuration does not exist, so the real command fails."""
    with pytest.raises(ReportError, match=r"(?s)FP8 blockwise failed .*fp8-blockwise\.log:.*config\.json is missing"):
        compare(cfg, ["blockwise"], tmp_path / "trial", jobs=2)
    log = (tmp_path / "trial" / "arms" / "fp8-blockwise.log").read_text()
    assert log.strip()


def test_a_stopped_arm_stops_the_others(cfg, tmp_path: Path, monkeypatch) -> None:
    arms = arms_of(cfg, ["blockwise"], tmp_path)[1:]
    real, started = subprocess.Popen, []

    def popen(command, **options):
        marker = tmp_path / f"asked-{len(started)}"
        started.append((real(sleeping(marker), **options), marker))
        return started[-1][0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(side_by_side, "POLL", 0.05)
    killed = []

    def look(self, final=False):
        up = [marker.with_name(marker.name + ".up").exists() for _, marker in started]
        if len(up) == 2 and all(up) and not killed:
            killed.append(started[0][0].pid)
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(side_by_side._Progress, "look", look)
    before = time.monotonic()
    with pytest.raises(ReportError, match="was stopped by signal 9; the same command continues the trial"):
        side_by_side.train_together(arms, 2)
    assert time.monotonic() - before < 50
    assert started[1][1].read_text() == "asked" and started[1][0].poll() == 143


def test_progress_counts_the_steps_that_are_written(cfg, tmp_path: Path) -> None:
    arms = arms_of(cfg, ["blockwise"], tmp_path)
    run = Path(arms[0].cfg.run.dir)
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    out = io.StringIO()
    with side_by_side._Progress(arms, Console(file=out, width=200)):
        pass
    steps = cfg.train.steps
    assert (
        f"step: high precision 2/{steps}, high precision, seed 1 0/{steps}, FP8 blockwise 0/{steps}" in out.getvalue()
    )


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_jobs(cfg, tmp_path: Path, jobs: int) -> None:
    with pytest.raises(ReportError, match=f"jobs={jobs}: at least one arm"):
        compare(cfg, ["blockwise"], tmp_path, jobs=jobs)
