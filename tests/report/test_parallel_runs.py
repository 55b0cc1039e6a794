"""Runs in processes of their own: what a failing one says, that the others are asked to leave, and what is shown."""

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

import octavo
from octavo.report import ReportError, compare
from octavo.report.trial import parallel_runs
from octavo.report.trial.runs import make_runs


def sleeping(marker: Path) -> list[str]:
    """A process that says when it was asked to leave."""
    code = (
        "import pathlib, signal, sys, time\n"
        f"def leave(*_): pathlib.Path({str(marker)!r}).write_text('asked'); sys.exit(143)\n"
        f"signal.signal(signal.SIGTERM, leave); pathlib.Path({str(marker) + '.up'!r}).touch(); time.sleep(60)"
    )
    return [sys.executable, "-c", code]


@pytest.mark.long
def test_failed_run_is_reported_with_its_last_lines(cfg, tmp_path: Path) -> None:
    """The model folder of the synthetic configuration does not exist, so the real command fails."""
    with pytest.raises(
        ReportError, match=r"(?s)FP8 blockwise failed .*fp8-blockwise\.log:.*model\.path: there is no folder"
    ):
        parallel_runs.train_together(make_runs(cfg, ["blockwise"], tmp_path / "trial")[2:], 2)
    log = (tmp_path / "trial" / "arms" / "fp8-blockwise.log").read_text()
    assert log.strip()


def test_stopped_run_stops_the_others(cfg, tmp_path: Path, monkeypatch) -> None:
    runs = make_runs(cfg, ["blockwise"], tmp_path)[1:]
    real, started = subprocess.Popen, []

    def popen(command, **options):
        marker = tmp_path / f"asked-{len(started)}"
        started.append((real(sleeping(marker), **options), marker))
        return started[-1][0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(parallel_runs, "POLL", 0.05)
    killed = []

    def update(self, final=False):
        up = [marker.with_name(marker.name + ".up").exists() for _, marker in started]
        if len(up) == 2 and all(up) and not killed:
            killed.append(started[0][0].pid)
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(parallel_runs._Progress, "update", update)
    before = time.monotonic()
    with pytest.raises(ReportError, match="was stopped by signal 9; the same command continues the trial"):
        parallel_runs.train_together(runs, 2)
    assert time.monotonic() - before < 50
    assert started[1][1].read_text() == "asked" and started[1][0].poll() == 143


def test_progress_counts_recorded_steps(cfg, tmp_path: Path) -> None:
    runs = make_runs(cfg, ["blockwise"], tmp_path)
    run = Path(runs[0].cfg.run.dir)
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    out = io.StringIO()
    with parallel_runs._Progress(runs, Console(file=out, width=200)):
        pass
    assert f"0 of 3 runs done | high precision 2/{cfg.train.steps}\n" in out.getvalue()


@pytest.mark.parametrize("jobs", [0, -1])
def test_zero_jobs_are_rejected(cfg, tmp_path: Path, jobs: int) -> None:
    with pytest.raises(ReportError, match=f"jobs={jobs}, nproc=1, seeds=1"):
        compare(cfg, ["blockwise"], tmp_path, jobs=jobs)


def test_runs_train_over_several_processes(cfg, tmp_path: Path, monkeypatch) -> None:
    """They are ``octavo train FILE --nproc N``, one after the other; beside each other they would share the cards."""
    asked, real = [], subprocess.Popen

    def popen(command, **options):
        asked.append(command[4:])
        return real([sys.executable, "-c", ""], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(parallel_runs, "POLL", 0.01)
    runs = make_runs(cfg, ["blockwise"], tmp_path, savings=False)
    assert parallel_runs.train_together(runs, 1, nproc=2) == {}
    files = [f"{run.cfg.run.dir}.yaml" for run in parallel_runs._sort_runs(runs)]
    assert asked == [["train", file, "--nproc", "2"] for file in files] and len(files) == 3
    with pytest.raises(ReportError, match="jobs=2 and nproc=2: either several runs .*; set only one of them"):
        compare(cfg, ["blockwise"], tmp_path, jobs=2, nproc=2)


def trial_of_sleepers(tmp_path: Path) -> subprocess.Popen:
    """A trial in a process of its own, whose runs write their process ids and the signal that they got."""
    (tmp_path / "octavo_arms.py").write_text(
        "import pathlib, signal, sys, time\n"
        "me = pathlib.Path(sys.argv[2]).with_suffix('.up')\n"
        "def leave(*_): me.with_suffix('.asked').touch(); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, leave); me.touch(); time.sleep(60)\n"
    )
    (tmp_path / "trial.py").write_text(
        "import signal\n"
        "from pathlib import Path\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # which the trial leaves ignored where nohup had it so
        "from octavo.config import load_config_text\n"
        "from octavo.report.trial import parallel_runs\n"
        "from octavo.report.trial.runs import make_runs\n"
        "from synthetic_runs import CONFIG\n"
        "parallel_runs.POLL = 0.05\n"
        "parallel_runs.COMMAND = parallel_runs.COMMAND.replace(\"'octavo'\", \"'octavo_arms'\")\n"
        f"runs = make_runs(load_config_text(CONFIG), ['blockwise'], Path({str(tmp_path)!r}))\n"
        "parallel_runs.train_together(runs[1:], 2)\n"
    )
    paths = [str(tmp_path), str(Path(__file__).parent), str(Path(octavo.__file__).parents[1])]
    return subprocess.Popen(
        [sys.executable, str(tmp_path / "trial.py")], env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    )


def wait_for(folder: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + 40
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline, f"{count} of {pattern} did not come: {sorted(folder.glob('*'))}"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_runs_exit_with_their_trial(tmp_path: Path, number: signal.Signals) -> None:
    """Asked to leave, the trial asks its runs and tells by its exit code; killed outright, its runs see that."""
    trial = trial_of_sleepers(tmp_path)
    try:
        wait_for(tmp_path / "arms", "*.up", 2)
        trial.send_signal(number)
        code = trial.wait(40)
    finally:
        trial.kill()
    wait_for(tmp_path / "arms", "*.asked", 2)
    assert code == (-number if number == signal.SIGKILL else 128 + number)


def test_failed_fp8_run_does_not_stop_the_others(cfg, tmp_path: Path, monkeypatch) -> None:
    runs = make_runs(cfg, ["blockwise"], tmp_path)[1:]
    real = subprocess.Popen

    def popen(command, **options):
        bad = "fp8" in Path(command[-1]).name
        code = "import sys; sys.exit('octavo train: 10 steps in a row')" if bad else "pass"
        return real([sys.executable, "-c", code], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    home = Path(runs[-1].cfg.run.dir)
    home.mkdir(parents=True)
    (home / "metrics.jsonl").touch()
    assert parallel_runs.train_together(runs, 2) == {"fp8-blockwise": "10 steps in a row"}
    (home / "metrics.jsonl").unlink()
    with pytest.raises(ReportError, match="failed"):
        parallel_runs.train_together(runs, 2)


def test_waiting_trial_does_not_import_torch() -> None:
    code = "import octavo.report, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
