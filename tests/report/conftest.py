"""Fixtures of the report's tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic_runs import CONFIG, GOOD_PROOF, health, judged, losses, plan, write_run

from octavo.config import load_config_text, override, to_yaml


@pytest.fixture
def cfg(tmp_path: Path) -> Any:
    return override(load_config_text(CONFIG), [f"run.dir={tmp_path / 'unused'}"])


@pytest.fixture
def trial(cfg: Any, tmp_path: Path) -> Any:
    """A function that writes the three runs of a trial as finished runs; keywords change the FP8 run."""
    from octavo.report.trial.runs import make_runs

    def make(
        directory: Path | None = None, *, shift: float = 0.001, recipes: tuple = ("blockwise",), **fp8: Any
    ) -> Any:
        directory = directory or tmp_path / "trial"
        runs = make_runs(cfg, recipes, directory)
        for run in runs:
            home = Path(run.cfg.run.dir)
            if run.kind == "fp8":
                options = {"tables": {1: health(), 50: health()}, "plan_json": plan(), "proof": GOOD_PROOF} | fp8
                write_run(home, losses(100, shift), config=to_yaml(run.cfg), **options)
            else:
                seed = int(run.kind == "noise")
                value = {"exact_match": 0.985} if seed else {}
                write_run(home, losses(100, 0.012 * seed, seed), config=to_yaml(run.cfg), **value)
        return SimpleNamespace(directory=directory, runs=runs, recipes=recipes)

    return make


@pytest.fixture
def sound_answers(monkeypatch) -> None:
    """Stands in for judging held-out data, which needs a model: every run answers alike."""
    monkeypatch.setattr("octavo.report.trial.held_out.evaluate_model", lambda *_: judged(0.1, 3.0))
    monkeypatch.setattr("octavo.report.trial.held_out.evaluate_run", lambda run, *_, **__: judged(gemms=30))
