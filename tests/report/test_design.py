"""What a trial says before its first run: by earlier runs where there are any, else by figures that have a source."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from synthetic_runs import GOOD_PROOF, health, judged, losses, plan, write_run

from octavo.config import override, to_yaml
from octavo.report import ReportError, compare
from octavo.report.evidence import claims, power
from octavo.report.evidence.power import Estimate
from octavo.report.evidence.trial_claims import FORKS, SEEDS, WEIGHTS
from octavo.report.trial import design
from octavo.report.trial.runs import make_runs

ROOT = Path(__file__).resolve().parents[2]
GAPS = (0.001, 0.004, -0.002)


@pytest.fixture
def cfg(cfg, tmp_path: Path) -> Any:
    """The synthetic configuration in 120 steps, with forty held-out rows."""
    file = tmp_path / "test.json"
    turns = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]
    file.write_text(json.dumps([{"conversations": turns}] * 40))
    return override(cfg, ["train.steps=120", f"data.eval=[{{path: {file}}}]"])


def of(found: design.Design) -> dict[str, Estimate]:
    return {estimate.claim: estimate for estimate in found.expected}


def played(cfg: Any, directory: Path, *, seeds: int, forks: int, but: tuple[str, ...] = ()) -> None:
    """Runs whose FP8 side is worse than high precision by GAPS, seed by seed and fork by fork; some are not there."""
    for run in make_runs(cfg, None, directory, False, forks, seeds):
        if run.name in but:
            continue
        own = run.kind in ("fp8", "seed") or bool(run.of)
        shift = GAPS[run.number if run.kind == "fork" else run.cfg.run.seed] if own else 0.0
        extra = {"tables": {1: health()}, "plan_json": plan(), "proof": GOOD_PROOF} if own else {}
        for step in run.cfg.run.milestones:
            (Path(run.cfg.run.dir) / "milestones" / f"step_{step}").mkdir(parents=True)
        curve = losses(120, shift, run.cfg.run.seed)
        write_run(Path(run.cfg.run.dir), curve, config=to_yaml(run.cfg), begins=run.begins, **extra)


def test_nothing_is_predicted_without_earlier_runs(cfg, tmp_path: Path) -> None:
    found = design.design(cfg, None, tmp_path / "trial", forks=3, seeds=2)
    told = of(found)
    assert list(told) == ["accuracy", WEIGHTS, FORKS, SEEDS] and not any(e.seen for e in told.values())
    assert found.lines[:3] == [
        "Held-out accuracy, Loss at the same weights: no spread is recorded for this task, so nothing is predicted; "
        "the first runs show it",
        "Loss of forks: no spread is recorded for this task, so nothing is predicted; the first forks show it",
        "Loss of trajectories: no spread is recorded for this task, so nothing is predicted; --seeds 2 first, then "
        "more in the same folder, predicts by the first two",
    ]
    assert not any("%" in line for line in found.lines)
    assert not (tmp_path / "trial").exists(), "nothing is written"
    alone = of(design.design(override(cfg, ["data.eval=[]"]), None, tmp_path / "trial"))
    assert list(alone) == ["accuracy", WEIGHTS] and "set data.eval" in alone["accuracy"].line


def test_only_the_claims_that_are_judged_have_runs(cfg, tmp_path: Path) -> None:
    found = design.design(cfg, None, tmp_path / "trial", claims=("accuracy",))
    assert [run.kind for run in found.runs] == ["reference", "fp8"] and list(of(found)) == ["accuracy"]
    assert found.runs[0].cfg.run.milestones == (), "no fork continues from it"
    pairs = design.design(cfg, None, tmp_path / "trial", claims=(SEEDS,), seeds=2)
    assert [run.kind for run in pairs.runs] == ["reference", "noise", "fp8", "seed"] and list(of(pairs)) == [SEEDS]
    for phase, chosen in (("sft", ("loss",)), ("preference", ("accuracy",))):
        over = [f"train.phase={phase}", *(["preference={}"] if phase == "preference" else [])]
        with pytest.raises(ReportError, match=f"phase {phase} has no such choice of accuracy, loss_same_weights"):
            compare(override(cfg, over), None, tmp_path, claims=chosen)


def test_earlier_runs_determine_the_spread_of_gaps(cfg, tmp_path: Path) -> None:
    played(cfg, tmp_path, seeds=3, forks=3)
    told = of(design.design(cfg, None, tmp_path, forks=5, seeds=6))
    for claim, units in ((SEEDS, 6), (FORKS, 5)):
        assert told[claim].seen and told[claim].units == units and told[claim].source.startswith("seen in 3")
        assert told[claim].spread == pytest.approx(float(np.std(GAPS, ddof=1)), rel=0.02)
        assert told[claim].expected_half_width == pytest.approx(power.half_width(told[claim].spread, units))
    again = of(design.design(cfg, None, tmp_path, forks=5, seeds=6, fresh=True))
    assert not again[SEEDS].seen and not again[FORKS].seen, "what is trained again shows nothing yet"


def test_unpaired_runs_have_no_gap(cfg, tmp_path: Path) -> None:
    played(cfg, tmp_path, seeds=3, forks=3, but=("high-precision-seed-2", "fork-2-high-precision"))
    told = of(design.design(cfg, None, tmp_path, forks=3, seeds=3))
    two = float(np.std(GAPS[:2], ddof=1))
    assert told[SEEDS].source == "seen in 2 pairs of seeds here" and told[SEEDS].spread == pytest.approx(two, rel=0.02)
    assert told[FORKS].source == "seen in 2 forks here" and told[FORKS].spread == pytest.approx(two, rel=0.02)


def test_earlier_answers_determine_the_spread_of_sources(cfg, tmp_path: Path) -> None:
    played(cfg, tmp_path, seeds=1, forks=0)
    ours, theirs = judged(0.97, gemms=30, seed=1), judged(0.98, 0.101)
    for name, found in (("fp8-blockwise", ours), ("fp8-blockwise-high", theirs), ("high-precision", theirs)):
        run = name.removesuffix("-high")
        result = (tmp_path / "arms" / run / "result.json").read_text()
        (tmp_path / "held-out").mkdir(exist_ok=True)
        kept = {"of": {"run": run, "result": result}, "gemms": found.gemms, "pieces": found.pieces}
        (tmp_path / "held-out" / f"{name}.json").write_text(json.dumps(kept))
    told = of(design.design(cfg, None, tmp_path))
    accuracy = claims.paired_accuracy(ours.pieces, theirs.pieces)
    assert told["accuracy"].seen and told["accuracy"].units == 400
    assert told["accuracy"].expected_half_width == pytest.approx(accuracy.half)
    assert told[WEIGHTS].expected_half_width == pytest.approx(claims.relative_loss(ours.pieces, theirs.pieces).half)
    (tmp_path / "arms" / "fp8-blockwise" / "result.json").write_text('{"status": "finished", "steps": 120, "x": 1}')
    assert not of(design.design(cfg, None, tmp_path))["accuracy"].seen, "of other weights"


def test_zero_spread_is_ignored(cfg, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("octavo.report.trial.design.pair_gaps", lambda sides: [0.0, 0.0])
    played(cfg, tmp_path, seeds=2, forks=0)
    assert not of(design.design(cfg, None, tmp_path, seeds=2))[SEEDS].seen


def test_phases_have_their_claims(cfg, tmp_path: Path) -> None:
    words = of(design.design(override(cfg, ["train.phase=pretrain"]), None, tmp_path, seeds=3))
    assert list(words) == [WEIGHTS, SEEDS], "plain text asks nothing"
    over = ["train.phase=preference", "preference={}"]
    one, three = (of(design.design(override(cfg, over), None, tmp_path, seeds=n)) for n in (1, 3))
    assert list(three) == ["accuracy"] and three["accuracy"].margin == 0.02
    assert three["accuracy"].spread == pytest.approx(one["accuracy"].spread / 3**0.5)
    with pytest.raises(ReportError, match="forks=2: forks compare losses"):
        design.design(override(cfg, over), None, tmp_path, forks=2)


def test_impossible_forks_have_no_estimate(cfg, tmp_path: Path) -> None:
    found = design.design(override(cfg, ["train.steps=10"]), None, tmp_path, forks=3)
    assert found.forks == 0 and "cannot diverge" in of(found)[FORKS].line
    assert not [run for run in found.runs if run.kind == "fork"] and of(found)[FORKS].to_json()["why_not"]


def test_expectation_is_kept_and_shown_with_the_result(cfg, tmp_path: Path, monkeypatch, sound_answers):
    import octavo.train

    monkeypatch.setattr("octavo.report.trial.report_page.draw_plots", lambda *_: ({"loss": "", "gap": ""}, []))
    monkeypatch.setattr(octavo.train, "run", lambda cfg, **_: SimpleNamespace(status="stopped", steps=7, exit_code=130))
    played(cfg, tmp_path, seeds=2, forks=0)
    with pytest.raises(ReportError, match="was stopped"):
        compare(cfg, None, tmp_path, forks=0, seeds=3)
    played(cfg, tmp_path, seeds=3, forks=0, but=tuple(folder.name for folder in (tmp_path / "arms").iterdir()))
    verdict = compare(cfg, None, tmp_path, forks=0, seeds=3)
    told = next(one for one in verdict.data["power"] if one["claim"] == SEEDS)
    assert told["spread"] == pytest.approx(np.std(GAPS[:2], ddof=1), rel=0.02), "as it was said before the third seed"
    claim = next(claim for claim in verdict.claims if claim.name == SEEDS)
    assert told["came"] == {"FP8 blockwise": pytest.approx((claim.high - claim.low) / 2)}
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Expected +-0.53 %, measured +-0.75 %" in page
    noted = json.loads((tmp_path / "power.json").read_text())["designs"]
    assert [one["asked"]["seeds"] for one in noted] == [3]
    compare(cfg, None, tmp_path, forks=0, seeds=1)
    assert len(json.loads((tmp_path / "power.json").read_text())["designs"]) == 2
