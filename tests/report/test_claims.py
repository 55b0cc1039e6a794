"""Claims: intervals against what they say of chance, and trials planted so that a wrong verdict would be easy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_runs import GOOD_PROOF, health, held, judged, losses, plan, write_run

from octavo.config import override, to_yaml
from octavo.fp8.arithmetic import CastTable
from octavo.report import ReportError, Trial, judge
from octavo.report.evidence import claims
from octavo.report.evidence.claims import Evaluation, Interval, decide
from octavo.report.evidence.trust_table import FAIL, PASS, UNDECIDED, UNTRIED, WARN
from octavo.report.trial.reuse import read_finished
from octavo.report.trial.runs import make_runs


def pieces(right: np.ndarray, sources: np.ndarray, loss: np.ndarray | None = None) -> list[dict[str, Any]]:
    nats = np.ones(len(right)) if loss is None else loss
    return [
        {"file": "f", "row": n, "answer": 0, "loss": float(nats[n]), "tokens": 1, "right": bool(hit), "said": "a",
         "source": str(sources[n])}
        for n, hit in enumerate(right)
    ]  # fmt: skip


def test_accuracy_interval_counts_sources() -> None:
    """1,000 questions about 50 images that are right or wrong together tell as much as 50."""
    rng = np.random.default_rng(0)
    sources, covered, narrow = np.repeat(np.arange(50), 20), 0, 0
    for _ in range(200):
        ours, theirs = (np.repeat(rng.uniform(size=50) < 0.8, 20) for _ in range(2))
        found = claims.paired_accuracy(pieces(ours, sources), pieces(theirs, sources))
        apart = claims.paired_accuracy(pieces(ours, np.arange(1000)), pieces(theirs, np.arange(1000)))
        assert found is not None and apart is not None
        covered += found.low <= 0 <= found.high
        narrow += apart.low <= 0 <= apart.high
    assert covered >= 0.92 * 200 and narrow < 0.6 * 200


@pytest.mark.parametrize(("questions", "within"), [(10, False), (100, False), (400, True)])
def test_zero_observed_difference_has_nonzero_interval(questions: int, within: bool) -> None:
    same = pieces(np.ones(questions), np.arange(questions))
    found = claims.paired_accuracy(same, same)
    assert found is not None and found.estimate == 0
    assert (found.half < claims.ACCURACY_MARGIN) == within
    ten = pieces(np.ones(4000), np.arange(4000) % 10)  # of ten images, however many questions
    for sign, ours, theirs in ((-1, np.zeros(400), np.ones(400)), (1, np.ones(400), np.zeros(400))):
        apart = claims.paired_accuracy(pieces(ours, np.arange(400)), pieces(theirs, np.arange(400)))
        assert apart is not None and apart.estimate == sign and -1 <= apart.low < apart.high <= 1
        assert min(sign * apart.low, sign * apart.high) > 0.9
    few = claims.paired_accuracy(ten, ten)
    assert few is not None and few.half > 0.1
    assert claims.paired_accuracy(pieces(np.ones(9), np.zeros(9)), pieces(np.ones(9), np.zeros(9))) is None


def test_relative_loss_pairs_the_same_tokens() -> None:
    rng = np.random.default_rng(1)
    sources, covered = np.repeat(np.arange(100), 5), 0
    for _ in range(200):
        theirs = rng.gamma(2, 1, 500)
        ours = theirs * (1.01 + np.repeat(rng.normal(0, 0.02, 100), 5))
        one = np.ones(500)
        found = claims.relative_loss(pieces(one, sources, ours), pieces(one, sources, theirs))
        assert found is not None
        covered += found.low <= 0.01 <= found.high
    assert 0.9 * 200 <= covered <= 199
    assert claims.relative_loss(pieces(one, sources, ours * np.nan), pieces(one, sources, theirs)) is None


def test_mean_gap_of_forks_has_student_interval() -> None:
    found = claims.mean_gap([0.001, 0.002, 0.003])
    assert found is not None
    assert (found.estimate, found.half, found.units) == (pytest.approx(0.002), pytest.approx(0.002484, abs=1e-6), 3)
    assert claims.mean_gap([0.001]) is None and claims.mean_gap([0.001, float("nan")]) is None


def test_different_questions_are_rejected() -> None:
    with pytest.raises(ReportError, match="to different questions"):
        claims.paired_accuracy(pieces(np.ones(4), np.arange(4)), pieces(np.ones(5), np.arange(5)))


def say(low: float, high: float, **more: Any) -> Any:
    found = Interval((low + high) / 2, low, high, 100)
    fixed = {"unit": "forks", "scale": lambda x: f"{100 * x:+.2f} %", "worse": 1} | more
    return decide("loss_forks", "Loss", "FP8", found, 0.0025, **fixed)


@pytest.mark.parametrize(
    ("low", "high", "status"),
    [
        (-0.002, 0.0025, PASS), (-0.001, 0.003, UNDECIDED), (-0.01, 0.01, UNDECIDED), (0.0024, 0.004, UNDECIDED),
        (0.0026, 0.004, FAIL), (-0.004, -0.0026, WARN), (-0.003, 0.001, PASS),
    ],
)  # fmt: skip
def test_decision_follows_interval_and_margin(low: float, high: float, status: str) -> None:
    check = say(low, high)
    assert (check.status, check.low, check.high, check.margin) == (status, low, high, 0.0025)
    assert ("more forks would" in check.sentence) == (status == UNDECIDED)


def test_reason_not_to_pass_does_not_hide_harm() -> None:
    assert say(-0.001, 0.001, why_not="nothing was learned").status == UNDECIDED
    assert say(0.003, 0.004, why_not="nothing was learned").status == FAIL
    assert say(-0.004, -0.003, worse=-1).status == FAIL  # of accuracies less is worse


def test_undecided_claim_reports_required_units() -> None:
    few, many = (int(say(0.001 - h, 0.001 + h).sentence.split("about ")[1].split()[0]) for h in (0.002, 0.004))
    assert 70 <= few <= 85 and 590 <= many <= 640  # (h / 0.0015)^2 times a hundred, less the hundred
    assert "more than 100,000 forks would be needed" in say(0.0015, 0.0035).sentence


# --- planted trials -----------------------------------------------------------------------------------------------


@pytest.fixture
def verdict_of(cfg: Any, tmp_path: Path):
    """The verdict of a trial of 120 steps with three forks; keywords plant what is wrong with it."""

    def make(
        steps: int = 120, lr: float = 1e-3, shift: float = 0.0, forks: int = 3, seeds: int = 1, learns: bool = True,
        proof: Any = GOOD_PROOF, gemms: int = 30, fp8: float = 0.98, drift: float = 0.0, questions: bool = True,
        no_forks: str = "",
    ) -> Any:  # fmt: skip
        config = override(cfg, [f"train.steps={steps}"])
        runs = make_runs(config, ["blockwise"], tmp_path / "trial", forks=forks, seeds=seeds)
        for run in runs:
            fp8_run = run.kind in ("fp8", "seed") or bool(run.of)
            seed = run.cfg.run.seed
            curve = losses(steps, 0.002 * seed + (shift + 1e-5 * run.number if fp8_run else 0), seed)
            curve = curve if learns else np.full(steps, 3.0)
            extra = {"tables": {1: health()}, "plan_json": plan(), "proof": proof} if fp8_run else {}
            write_run(Path(run.cfg.run.dir), curve, config=to_yaml(run.cfg), lr=lr, begins=run.begins, **extra)
        found = held(runs, fp8, drift, before=3.0 if learns else 0.1) if questions else None
        if found is not None:
            found.runs["fp8-blockwise"] = Evaluation(found.runs["fp8-blockwise"].pieces, gemms)
        verdict = judge([(run, read_finished(run)) for run in runs], Trial(found, forks, no_forks, seeds))
        return verdict, {claim.name: claim.status for claim in verdict.claims}

    return make


def test_sound_trial_passes_all_claims(verdict_of) -> None:
    verdict, told = verdict_of(seeds=3)
    assert told == dict.fromkeys(("accuracy", "loss_same_weights", "loss_forks", "loss_trajectories"), PASS)
    assert verdict.exit_code == 0 and verdict.line.startswith(
        "PASS: FP8 blockwise compared with fp32: held-out accuracy pass"
    )
    forks = next(claim for claim in verdict.claims if claim.name == "loss_forks")
    assert "3 forks" in forks.sentence and len(verdict.lines) == 5
    trajectories = verdict.claims[3].sentence
    assert "3 pairs of seeds" in trajectories and "another seed changes" in trajectories


@pytest.mark.parametrize(
    ("planted", "expected", "sentence"),
    [
        ({"questions": False}, {"accuracy": UNDECIDED, "loss_same_weights": UNDECIDED}, "set data.eval"),
        ({"lr": 0.0}, {"accuracy": UNDECIDED, "loss_forks": UNDECIDED}, "no step of high precision changed a weight"),
        ({"learns": False}, {"accuracy": UNDECIDED, "loss_forks": UNDECIDED}, "learned nothing, judging by held-out "
        "data"),
        ({"learns": False, "questions": False}, {"loss_forks": UNDECIDED}, "learned nothing, judging by its losses"),
        ({"no_forks": "forks of 4 steps", "forks": 0}, {"loss_forks": UNDECIDED}, "forks of 4 steps"),
        ({"forks": 1}, {"loss_forks": UNDECIDED}, "use 3 or more"),
        ({"forks": 0}, {"loss_forks": UNTRIED, "accuracy": PASS}, "--forks 3"),
        ({"shift": 0.02}, {"loss_forks": FAIL}, "FP8 made this training worse"),
        ({"fp8": 0.9}, {"accuracy": FAIL}, "FP8 made this training worse"),
        ({"drift": 0.01}, {"loss_same_weights": FAIL, "accuracy": PASS}, "FP8 made this training worse"),
        ({"gemms": 0}, {"loss_same_weights": FAIL}, "used no FP8 GEMM"),
        ({"proof": {**GOOD_PROOF, "fp8_gemms": 0}}, {"accuracy": PASS}, "no FP8 GEMM was counted"),
    ],
)  # fmt: skip
def test_planted_trials_get_expected_verdicts(verdict_of, planted, expected, sentence: str) -> None:
    verdict, told = verdict_of(**planted)
    assert {name: told[name] for name in expected} == expected
    assert any(sentence in line for line in verdict.lines)
    silent = planted.get("proof") is not None
    worst = FAIL if silent or FAIL in expected.values() else UNDECIDED if UNDECIDED in expected.values() else PASS
    assert verdict.status == worst and verdict.exit_code == {FAIL: 1, UNDECIDED: 3, PASS: 0}[worst]


def test_constant_answers_are_uninformative(verdict_of) -> None:
    """What nobody answers tells nothing, with ten questions or 2,000; nor does one answer to everything."""
    for n in (10, 2000):
        none = judged(0.0, questions=n)
        assert not claims.beats_constant_answer(none.pieces)
    constant = judged(1.0)
    same = tuple({**piece, "right": piece["said"] == "3"} for piece in constant.pieces)
    assert not claims.beats_constant_answer(same) and claims.beats_constant_answer(constant.pieces)


def test_plain_text_has_no_accuracy_claim(cfg, tmp_path: Path) -> None:
    runs = make_runs(cfg, ["blockwise"], tmp_path / "trial")
    found = held(runs)
    for judged_of in (found.runs, found.high):
        for name, one in judged_of.items():
            text = tuple({**piece, "answer": None, "right": None, "said": None} for piece in one.pieces)
            judged_of[name] = Evaluation(text, one.gemms)
    found.before = Evaluation(tuple({**p, "answer": None, "right": None, "said": None} for p in found.before.pieces), 0)
    for run in runs:
        extra = {"tables": {1: health()}, "plan_json": plan(), "proof": GOOD_PROOF} if "fp8" in run.name else {}
        write_run(Path(run.cfg.run.dir), losses(100), config=to_yaml(run.cfg), **extra)
    verdict = judge([(run, read_finished(run)) for run in runs], Trial(found))
    assert [claim.name for claim in verdict.claims][0] == "loss_same_weights" and verdict.claims[0].status == PASS


def test_unsound_fork_fails_the_claim(cfg, tmp_path: Path) -> None:
    runs = make_runs(override(cfg, ["train.steps=120"]), ["blockwise"], tmp_path / "trial", forks=2)
    for run in runs:
        extra = {"tables": {1: health()}, "plan_json": plan(), "proof": GOOD_PROOF} if "fp8" in run.name else {}
        write_run(Path(run.cfg.run.dir), losses(120), config=to_yaml(run.cfg), begins=run.begins, **extra)
    records = [(run, read_finished(run)) for run in runs]

    def claim_of(records: Any) -> Any:
        verdict = judge(records, Trial(held(runs), forks=2))
        return next(claim for claim in verdict.claims if claim.name == "loss_forks")

    assert claim_of(records).status != FAIL
    skipping = [(a, replace(r, skipped=(90, 91)) if a.number else r) for a, r in records]
    assert "skipped 2 of 40 steps" in claim_of(skipping).sentence
    other = [(a, replace(r, plan={"rows": r.plan["rows"][1:]}) if a.of and a.number else r) for a, r in records]
    assert "has a different plan from FP8 blockwise (1 layers, first model.visual" in claim_of(other).sentence
    line, table = {"match": "model.layers.0", "recipe": "blockwise", "format": "e4m3"}, CastTable().to_json()
    old = {"blockwise e4m3": {**table["blockwise e4m3"], "wgrad": "e4m3 128x1 pow2 @ e4m3 128x1 pow2"}}
    for changed, differs in (
        ({"casts": old}, True),
        ({"casts": {"rowwise e4m3": table["rowwise e4m3"]}}, False),
        ({}, True),  # as of 0.5.0, which wrote no casts
        ({"casts": {}, "layers": [{**line, "wgrad": "tensorwise"}]}, True),
    ):
        plans = [{"layers": [line], "casts": {}}, {"layers": [line], **changed}]
        casts = [(a, replace(r, plan=plans[bool(a.of and a.number)])) for a, r in records]
        assert ("has a different plan" in claim_of(casts).sentence) is differs
    high = [(a, replace(r, proof={}) if a.of and a.number else r) for a, r in records]
    assert claim_of(high).status == FAIL and "nothing shows that FP8 ran" in claim_of(high).sentence
    broken = [(a, replace(r, failure="step 90: weights") if a.of and a.number else r) for a, r in records]
    claim = claim_of(broken)
    assert claim.status == FAIL and "fork 2: step 90: weights" in claim.sentence


def test_model_that_was_already_accurate_is_undecided(cfg, tmp_path: Path) -> None:
    runs = make_runs(cfg, ["blockwise"], tmp_path / "trial")
    found = held(runs)
    found.before = judged(0.98, 3.0)
    for run in runs:
        extra = {"tables": {1: health()}, "plan_json": plan(), "proof": GOOD_PROOF} if "fp8" in run.name else {}
        write_run(Path(run.cfg.run.dir), losses(100), config=to_yaml(run.cfg), **extra)
    verdict = judge([(run, read_finished(run)) for run in runs], Trial(found))
    assert verdict.claims[0].status == UNDECIDED
    assert "the model before training answers as well" in verdict.claims[0].sentence


# --- the held-out loss of the trained models, judged only where a trial names this claim ------------------------------


@pytest.mark.parametrize(
    ("drift", "changes", "status", "sentence"),
    [
        (0.002, {}, PASS, "0.0508 nats a token, high precision 0.0507, before training 1.5208"),
        (0.02, {}, FAIL, "FP8 made this training worse"),
        (-0.02, {}, WARN, "better than high precision by more than the margin"),
        (0.002, {"learns": False}, UNDECIDED, "learned nothing, judging by held-out data"),
        (0.002, {"gemms": 0}, FAIL, "used no FP8 GEMM"),
        (0.002, {"gemms": 0, "fwd": "bf16"}, PASS, "nats a token"),  # a forward in high precision has no FP8 GEMM
        (0.002, {"questions": False}, UNDECIDED, "set data.eval"),
    ],
)
def test_held_out_loss_is_judged_by_its_own_margin(
    cfg: Any, tmp_path: Path, drift: float, changes: dict[str, Any], status: str, sentence: str
) -> None:
    runs = make_runs(cfg, ["blockwise"], tmp_path / "trial", claims=("loss_held_out",))
    assert [run.kind for run in runs] == ["reference", "fp8"], "no run with another seed, no fork"
    planned = plan()
    for row in planned["rows"]:
        row["recipe"] = row["recipe"] and {**row["recipe"], "fwd": changes.get("fwd", "fp8")}
    for run in runs:
        extra = {"tables": {1: health()}, "plan_json": planned, "proof": GOOD_PROOF} if "fp8" in run.name else {}
        write_run(Path(run.cfg.run.dir), losses(100), config=to_yaml(run.cfg), **extra)
    found = held(runs, drift=drift, before=3.0 if changes.get("learns", True) else 0.1)
    name = runs[1].name
    found.runs[name] = replace(found.runs[name], gemms=changes.get("gemms", 30))
    questions = found if changes.get("questions", True) else None
    trial = Trial(questions, claims=("loss_held_out",), loss_margin=0.01)
    verdict = judge([(run, read_finished(run)) for run in runs], trial)
    (claim,) = verdict.claims
    assert (claim.name, claim.status) == ("loss_held_out", status) and sentence in claim.sentence
    assert claim.margin in (0.01, None) and len(verdict.headline.split()) <= 12


def test_held_out_loss_is_no_default_claim(verdict_of) -> None:
    _, told = verdict_of(drift=0.02)
    assert "loss_held_out" not in told
