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


def test_spreads_are_assumed_without_earlier_runs(cfg, tmp_path: Path) -> None:
    found = design.design(cfg, None, tmp_path / "trial", forks=3, seeds=2)
    told = of(found)
    assert list(told) == ["accuracy", WEIGHTS, FORKS, SEEDS] and not any(e.seen for e in told.values())
    assert told["accuracy"].units == told[WEIGHTS].units == 40 and told[FORKS].units == 3 and told[SEEDS].units == 2
    assert told[FORKS].pass_probability > 0.99 and told[SEEDS].pass_probability < 0.2 and told[SEEDS].needed == 6
    assert found.lines[3] == (
        "  Loss of forks: +-0.032 % from 3 forks, margin 0.25 %: passes with probability 100 %, 80 % power needs 2; "
        "spread 0.013 %, assumed, as in docs/studies.md"
    )
    assert not (tmp_path / "trial").exists(), "nothing is written"
    alone = of(design.design(override(cfg, ["data.eval=[]"]), None, tmp_path / "trial"))
    assert list(alone) == ["accuracy", WEIGHTS] and "set data.eval" in alone["accuracy"].line
    lost = of(design.design(override(cfg, ["data.eval=[{path: gone.json}]"]), None, tmp_path / "trial"))
    assert "held-out data cannot be counted: " in lost[WEIGHTS].line and "gone.json" in lost[WEIGHTS].line


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
    assert told[WEIGHTS].half == pytest.approx(claims.relative_loss(ours.pieces, theirs.pieces).half)
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
    monkeypatch.setattr(octavo.train, "run", lambda cfg, **_: SimpleNamespace(status="stopped", steps=7))
    with pytest.raises(ReportError, match="was stopped"):
        compare(cfg, None, tmp_path, forks=0, seeds=3)
    played(cfg, tmp_path, seeds=3, forks=0)
    verdict = compare(cfg, None, tmp_path, forks=0, seeds=3)
    told = next(one for one in verdict.data["power"] if one["claim"] == SEEDS)
    assert told["spread"] == design.PAIR_SPREAD and not told["seen"], "as it was said before any run"
    claim = next(claim for claim in verdict.claims if claim.name == SEEDS)
    assert told["came"] == {"FP8 blockwise": pytest.approx((claim.high - claim.low) / 2)}
    page = (tmp_path / "report" / "report.html").read_text()
    assert "expected +-0.42 %, measured +-0.75 %" in page
    noted = json.loads((tmp_path / "power.json").read_text())["designs"]
    assert [one["asked"]["seeds"] for one in noted] == [3]
    compare(cfg, None, tmp_path, forks=0, seeds=1)
    assert len(json.loads((tmp_path / "power.json").read_text())["designs"]) == 2


def test_assumed_spreads_have_sources() -> None:
    """The figures that the demo's trial was recorded with, and those of the page that tells them."""
    checks = json.loads((ROOT / "benchmarks/results/demo_cpu.json").read_text())["checks"]
    for claim, spread in (("accuracy", design.ANSWER_SPREAD), (WEIGHTS, design.WEIGHTS_SPREAD)):
        found = next(check for check in checks if check["name"] == claim)
        assert power.spread_from_half_width((found["high"] - found["low"]) / 2, 355) == pytest.approx(spread, abs=5e-4)
    seeds = [np.var(each, ddof=1) for each in ((0.0030, -0.0065, 0.0125), (-0.0175, 0.0045, 0.0005))]
    assert np.mean(seeds) ** 0.5 == pytest.approx(design.SEED_SPREAD, abs=1e-4)
    study = json.loads((ROOT / "benchmarks/results/study_pretraining.json").read_text())["rows"]
    forks = [np.var(one["gaps"], ddof=1) for one in study if one["design"] == "forks after step 400"]
    assert np.mean(forks) ** 0.5 == pytest.approx(design.FORK_SPREAD, rel=0.05)
    pairs = next(one["gaps"] for one in study if one["design"] == "trajectories, training loss of all steps")
    assert np.std(pairs, ddof=1) == pytest.approx(design.PAIR_SPREAD, rel=0.05)
    page = (ROOT / "docs/trials.md").read_text()
    for spread in (design.PAIR_SPREAD, design.FORK_SPREAD, design.ANSWER_SPREAD, design.WEIGHTS_SPREAD,
                   design.SEED_SPREAD):  # fmt: skip
        assert f"| {100 * spread:.3g} " in page
